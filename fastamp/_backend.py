"""The op table as Python sees it, and which backend serves which tensor.

Every backend meets `Ops`. The choice follows the tensor's device: compiled CUDA code for CUDA,
compiled CPU code for the CPU, the pure-Python fallback for every other device and for every tensor
that compiled code does not take (float64, complex, sparse, with gaps in its memory).
`FASTAMP_BACKEND` narrows the choice to one backend and the fallback.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy.typing as npt
    from torch import Tensor
    from torch.distributed import ProcessGroup

    P = ParamSpec("P")
    T = TypeVar("T")
    RegionMaker = Callable[[str, Any, bool], "Region"]

_MODULES = {
    "cuda": "fastamp._native_cuda",
    "cpu": "fastamp._native_cpu",
    "fallback": "fastamp._fallback",
}  # best first

_PLAIN_TYPES = {torch.Tensor, torch.nn.Parameter}
COMPILED_NORMS = (1.0, 2.0, math.inf)


class GradStats(NamedTuple):
    """What one read of the gradients tells: 0-dim tensors that nobody has waited for."""

    reduced: Tensor
    """float64: the sum of squares (norm_type 2), of magnitudes (1), or the largest one (inf)."""
    norm: Tensor
    """Norm of the unscaled gradients, float32, or float64 where a gradient has 64 bits."""
    found_inf: Tensor
    """1.0 where any element is inf or NaN, else 0.0."""
    clip_coef: Tensor
    """min(1, max_norm / (norm + 1e-6)), torch.nn.utils' formula; NaN stays."""
    factor: Tensor
    """clip_coef / scale: multiply the gradients by this."""
    grad_scale: Tensor
    """scale / clip_coef: or divide them by this."""
    scale: Tensor
    """The loss scale as it was read."""


class Clip(NamedTuple):
    """How gradients are to be unscaled and clipped; tensors are 0-dim float32, on their device."""

    scale: Tensor | None = None
    """Loss scale; None is 1."""
    max_norm: float | None = None
    """Longest norm of the unscaled gradients; None does not clip."""
    only_finite: bool = False
    """Leave the clip out where found_inf is 1, so that inf does not become NaN."""
    skipped: Tensor | None = None
    """Counter to add found_inf to."""


class Packed(Protocol):
    """A list of tensors that one backend has looked at once, for several ops."""

    @property
    def rest(self) -> list[int]:
        """Indices of the tensors that this backend does not take."""

    @property
    def has_float16(self) -> bool:
        """Whether any tensor that it takes is float16."""


class Region(Protocol):
    """One path of nested regions, in all threads, on the host's clock."""

    @property
    def path(self) -> str:
        """Its name inside the regions around it."""

    @property
    def children(self) -> dict[str, Any]:
        """Regions inside it, by name."""

    def innermost(self) -> Region:
        """Return the innermost open region of this thread and this timer, or else this one."""

    def __enter__(self) -> object:
        """Open the region in this thread."""

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Close it, and what was opened inside and left open."""

    def add(self, duration_ns: int) -> None:
        """Count a duration that was measured elsewhere."""

    def figures(self) -> tuple[Any, ...]:
        """Return count, sum, minimum and maximum, and the histogram as a buffer of int64."""

    def reset(self) -> None:
        """Forget all figures; where it is open, it counts when it ends."""


class Ops(Protocol):
    """The op table: what every backend can do with a list of tensors."""

    @property
    def name(self) -> str:
        """The backend's name, as in `fastamp.backends()`."""

    def pack(self, tensors: Sequence[Tensor]) -> Packed:
        """Look at the tensors, which lie on the device of the first one, or are left in `rest`."""

    def grad_stats(self, packed: Any, norm_type: float, clip: Clip) -> GradStats:
        """Read every element once; compiled backends take a norm_type of 1, 2 or inf."""

    def rescale_(self, packed: Any, factor: Tensor) -> None:
        """Multiply every element by a 0-dim float32 tensor, rounding once; 1 writes nothing."""

    def regions_for(self, timer: type) -> RegionMaker:
        """Return what makes the regions of one timer, of this type, from path, `begin`, `always`.

        `begin`, the same for all, is called with the region that opens, if `always` or if torch's
        profiler is on; what it returns is called with the start and the end, in nanoseconds.
        """


class Column(NamedTuple):
    """An array on the CPU whose rows become the rows of one tensor of a batch."""

    array: Tensor | npt.NDArray[Any]
    """Rows along its first dimension; they may overlap."""
    dtype: torch.dtype
    """Of the batch: the array's own, or int64 for unsigned and 32-bit integers."""

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return tuple(self.array.shape[1:])


class Gatherer(Protocol):
    """Gathers batches out of columns, in the order of submission, for one consumer."""

    def submit(self, indices: Tensor, outputs: Sequence[Tensor]) -> None:
        """Add a batch: int64 indices of rows, and one contiguous tensor to fill for each column."""

    def wait(self) -> float:
        """Wait for the oldest batch and return the seconds that its copy took.

        Raises:
            IndexError: an index of that batch is out of bounds.
        """


class HostOps(Protocol):
    """What the backends of the host do with the samples of a batch."""

    @property
    def name(self) -> str:
        """The backend's name, as in `fastamp.backends()`."""

    def column(self, samples: tuple[Any, ...], key: Any) -> tuple[Any, ...]:
        """Return sample[key] of every sample."""

    def stack(
        self,
        samples: Sequence[Any],
        dtype: torch.dtype,
        allocate: Callable[[tuple[int, ...], torch.dtype], Tensor],
        pad: Tensor | None = None,
        multiple: int = 1,
    ) -> Tensor | None:
        """Copy samples into one tensor; None where the backend does not take them.

        Args:
            samples: at least one; all tensors or all arrays, of any shapes.
            dtype: the batch's, which is that of the first sample.
            allocate: gives memory for a shape and a dtype; called once, when all is checked.
            pad: the element that fills ragged dimensions, 0-dim on the CPU; None refuses them.
            multiple: ragged dimensions, and the only one of vectors, are rounded up to it.
        """

    def gatherer(self, columns: Sequence[Column], depth: int) -> Gatherer:
        """Return what gathers batches out of at least one column, which it keeps alive.

        Args:
            columns: arrays with the same number of rows.
            depth: batches that may be under way.
        """


class Layout(NamedTuple):
    """Which other ranks hold more of the same tensors, and which of them count what they share."""

    groups: tuple[ProcessGroup, ...] = ()
    """Reduced over one after the other, they make every mesh whole."""
    counts: bool = True
    """Whether this rank is the first one that holds its elements."""
    process_group: ProcessGroup | None = None
    """The last to reduce over, given by the user."""
    leads: bool = True
    """Whether this rank is the first one of its mesh in that group."""


Shards: TypeAlias = "dict[Layout, list[Tensor]]"
"""What this rank holds of tensors that are spread over several."""


class Group(NamedTuple):
    """Tensors of one device, with the backend that serves them."""

    ops: Ops
    packed: Packed
    device: torch.device
    layout: Layout | None = None
    """None where no other rank takes part."""


def is_plain(tensors: Sequence[Tensor]) -> bool:
    """Say whether backends take the tensors: no subclasses, such as DTensor, and no torch.func."""
    if not {*map(type, tensors)} <= _PLAIN_TYPES:
        return False
    # The graph breaks later, at the op itself; dynamo has no answer to the second question.
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None


def local_of(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor: a DTensor's part, and all of any other."""
    return getattr(tensor, "_local_tensor", tensor)


def take(
    tensors: list[Tensor],
    process_group: ProcessGroup | None = None,
    *,
    owners: Sequence[Tensor] = (),
    align: bool = False,
) -> list[Tensor] | Shards | None:
    """Return tensors in the form that `pack` takes; None where they have to go torch's own way.

    Args:
        tensors: of any types.
        process_group: over which plain tensors are spread, if they are.
        owners: parameters whose gradients the tensors are, where those will be written.
        align: bring the gradients to the placements of their owners.
    """
    if process_group is None and is_plain(tensors):
        return tensors
    if process_group is None and "torch.distributed.tensor" not in sys.modules:
        return None  # without it there are no DTensors
    from fastamp import _shards  # noqa: PLC0415 - it costs half a second, and imports this module

    return _shards.take(_shards.settle(owners) if align else tensors, process_group, owners)


def on_parts(step: Callable[P, T]) -> Callable[P, T]:
    """Return a function in which torch's fused optimizers work on what this rank holds."""
    from fastamp import _shards  # noqa: PLC0415 - it is loaded by now

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with _shards.FusedOnParts():
            return step(*args, **kwargs)

    return call


def index_error(index: int, num_rows: int) -> IndexError:
    """Return torch's error for an index that is out of bounds."""
    msg = f"index {index} is out of bounds for dimension 0 with size {num_rows}"
    return IndexError(msg)


@cache
def _load(name: str) -> Ops | None:
    """Import a backend; None where it was not built or has no device."""
    if name != "fallback" and importlib.util.find_spec("fastamp._native") is None:
        return None
    module = importlib.import_module(_MODULES[name])
    ops: Ops = module.ops
    return ops if module.is_available() else None


def _check_available(name: str, source: str) -> str:
    """Return the name of an available backend, or raise an error that lists what there is."""
    available = [known for known in _MODULES if _load(known) is not None]
    if name not in available:
        why = "is not available here" if name in _MODULES else "is not a backend"
        msg = f"{source}={name!r} {why}; available: {', '.join(available)}"
        raise RuntimeError(msg)
    return name


_only: str | None = None
if os.environ.get("FASTAMP_BACKEND"):
    _only = _check_available(os.environ["FASTAMP_BACKEND"], "FASTAMP_BACKEND")


@contextmanager
def use_only(name: str) -> Iterator[None]:
    """Narrow the choice to one backend and the fallback, as FASTAMP_BACKEND does, for a while."""
    global _only  # noqa: PLW0603 - one setting for the process, like the environment variable
    before, _only = _only, _check_available(name, "backend")
    try:
        yield
    finally:
        _only = before


def backends() -> list[str]:
    """Return the backends that fastamp uses here, best first.

    Returns:
        A list out of "cuda", "cpu" and "fallback". "fallback" is pure Python and always there. With
        the environment variable FASTAMP_BACKEND set, only that backend and the fallback.
    """
    chosen = [name for name in _MODULES if _only in (None, name) or name == "fallback"]
    return [name for name in chosen if _load(name) is not None]


def ops_for(device: torch.device) -> Ops:
    """Return the backend that serves a device."""
    name = device.type
    if name in _MODULES and _only in (None, name):
        ops = _load(name)
        if ops is not None:
            return ops
    return fallback_ops()


def fallback_ops() -> Ops:
    """Return the backend that takes every tensor."""
    ops = _load("fallback")
    assert ops is not None  # noqa: S101 - it is part of the package
    return ops


def host_ops() -> HostOps:
    """Return the backend that collates samples on the host."""
    ops = _load("cpu") if _only in (None, "cpu") else None
    return fallback_host_ops() if ops is None else cast("HostOps", ops)


def fallback_host_ops() -> HostOps:
    """Return the backend that takes samples of every kind."""
    return cast("HostOps", fallback_ops())


def pack(tensors: Sequence[Tensor] | Shards, norm_type: float = 2.0) -> list[Group]:
    """Look at the tensors once and hand each to a backend: one group for one device.

    Args:
        tensors: at least one tensor, or what `take` returned; any devices, dtypes and layouts.
        norm_type: order of the norm that will be asked for.
    """
    if isinstance(tensors, dict):
        items = [(layout, pack(parts, norm_type)) for layout, parts in tensors.items()]
        return [group._replace(layout=layout) for layout, groups in items for group in groups]
    device = tensors[0].device
    ops = ops_for(device) if norm_type in COMPILED_NORMS else fallback_ops()
    packed = ops.pack(tensors)
    groups = [Group(ops, packed, device)]
    if packed.rest:
        by_device: dict[torch.device, list[Tensor]] = {}
        for i in packed.rest:
            by_device.setdefault(tensors[i].device, []).append(tensors[i])
        own = by_device.pop(device, None)
        if own is not None:
            groups.append(Group(fallback_ops(), fallback_ops().pack(own), device))
        for others in by_device.values():
            groups += pack(others, norm_type)
    return groups


def grad_stats(groups: Sequence[Group], norm_type: float, clip: Clip) -> GradStats:
    """Read every element of every group once.

    Args:
        groups: what `pack` returned.
        norm_type: order of the norm.
        clip: how to unscale and clip; its tensors lie on the first group's device.

    Returns:
        The statistics over all groups, on the first group's device.
    """
    first = groups[0]
    layouts = [group.layout for group in groups if group.layout is not None]
    if layouts:
        from fastamp import _shards  # noqa: PLC0415 - it is loaded by now

        return _shards.grad_stats(groups, layouts, norm_type, clip)
    if len(groups) == 1:
        return first.ops.grad_stats(first.packed, norm_type, clip)
    from fastamp import _fallback  # noqa: PLC0415 - it imports this module's types

    parts = [group.ops.grad_stats(group.packed, norm_type, Clip()) for group in groups]
    return _fallback.combine(parts, norm_type, clip)


def rescale_(groups: Sequence[Group], factor: Tensor) -> None:
    """Multiply every element of every group by a 0-dim tensor, rounding once to its dtype.

    Raises:
        RuntimeError: where a tensor cannot be written in place. The fallback's groups, the only
            ones that can refuse, come before the compiled ones.
    """
    for group in sorted(groups, key=lambda group: group.ops.name != "fallback"):
        group.ops.rescale_(group.packed, factor.to(group.device, non_blocking=True))
