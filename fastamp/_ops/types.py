"""What a read of gradients takes and returns, and which tensors compiled code may read."""

import copy
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from fastamp._ops.private import local_tensor

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def unread(found_inf: Tensor | None = None) -> list[Tensor]:
    """Return the statistics of gradients that were not read."""
    found_inf = torch.zeros((), dtype=torch.float32) if found_inf is None else found_inf
    nan, one = torch.full_like(found_inf, torch.nan), torch.ones_like(found_inf)
    return [nan, found_inf, one, one, one]


def _value(place: int) -> Any:
    def read(self: "GradStats") -> Tensor:
        return (unread() if self.values is None else self.values)[place]

    return property(read)


class GradStats:
    """The statistics of one read of the gradients: 0-dim tensors, made without a wait.

    `norm`, `clip_coef` and `factor` are float64 where a gradient has 64 bits, else float32.

    Args:
        values: norm, found_inf, clip_coef, factor and scale; from compiled code one tensor of five
            elements, of which views are made only if somebody looks: five tensors take a tenth of
            a small network's step. None where nothing was read.
    """

    norm: Tensor = _value(0)
    """Norm of the unscaled gradients before clipping; NaN where they were not read."""
    found_inf: Tensor = _value(1)
    """1.0 where any element is inf or NaN, or an earlier read found one, else 0.0. Then the step
    is skipped."""
    clip_coef: Tensor = _value(2)
    """min(1, max_norm / (norm + 1e-6)), torch.nn.utils' formula; 1 without clipping."""
    factor: Tensor = _value(3)
    """clip_coef / scale: multiply the gradients by this."""
    scale: Tensor = _value(4)
    """The loss scale at the time of the read; 1 without scaling."""

    def __init__(self, values: Tensor | Sequence[Tensor] | None) -> None:
        self.values = values

    def replace(self, **changed: Tensor) -> Self:
        """Return a copy in which the statistics of these names are others."""
        names = ("norm", "found_inf", "clip_coef", "factor", "scale")
        other = copy.copy(self)
        other.values = [changed.get(name, getattr(self, name)) for name in names]
        return other


class Clip(NamedTuple):
    """How gradients are to be unscaled and clipped; tensors are 0-dim float32, on their device."""

    scale: Tensor | None = None  # None is 1
    max_norm: float | None = None  # of the unscaled gradients; None does not clip
    only_finite: bool = True  # does not clip what is not finite: inf would become NaN
    before: Tensor | None = None  # a found_inf of an earlier read, which still counts
    skipped: Tensor | None = None  # a counter to add found_inf to


class Why(NamedTuple):
    """Why a step is not made in one call of the core. What follows depends on the kind alone.

    Torch makes the step; fastamp measures, then updates; the state has to be made first; or there
    is nothing to do. The text is for people.
    """

    kind: Literal["torch", "halves", "no state", "no gradient"]
    text: str


NO_STATE = Why("no state", "no state")
NO_GRADIENT = Why("no gradient", "no parameter has a gradient")


class Entry(NamedTuple):
    """A parameter that a step updates, as a backend written in Python reads it."""

    group: dict[str, Any]
    param: Tensor
    whole: Any  # the parameter again or, where that is a shard, the DTensor
    grad: Tensor
    state: dict[str, Any]


def entries_of(
    groups: list[dict[str, Any]], states: dict[Tensor, Any], grads: list[Tensor] | None
) -> list[Entry]:
    """Return the parameters that have a gradient; see `Backend.read` in _native.pyi."""
    entries, given = [], iter(grads or ())
    for group in groups:
        wholes = group["params"] if grads is None else group["wholes"]
        for param, whole in zip(group["params"], wholes, strict=True):
            grad = param.grad if grads is None else next(given)
            if grad is not None:
                entries.append(Entry(group, param, whole, grad, states.get(param) or {}))
    return entries


class Reduced(NamedTuple):
    """The result of one read of a part of the gradients, to be added to the other parts'."""

    total: Tensor  # 0-dim: the sum of squares, in float64 where the device has it
    found_inf: Tensor  # 1.0 where any element is inf or NaN, else 0.0
    dtype: torch.dtype  # of the norm: float64 where a gradient has 64 bits, else float32


def moved(scalar: Tensor, device: torch.device) -> Tensor:
    """Return a 0-dim tensor on a device. Only the way to the CPU, where it is read next, waits."""
    return scalar.to(device, non_blocking=device.type != "cpu")


def is_spread(tensor: Any) -> bool:
    """Say whether a tensor is a DTensor."""
    return type(tensor) not in PLAIN_TYPES and hasattr(tensor, "placements")


def local_of(tensor: Any) -> Tensor:
    """Return the part of a tensor that this rank holds: of a DTensor its local shard."""
    local: Any = tensor if type(tensor) in PLAIN_TYPES else local_tensor(tensor)
    if type(local) not in PLAIN_TYPES and hasattr(local, "wait"):
        local = local.wait()  # a collective may still write it
    return local  # type: ignore[no-any-return]
