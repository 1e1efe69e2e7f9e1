"""torch's Muon in three passes over all matrices: momentum, products of stacked matrices, write.

Left out, so that torch steps: sharded matrices, and options that torch's Muon does not have yet.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastamp import _ops
from fastamp._ops import ANOTHER_TYPE, NO_STATE, PLAIN_TYPES, fallback, kept

RULE = "Muon"
MODULE = "torch.optim._muon"
"""Where the class is; its `__module__` says torch.optim."""
STATES = (("momentum_buffer", ""),), False, "zeros of the gradient"
"""As the core declares those of other rules: names, whether steps are counted, how they begin."""
_PASSES = "Muon, momentum", "Muon, write"  # declarations in csrc/step/rules.h
OPTIONS = {"lr", "weight_decay", "momentum", "nesterov"}
OPTIONS |= {"ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"}
OPTIONS |= {"differentiable"}  # False: a loaded optimizer has it

# Bytes of directions that are held at a time; the products take about three times as much beside.
_ROUND = 64 << 20
# Bytes of matrices that are multiplied together. On the CPU more of them would leave the caches
# between two products: there a stack of 3 with 384 rows is faster than one of 12, or a loop.
_CPU_STACK = 1 << 20
_LINE = 128  # bytes: where a stack starts, so that vectors are aligned


class _Matrix(NamedTuple):
    group: dict[str, Any]
    param: Tensor
    grad: Tensor
    buffer: Tensor

    def kind(self) -> tuple[Any, ...]:
        """Return what matrices of one stack have in common."""
        own = self.group
        return self.param.shape, tuple(own["ns_coefficients"]), own["ns_steps"], own["eps"]

    def lr_ratio(self) -> float:
        """Return what multiplies the learning rate of this shape."""
        return _RATIOS[self.group["adjust_lr_fn"]](*self.param.shape)


class _Round(NamedTuple):
    """Matrices whose directions are held at a time."""

    matrices: list[_Matrix]
    directions: list[Tensor]
    """One for each matrix, to be orthogonalized in place: views of the stacks."""
    stacks: list[tuple[Tensor, tuple[Any, ...]]]
    """Each with its kind."""

    def read_passes(self, core: Any, momentum: Any, write: Any) -> list[Any]:
        """Read the core's two passes; a reason in place of one says why torch has to step.

        In the first one the directions stand for parameters, in the second one for gradients.
        """
        alike: dict[tuple[int, torch.Size], list[int]] = {}
        for place, matrix in enumerate(self.matrices):
            alike.setdefault((id(matrix.group), matrix.param.shape), []).append(place)
        order = [place for places in alike.values() for place in places]
        params = [matrix.param for matrix in self.matrices]
        groups: list[list[dict[str, Any]]] = [[], []]
        for places in alike.values():
            first = self.matrices[places[0]]
            options = {**first.group, "lr_ratio": first.lr_ratio()}
            for found, own in zip(groups, (self.directions, params), strict=True):
                found.append({**options, "params": [own[place] for place in places]})
        states = {
            direction: {"momentum_buffer": matrix.buffer}
            for matrix, direction in zip(self.matrices, self.directions, strict=True)
        }
        grads = [self.matrices[place].grad for place in order]
        directions = [self.directions[place] for place in order]
        return [
            core.read(momentum, groups[0], states, grads),
            core.read(write, groups[1], {}, directions),
        ]

    def add_momentum(self, factor: float) -> None:
        """Make the core's first pass in torch's operators, each rounded by itself."""
        for (group, _, grad, buffer), direction in zip(self.matrices, self.directions, strict=True):
            momentum = group["momentum"]
            values = grad.float() * factor
            mean = _interpolated(buffer.float(), values, 1 - momentum)
            buffer.copy_(mean)
            direction.copy_(_interpolated(values, mean, momentum) if group["nesterov"] else mean)

    def write(self) -> None:
        """Make the core's second pass in torch's operators."""
        for matrix, direction in zip(self.matrices, self.directions, strict=True):
            lr = float(matrix.group["lr"])
            kept_ = matrix.param.float() * (1 - lr * matrix.group["weight_decay"])
            matrix.param.copy_(kept_ - direction.float() * (lr * matrix.lr_ratio()))


class MuonBackend:
    """Steps of Muon on one device; see `Backend` in _native.pyi.

    Args:
        device: of the matrices.
        core: the core's backend of the device; None makes all passes in torch's operators.
    """

    def __init__(self, device: torch.device, core: Any) -> None:
        self.device, self.core = device, core
        self._updates = [] if core is None else [_ops.core().Update(name) for name in _PASSES]

    def read(
        self,
        _update: object,
        groups: list[dict[str, Any]],
        states: dict[Tensor, Any],
        grads: list[Tensor] | None,
    ) -> list[tuple[_Round, list[Any]]] | str:
        """Find what a step reads and writes, or say why it cannot be made here."""
        if grads is not None:
            return "a matrix is sharded"
        by_kind: dict[tuple[Any, ...], dict[int, _Matrix]] = {}
        for group, param in ((own, param) for own in groups for param in own["params"]):
            if param.grad is None:
                continue
            state = states.get(param) or {}
            if why := _refusal(group, param, state, self.device):
                return why
            matrix = _Matrix(group, param, param.grad, state["momentum_buffer"])
            if by_kind.setdefault(matrix.kind(), {}).setdefault(id(param), matrix) is not matrix:
                return "a parameter is twice in a group"
        reads = []
        for each in _rounds([[*found.values()] for found in by_kind.values()], self.device):
            passes = each.read_passes(self.core, *self._updates) if self._updates else []
            for found in passes:
                if isinstance(found, str):
                    return found
            reads.append((each, passes))
        return reads or "no parameter has a gradient"

    @torch.no_grad()
    def apply(
        self,
        _update: object,
        read: list[tuple[_Round, list[Any]]],
        factor: Tensor | None,
        found_inf: Tensor | None,
        drops: bool,  # noqa: FBT001 - the core's signature
    ) -> None:
        """Multiply the gradients and update, unless `found_inf` is 1.0.

        On a device the core's kernels look at the flag, and the products are made in any case.
        """
        is_skipped = False
        if found_inf is not None and (self.core is None or not self.core.is_apart):
            is_skipped = bool(found_inf.item())
        for each, passes in () if is_skipped else read:
            if passes:
                self.core.apply(self._updates[0], passes[0], factor, found_inf, drops)
            else:
                each.add_momentum(1.0 if factor is None else factor.item())
            for stack, kind in each.stacks:
                orthogonalize_(stack, *kind[1:])
            if passes:
                self.core.apply(self._updates[1], passes[1], None, found_inf, True)
                continue
            each.write()
            if factor is not None and not drops:
                fallback.rescale_([matrix.grad for matrix in each.matrices], factor)
        for each, _ in read if drops else ():
            for matrix in each.matrices:
                matrix.param.grad = None

    def step(self, *_: object) -> str:
        """Ask for a step in halves, the only one that is made here."""
        return ANOTHER_TYPE


def _refusal(  # noqa: PLR0911 - one row a reason
    group: dict[str, Any], param: Tensor, state: dict[str, Any], device: torch.device
) -> str:
    """Say why a matrix is left to torch's step, which may raise its own error; "" if it is not."""
    grad: Any = param.grad
    if type(param) not in PLAIN_TYPES or type(grad) not in PLAIN_TYPES or param.is_meta:
        return "a parameter is of another type"
    if not grad.device == param.device == device:
        return "parameters on several devices"
    if param.dim() != 2 or param.numel() == 0:
        return "a parameter is no matrix"
    if {param.dtype, grad.dtype} - {*kept.DTYPES}:
        return f"a parameter or gradient is neither of {kept.DTYPES}"
    if grad.layout is not torch.strided or grad.shape != param.shape:
        return "a gradient's shape or layout"
    if group["adjust_lr_fn"] not in _RATIOS:
        return f"adjust_lr_fn={group['adjust_lr_fn']!r}"
    if len(group["ns_coefficients"]) != 3 or group["ns_steps"] >= 100:
        return "ns_coefficients or ns_steps"
    return "" if "momentum_buffer" in state else NO_STATE


def _original(rows: int, columns: int) -> float:
    return math.sqrt(max(1, rows / columns))


def _match_rms_adamw(rows: int, columns: int) -> float:
    return 0.2 * math.sqrt(max(rows, columns))


_RATIOS = {None: _original, "original": _original, "match_rms_adamw": _match_rms_adamw}
"""What multiplies the learning rate of a matrix, by `adjust_lr_fn`."""


def _rounds(of_kinds: list[list[_Matrix]], device: torch.device) -> list[_Round]:
    """Stack matrices of each kind, and lay the stacks out in memory that all rounds share.

    A round is written before the next one is read.
    """
    most = _CPU_STACK if device.type == "cpu" else _ROUND
    planned: list[list[tuple[int, list[_Matrix]]]] = []
    end = largest = 0
    for matrices in of_kinds:
        nbytes = 2 * matrices[0].param.numel()
        count = max(1, most // nbytes)
        for some in (matrices[i : i + count] for i in range(0, len(matrices), count)):
            if not planned or end + len(some) * nbytes > _ROUND:
                planned.append([])
                end = 0
            planned[-1].append((end // 2, some))
            end = -(-(end + len(some) * nbytes) // _LINE) * _LINE
            largest = max(largest, end)
    memory = torch.empty(largest // 2, dtype=torch.bfloat16, device=device)
    return [_round_of(plan, memory) for plan in planned]


def _round_of(plan: list[tuple[int, list[_Matrix]]], memory: Tensor) -> _Round:
    found = _Round([], [], [])
    for start, matrices in plan:
        shape = (len(matrices), *matrices[0].param.shape)
        stack = memory[start : start + math.prod(shape)].view(shape)
        found.matrices.extend(matrices)
        found.directions.extend(stack.unbind())
        found.stacks.append((stack, matrices[0].kind()))
    return found


def orthogonalize_(
    stack: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> None:
    """Orthogonalize stacked bfloat16 matrices in place, by the Newton-Schulz steps of torch's Muon.

    Args:
        stack: (matrices, rows, columns); each matrix gets the operations that torch's gets.
        coefficients: of the polynomial.
        steps: how often it is applied.
        eps: least norm that a matrix is divided by.
    """
    a, b, c = coefficients
    wide = stack.mT if stack.size(1) > stack.size(2) else stack
    norms = torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True)
    found = wide.div_(norms.clamp(min=eps))
    for _ in range(steps):
        gram = torch.bmm(found, found.mT)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.baddbmm(found, gram, found, beta=a)
    wide.copy_(found)


def _interpolated(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """Interpolate from the nearer end, as torch.lerp does."""
    if abs(weight) < 0.5:
        return start + (end - start) * weight
    return end + (end - start) * (weight - 1)
