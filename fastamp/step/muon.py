"""torch's Muon in three passes over all matrices: momentum, products of stacked matrices, write.

Left out, so that torch steps: sharded matrices, and options that torch's Muon does not have yet.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastamp._ops import ANOTHER_TYPE, NO_STATE, PLAIN_TYPES, fallback, kept

RULE = "Muon"
MODULE = "torch.optim._muon"
"""Where the class is; its `__module__` says torch.optim."""
STATES = (("momentum_buffer", ""),), False, "zeros of the gradient"
"""As the core declares those of other rules: names, whether steps are counted, how they begin."""
OPTIONS = {"lr", "weight_decay", "momentum", "nesterov"}
OPTIONS |= {"ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"}
OPTIONS |= {"differentiable"}  # False: a loaded optimizer has it

# Bytes of directions that are held at a time; the products take about three times as much beside.
_ROUND = 64 << 20
# Bytes of matrices that are multiplied together. On the CPU more of them would leave the caches
# between two products: there a stack of 3 with 384 rows is faster than one of 12, or a loop.
_CPU_STACK = 1 << 20
_ALIGNED = 64  # elements: stacks start at whole cache lines


class _Matrix(NamedTuple):
    group: dict[str, Any]
    param: Tensor
    grad: Tensor
    buffer: Tensor

    def kind(self) -> tuple[Any, ...]:
        """Return what matrices of one stack have in common."""
        own = self.group
        return self.param.shape, tuple(own["ns_coefficients"]), own["ns_steps"], own["eps"]


class _Round(NamedTuple):
    """Matrices whose directions are held at a time."""

    matrices: list[_Matrix]
    directions: list[Tensor]
    """One for each matrix, to be orthogonalized in place: views of the stacks."""
    stacks: list[tuple[Tensor, tuple[Any, ...]]]
    """Each with its kind."""


class MuonBackend:
    """Steps of Muon on one device; see `Backend` in _native.pyi."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def read(
        self,
        _update: object,
        groups: list[dict[str, Any]],
        states: dict[Tensor, Any],
        grads: list[Tensor] | None,
    ) -> list[_Round] | str:
        """Find what a step reads and writes, or say why it cannot be made here."""
        if grads is not None:
            return "a matrix is sharded"
        by_kind: dict[tuple[Any, ...], list[_Matrix]] = {}
        for group in groups:
            for param in group["params"]:
                if (grad := param.grad) is None:
                    continue
                if why := _refusal(group, param, grad, self.device):
                    return why
                state = states.get(param) or {}
                if "momentum_buffer" not in state:
                    return NO_STATE
                matrix = _Matrix(group, param, grad, state["momentum_buffer"])
                by_kind.setdefault(matrix.kind(), []).append(matrix)
        found = [matrix for matrices in by_kind.values() for matrix in matrices]
        if len({id(matrix.param) for matrix in found}) < len(found):
            return "a parameter is twice in a group"
        return self._rounds(by_kind) if found else "no parameter has a gradient"

    def _rounds(self, by_kind: dict[tuple[Any, ...], list[_Matrix]]) -> list[_Round]:
        most = _CPU_STACK if self.device.type == "cpu" else _ROUND
        planned: list[list[tuple[list[_Matrix], int]]] = [[]]
        sizes = [0]
        for matrices in by_kind.values():
            numel = matrices[0].param.numel()
            count = max(1, most // (2 * numel))
            for some in (matrices[i : i + count] for i in range(0, len(matrices), count)):
                size = -(-len(some) * numel // _ALIGNED) * _ALIGNED
                if planned[-1] and 2 * (sizes[-1] + size) > _ROUND:
                    planned.append([])
                    sizes.append(0)
                planned[-1].append((some, sizes[-1]))
                sizes[-1] += size
        # One memory for all rounds: a round is written before the next one is read.
        memory = torch.empty(max(sizes), dtype=torch.bfloat16, device=self.device)
        return [_round_of(plan, memory) for plan in planned]

    @torch.no_grad()
    def apply(
        self,
        _update: object,
        read: list[_Round],
        factor: Tensor | None,
        found_inf: Tensor | None,
        drops: bool,  # noqa: FBT001 - the core's signature
    ) -> None:
        """Multiply the gradients and update, unless `found_inf` is 1.0."""
        matrices = [matrix for each in read for matrix in each.matrices]
        if found_inf is None or not found_inf.item():
            number = 1.0 if factor is None else factor.item()
            for matrices_, directions, stacks in read:
                for matrix, direction in zip(matrices_, directions, strict=True):
                    _add_momentum(matrix, direction, number)
                for stack, kind in stacks:
                    orthogonalize_(stack, *kind[1:])
                for matrix, direction in zip(matrices_, directions, strict=True):
                    _write(matrix, direction)
            if factor is not None and not drops:
                fallback.rescale_([matrix.grad for matrix in matrices], factor)
        for matrix in matrices if drops else ():
            matrix.param.grad = None

    def step(self, *_: object) -> str:
        """Ask for a step in halves, the only one that is made here."""
        return ANOTHER_TYPE


def _refusal(  # noqa: PLR0911 - one row a reason
    group: dict[str, Any], param: Tensor, grad: Tensor, device: torch.device
) -> str:
    """Say why a matrix is left to torch's step, which may raise its own error; "" if it is not."""
    if type(param) not in PLAIN_TYPES or type(grad) not in PLAIN_TYPES or device.type == "meta":
        return "a parameter is of another type"
    if param.dim() != 2 or param.numel() == 0:
        return "a parameter is no matrix"
    if {param.dtype, grad.dtype} - {*kept.DTYPES}:
        return f"a parameter or gradient is neither of {kept.DTYPES}"
    if (grad.layout, grad.device, param.device, grad.shape) != (
        torch.strided,
        device,
        device,
        param.shape,
    ):
        return "a gradient's shape, layout or device"
    if group["adjust_lr_fn"] not in _RATIOS:
        return f"adjust_lr_fn={group['adjust_lr_fn']!r}"
    if len(group["ns_coefficients"]) != 3 or group["ns_steps"] >= 100:
        return "ns_coefficients or ns_steps"
    return ""


def _original(rows: int, columns: int) -> float:
    return math.sqrt(max(1, rows / columns))


def _match_rms_adamw(rows: int, columns: int) -> float:
    return 0.2 * math.sqrt(max(rows, columns))


_RATIOS = {None: _original, "original": _original, "match_rms_adamw": _match_rms_adamw}
"""What multiplies the learning rate of a matrix, by `adjust_lr_fn`."""


def _round_of(plan: list[tuple[list[_Matrix], int]], memory: Tensor) -> _Round:
    found = _Round([], [], [])
    for matrices, start in plan:
        param = matrices[0].param
        numel = len(matrices) * param.numel()
        stack = memory[start : start + numel].view(len(matrices), *param.shape)
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
    found = stack.mT if stack.size(1) > stack.size(2) else stack
    norms = torch.linalg.vector_norm(found, dim=(1, 2), keepdim=True)
    found = found / norms.clamp(min=eps)
    for _ in range(steps):
        gram = torch.bmm(found, found.mT)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.baddbmm(found, gram, found, beta=a)
    stack.copy_(found.mT if stack.size(1) > stack.size(2) else found)


# The two other passes in torch's operators, each of them rounded by itself.


def _add_momentum(matrix: _Matrix, direction: Tensor, factor: float) -> None:
    momentum = matrix.group["momentum"]
    grad = matrix.grad.float() * factor
    buffer = _interpolated(matrix.buffer.float(), grad, 1 - momentum)
    matrix.buffer.copy_(buffer)
    has_nesterov = matrix.group["nesterov"]
    direction.copy_(_interpolated(grad, buffer, momentum) if has_nesterov else buffer)


def _interpolated(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """Interpolate from the nearer end, as torch.lerp does."""
    if abs(weight) < 0.5:
        return start + (end - start) * weight
    return end + (end - start) * (weight - 1)


def _write(matrix: _Matrix, direction: Tensor) -> None:
    group, lr = matrix.group, float(matrix.group["lr"])
    step_size = lr * _RATIOS[group["adjust_lr_fn"]](*matrix.param.shape)
    weights = matrix.param.float() * (1 - lr * group["weight_decay"])
    matrix.param.copy_(weights - direction.float() * step_size)
