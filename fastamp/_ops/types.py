"""What a read of gradients takes and returns, and which tensors compiled code may read."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fastamp._ops.private import local_tensor

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def unread(found_inf: Tensor | None = None) -> list[Tensor]:
    """Return the statistics of gradients that were not read."""
    found_inf = torch.zeros((), dtype=torch.float32) if found_inf is None else found_inf
    nan, one = torch.full_like(found_inf, torch.nan), torch.ones_like(found_inf)
    return [nan, found_inf, one, one, one]


def _value(place: int) -> Any:
    def read(self: "StepReport") -> Tensor:
        return (unread() if self.values is None else self.values)[place]

    return property(read)


class StepReport:
    """What one read or step found and did: 0-dim tensors on the gradients' device.

    They are made without a wait; `norm`, `clip_coef` and `factor` are float64 where a gradient has
    64 bits, else float32.

    Attributes:
        norm: of the unscaled gradients before clipping; NaN where they were not read.
        found_inf: 1.0 where any element is or was inf or NaN, and the step is skipped, else 0.0.
        clip_coef: min(1, max_norm / (norm + 1e-6)), torch.nn.utils' formula; 1 without clipping.
        factor: clip_coef / scale: multiply the gradients by this.
        scale: the loss scale at the time of the read; 1 without scaling.
        way: "native", by fastamp's core; "fallback", a lean optimizer's step in torch's operators;
            or "torch's: " and the reason, by the optimizer's own `step`.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> report = fastamp.optimizer_step(torch.optim.SGD([weight]), max_norm=1.0)
        >>> report.norm, report.clip_coef, report.skipped
        (tensor(5.), tensor(0.2000), False)
    """

    norm: Tensor = _value(0)
    found_inf: Tensor = _value(1)
    clip_coef: Tensor = _value(2)
    factor: Tensor = _value(3)
    scale: Tensor = _value(4)

    def __init__(self, values: Tensor | Sequence[Tensor] | None, way: str = "") -> None:
        # Compiled code's are one tensor: five views take a tenth of a small network's step. None:
        # nothing was read.
        self.values = values
        self.way = way

    @property
    def skipped(self) -> bool:
        """Whether the optimizer left the parameters as they were; waits for the device."""
        return bool(self.found_inf.item())

    def stacked(self) -> Tensor:
        """Return norm, found_inf, clip_coef, factor and scale as one tensor."""
        values = unread() if self.values is None else self.values
        if isinstance(values, Tensor):
            return values
        return torch.stack([each.to(values[0].device) for each in values])

    def replace(self, **changed: Tensor) -> "StepReport":
        """Return a copy in which the statistics of these names are others."""
        names = ("norm", "found_inf", "clip_coef", "factor", "scale")
        return StepReport([changed.get(name, getattr(self, name)) for name in names], self.way)

    def __repr__(self) -> str:
        names = ("norm", "clip_coef", "found_inf", "scale", "way")
        return f"StepReport({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


class Clip(NamedTuple):
    """How gradients are to be unscaled and clipped; tensors are 0-dim float32, on their device."""

    scale: Tensor | None = None  # None is 1
    max_norm: float | None = None  # of the unscaled gradients; None does not clip
    only_finite: bool = True  # does not clip what is not finite: inf would become NaN
    before: Tensor | None = None  # a found_inf of an earlier read, which still counts
    skipped: Tensor | None = None  # a counter to add found_inf to


class Why(NamedTuple):
    """Why a step is not made in one call of the core; what follows depends on the kind alone."""

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
