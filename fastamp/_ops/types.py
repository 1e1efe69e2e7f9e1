"""The interface of the backends for lists of tensors (`Ops`), its arguments and results."""

import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
COMPILED_NORMS = (1.0, 2.0, math.inf)
RegionMaker: TypeAlias = "Callable[[str, Any, bool], Region]"
NO_STATE = "no state"
OTHER_TYPE = "a parameter is of another type"


class Rule(Enum):
    """The optimizers of torch whose update is an op; AdamW is Adam with decoupled decay."""

    ADAM = "Adam"
    ADAMW = "AdamW"
    SGD = "SGD"
    ADAGRAD = "Adagrad"


def _value(place: int) -> Any:
    return property(lambda self: self._values[place])


class GradStats:
    """The statistics of one read of the gradients: 0-dim tensors, made without a wait.

    `norm`, `clip_coef` and `factor` are float64 where a gradient has 64 bits, else float32.

    Args:
        values: norm, found_inf, clip_coef, factor, grad_scale and scale; from compiled code one
            tensor of six elements, of which views are made only if somebody looks: six tensors take
            a tenth of a small network's step. No view is kept: in FakeTensorMode it is a fake.
    """

    norm: Tensor = _value(0)
    """Norm of the unscaled gradients."""
    found_inf: Tensor = _value(1)
    """1.0 where any element is inf or NaN, else 0.0."""
    clip_coef: Tensor = _value(2)
    """min(1, max_norm / (norm + 1e-6)), torch.nn.utils' formula; NaN stays."""
    factor: Tensor = _value(3)
    """clip_coef / scale: multiply the gradients by this."""
    grad_scale: Tensor = _value(4)
    """scale / clip_coef: or divide them by this."""
    scale: Tensor = _value(5)
    """The loss scale at the time of the read."""

    def __init__(self, values: Tensor | Sequence[Tensor]) -> None:
        self._values = values

    @property
    def whole(self) -> Tensor | None:
        """The tensor of six elements; None after a replacement, and from the fallback."""
        return self._values if isinstance(self._values, Tensor) else None

    @property
    def values(self) -> Sequence[Tensor]:
        """The six as tensors of their own."""
        return self._values.unbind() if isinstance(self._values, Tensor) else self._values

    def replace(self, **changed: Tensor) -> "GradStats":
        """Return a copy in which the statistics of these names are others."""
        names = ("norm", "found_inf", "clip_coef", "factor", "grad_scale", "scale")
        pairs = zip(names, self.values, strict=True)
        return GradStats([changed.get(name, value) for name, value in pairs])


class Reduced(NamedTuple):
    """What one read of a part of the gradients found, to be joined with the other parts'."""

    total: Tensor
    """0-dim float64: sum of squares (norm_type 2), of magnitudes (1), largest magnitude (inf)."""
    found_inf: Tensor
    """1.0 where any element is inf or NaN, else 0.0."""
    dtype: torch.dtype
    """Of the norm: float64 where a gradient has 64 bits, else float32."""


class Clip(NamedTuple):
    """How gradients are to be unscaled and clipped; tensors are 0-dim float32, on their device."""

    scale: Tensor | None = None
    """Loss scale; None is 1."""
    max_norm: float | None = None
    """Largest norm of the unscaled gradients; None does not clip."""
    only_finite: bool = False
    """Leave the clip out where found_inf is 1, so that inf does not become NaN."""
    skipped: Tensor | None = None
    """Counter to add found_inf to. With it, found_inf is also 1 where grad_scale is infinite."""


class Packed(Protocol):
    """A list of tensors that a backend has checked once, with the operations on it."""

    @property
    def device(self) -> torch.device:
        """The first tensor's device, which the results are on."""

    @property
    def rest(self) -> list[int]:
        """Indices of the tensors that this backend does not handle."""

    @property
    def has_float16(self) -> bool:
        """Whether any tensor that it handles is float16."""

    @property
    def has_fallback(self) -> bool:
        """Whether the fallback handles any of them."""

    def grad_stats(self, norm_type: float, clip: Clip) -> GradStats:
        """Read every element once; compiled backends take a norm_type of 1, 2 or inf.

        Args:
            norm_type: order of the norm.
            clip: how to unscale and clip; its tensors lie on `device`.
        """

    def reduce(self, norm_type: float) -> Reduced:
        """Read every element once, as a part of a longer list."""

    def rescale_(self, factor: Tensor) -> None:
        """Multiply every element by a 0-dim tensor, rounding once; 1 writes nothing."""


class Region(Protocol):
    """One path of nested regions, in all threads, on the host's clock."""

    @property
    def path(self) -> str:
        """Its name inside the regions around it."""

    @property
    def children(self) -> dict[str, Any]:
        """Regions inside it, by name."""

    def innermost(self) -> "Region":
        """Return the innermost open region of this thread and this timer, or else this one."""

    def find(self, name: object) -> "Region | None":
        """Return the known region of a name inside the innermost open one."""

    def __enter__(self) -> object:
        """Open the region in this thread."""

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Close it and the regions left open inside it.

        Nothing happens if it has been closed with a region around it. In a thread that runs an
        asyncio loop it closes only itself: the regions inside may belong to other tasks.
        """

    def add(self, duration_ns: int) -> None:
        """Count a duration that was measured elsewhere."""

    def figures(self) -> tuple[Any, ...]:
        """Return count, sum, minimum and maximum, and the histogram as a buffer of int64."""

    def reset(self) -> None:
        """Reset all figures; if the region is open, it is counted when it ends."""


class Apply(Protocol):
    """The update of one step, to be called at most once."""

    def __call__(
        self,
        stats: GradStats | None,
        found_inf: Tensor | None = None,
        /,
        *,
        zero_grad: bool = False,
    ) -> None:
        """Update parameters and states in one pass.

        Args:
            stats: their `factor` multiplies the gradients before the update, and where their
                `found_inf` is 1.0, nothing is written; None leaves the gradients as they are.
            found_inf: without `stats`: where this is 1.0, nothing is written.
            zero_grad: set the gradients to None, rather than write the multiplied ones back.
        """


class Update(Protocol):
    """One optimizer's update on one backend, which reads the optimizer anew at each step."""

    def read(
        self, groups: list[dict[str, Any]], states: dict[Tensor, Any]
    ) -> tuple[Packed, Apply] | str:
        """Return the gradients and the step's update, or say why torch has to make this step.

        NO_STATE: a parameter with a gradient has no state. OTHER_TYPE: a parameter or its gradient
        is not a plain tensor.
        """

    @property
    def counts_on_host(self) -> bool:
        """Whether step counts are on the host and may include steps that the device skipped."""

    def settle(self, states: dict[Tensor, Any]) -> None:
        """Subtract the skipped steps from those counts; may wait for the device."""


class Ops(Protocol):
    """The op table: what every backend can do with a list of tensors."""

    @property
    def name(self) -> str:
        """The backend's name, as in `fastamp.backends()`."""

    def pack(self, tensors: Sequence[Tensor]) -> Packed:
        """Pack the tensors on the first one's device; all that it cannot handle are in `rest`."""

    def update(self, rule: Rule, device: torch.device) -> Update:
        """Return the update of one optimizer that follows the rule, on one device."""

    def region_maker(self) -> RegionMaker:
        """Return a function that makes the regions of one timer from path, `begin`, `always`.

        `begin`, the same for all regions, is called with a region that opens, if `always` is set or
        torch's profiler is on. It returns a function that is called when the region closes, with
        the start and the end in nanoseconds.
        """


def is_plain(tensors: Sequence[Tensor]) -> bool:
    """Say whether backends can handle the tensors: no subclasses like DTensor, no torch.func."""
    if torch.compiler.is_compiling():  # dynamo cannot trace the checks below
        return all(type(tensor) in _PLAIN_TYPES for tensor in tensors)
    if not {*map(type, tensors)}.issubset(_PLAIN_TYPES) or clones_what_is_written():
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


def is_dense(tensor: Tensor) -> bool:
    """Say whether a tensor's elements fill its memory, in any order of dimensions."""
    if tensor.layout is not torch.strided:
        return False
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def is_laid_out_like(tensor: Tensor, other: Tensor) -> bool:
    """Say whether tensors of one shape have the same strides."""
    if tensor.layout is not torch.strided or other.layout is not torch.strided:
        return False
    strides = zip(tensor.shape, tensor.stride(), other.stride(), strict=False)
    return tensor.stride() == other.stride() or all(n < 2 or one == two for n, one, two in strides)


def clones_what_is_written() -> bool:
    """Say whether allow_mutation_on_saved_tensors is on: only torch's operators respect it."""
    return getattr(torch.autograd.graph, "_allow_mutation_on_saved_tensors_enabled", False)


def moved(scalar: Tensor, device: torch.device) -> Tensor:
    """Return a 0-dim tensor on a device. Only the way to the CPU, where it is read next, waits."""
    return scalar.to(device, non_blocking=device.type != "cpu")


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, or any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)
