"""torch's Muon in three passes over all matrices: momentum, products of stacked matrices, write.

Left out, so that torch steps: matrices sharded by columns, and options that torch's Muon does not
have yet.
"""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fastamp import _ops
from fastamp._ops import ANOTHER_TYPE, NO_GRADIENT, NO_STATE, PLAIN_TYPES, fallback, kept
from fastamp.step.stacks import Matrix, Stacks, in_rounds

RULE = "Muon"
MODULE = "torch.optim._muon"
"""Where the class is; its `__module__` says torch.optim."""
STATES = (("momentum_buffer", ""),), False, "zeros of the gradient"
"""As the core declares those of other rules: names, whether steps are counted, how they begin."""
OPTIONS = {"lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps"}
OPTIONS |= {"adjust_lr_fn", "differentiable"}  # the last one is False: a loaded optimizer has it


class MuonBackend:
    """Steps of Muon on one device; see `Backend` in _native.pyi.

    Args:
        device: of the matrices.
        core: the core's backend of the device; None makes all passes in torch's operators.
    """

    def __init__(self, device: torch.device, core: Any) -> None:
        self.device, self.core = device, core

    def read(
        self,
        _update: object,
        groups: list[dict[str, Any]],
        states: dict[Tensor, Any],
        grads: list[Tensor] | None,
    ) -> list[list[list[Matrix]]] | str:
        """Find what a step reads and writes, in rounds, or say why it cannot be made here."""
        by_kind: dict[tuple[Any, ...], dict[int, Matrix]] = {}
        given, places = iter(grads or ()), list[tuple[int, int]]()
        for group in groups:
            wholes = group["params"] if grads is None else group["wholes"]
            for param, whole in zip(group["params"], wholes, strict=True):
                grad = param.grad if grads is None else next(given)
                if grad is None:
                    continue
                state = states.get(param) or {}
                matrix = Matrix(group, whole, param, grad, state.get("momentum_buffer"))
                if why := _refusal(matrix, self.device):
                    return why
                known = by_kind.setdefault(matrix.kind(), {}).setdefault(id(param), matrix)
                if known is not matrix:
                    return "a parameter is twice in a group"
                for each in (param, grad, matrix.buffer):
                    # Between the rows of one with gaps there may be another's.
                    size, begin = each.nbytes if each.is_contiguous() else 1, each.data_ptr()
                    places += [(begin, begin + size)] if begin else []
        places.sort()
        if any(end > begin for (_, end), (begin, _) in pairwise(places)):
            return "tensors share their memory"
        found = in_rounds([[*matrices.values()] for matrices in by_kind.values()])
        return found or NO_GRADIENT

    @torch.no_grad()
    def apply(
        self,
        _update: object,
        read: list[list[list[Matrix]]],
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
        for of_kinds in () if is_skipped else read:
            stacks = Stacks(of_kinds, self.device)
            passes = _Passes(stacks, self.core, found_inf)
            passes.add_momentum(factor, drops=drops)
            stacks.orthogonalize_()
            passes.write()
        for matrix in (each for kinds in read for some in kinds for each in some if drops):
            matrix.param.grad = None

    def step(self, *_: object) -> str:
        """Ask for a step in halves, the only one that is made here."""
        return ANOTHER_TYPE


def _refusal(matrix: Matrix, device: torch.device) -> str:  # noqa: PLR0911 - one row a reason
    """Say why a matrix is left to torch's step, which may raise its own error; "" if it is not."""
    group, whole, param, grad, buffer = matrix
    spread = [place for place in getattr(whole, "placements", ()) if not place.is_replicate()]
    if len(spread) > 1 or any(hasattr(p, "split_factor") or not p.is_shard(0) for p in spread):
        return "a matrix is sharded by more than its rows"
    if not grad.device == param.device == device:
        return "parameters on several devices"
    if not {type(param), type(grad)}.issubset(PLAIN_TYPES) or param.is_meta:
        return "a parameter is of another type"
    if whole.dim() != 2 or whole.numel() == 0:
        return "a parameter is no matrix"
    if {param.dtype, grad.dtype} - {*kept.DTYPES}:
        return f"a parameter or gradient is neither of {kept.DTYPES}"
    if grad.layout is not torch.strided or grad.shape != param.shape:
        return "a gradient's shape or layout"
    if group["adjust_lr_fn"] not in {None, "original", "match_rms_adamw"}:
        return f"adjust_lr_fn={group['adjust_lr_fn']!r}"
    if len(group["ns_coefficients"]) != 3 or group["ns_steps"] >= 100:
        return "ns_coefficients or ns_steps"
    if buffer is None:
        return NO_STATE
    known = (type(buffer) in PLAIN_TYPES, buffer.shape, buffer.dtype, buffer.device)
    fits = known == (True, grad.shape, grad.dtype, grad.device)
    return "" if fits else "a momentum that is not like the gradient"


def _lr_ratio(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """Return what multiplies the learning rate of a matrix."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))


class _Passes:
    """The passes before and after the products: by the core or, with the same bits, by torch."""

    def __init__(self, stacks: Stacks, core: Any, found_inf: Tensor | None) -> None:
        self._core, self._found_inf = core, found_inf
        rates: dict[tuple[int, torch.Size], list[tuple[Matrix, Tensor]]] = {}
        for matrix, direction in zip(stacks.matrices, stacks.directions, strict=True):
            key = (id(matrix.group), matrix.whole.shape)
            rates.setdefault(key, []).append((matrix, direction))
        self._groups = []
        for pairs in rates.values():
            group, whole, *_ = pairs[0][0]
            ratio = _lr_ratio(group["adjust_lr_fn"], *whole.shape)
            self._groups.append(({**group, "lr_ratio": ratio}, pairs))
        self._pairs = [pair for pairs in rates.values() for pair in pairs]

    def add_momentum(self, factor: Tensor | None, *, drops: bool) -> None:
        """Multiply the gradients by `factor`, and write the momentum and the directions."""
        groups = [{**own, "params": [pair[1] for pair in pairs]} for own, pairs in self._groups]
        states = {direction: {"momentum_buffer": own.buffer} for own, direction in self._pairs}
        grads = [matrix.grad for matrix, _ in self._pairs]
        if self._is_done("Muon, momentum", groups, states, grads, (factor, drops)):
            return
        number = 1.0 if factor is None else factor.item()
        for (group, _, _, grad, buffer), direction in self._pairs:
            momentum = group["momentum"]
            values = grad.float() * number
            mean = _interpolated(buffer.float(), values, 1 - momentum)
            buffer.copy_(mean)
            direction.copy_(_interpolated(values, mean, momentum) if group["nesterov"] else mean)
        if factor is not None and not drops:
            fallback.rescale_(grads, factor)

    def write(self) -> None:
        """Decay the parameters, and subtract the directions."""
        groups = [{**own, "params": [m.param for m, _ in pairs]} for own, pairs in self._groups]
        directions = [direction for _, direction in self._pairs]
        if self._is_done("Muon, write", groups, {}, directions, (None, True)):
            return
        for group, pairs in self._groups:
            lr = float(group["lr"])
            for matrix, direction in pairs:
                weights = matrix.param.float() * (1 - lr * group["weight_decay"])
                matrix.param.copy_(weights - direction.float() * (lr * group["lr_ratio"]))

    def _is_done(
        self, rule: str, groups: Any, states: Any, grads: Any, how: tuple[Tensor | None, bool]
    ) -> bool:
        """Make a pass by the core, if it serves these tensors; say whether the pass is done.

        One that the core does not make is done if it is skipped.
        """
        if self._core is not None:
            update = _ops.core().Update(rule)
            found = self._core.read(update, groups, states, grads)
            if not isinstance(found, str):
                self._core.apply(update, found, how[0], self._found_inf, how[1])
                return True
        return self._found_inf is not None and bool(self._found_inf.item())


def _interpolated(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """Interpolate from the nearer end, as torch.lerp does."""
    if abs(weight) < 0.5:
        return start + (end - start) * weight
    return end + (end - start) * (weight - 1)
