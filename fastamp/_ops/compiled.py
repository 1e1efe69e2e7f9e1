"""The compiled backends: the same op table on the CPU, on torch's number of threads, and on CUDA.

Importing this module needs the extension.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastamp import _native
from fastamp._ops.host_types import Column, Images, Windows
from fastamp._ops.types import Apply, Clip, GradStats, Reduced, RegionMaker, Rule

_CPU = torch.device("cpu")
_NORM_TYPES = {
    1.0: _native.NormType.L1,
    2.0: _native.NormType.L2,
    math.inf: _native.NormType.INF,
}


class CompiledOps:
    """The op table in compiled code, for one type of device, and for rows and samples on the host.

    Args:
        name: the backend's.
        table: its ops.
        host_is_apart: the host does not see what the device has done until it waits.
    """

    def __init__(self, name: str, table: _native.Ops, *, host_is_apart: bool = False) -> None:
        self.name = name
        self._table = table
        self._host_is_apart = host_is_apart

    def pack(self, tensors: Sequence[Tensor]) -> "CompiledPack":
        """Pack the dense float32, bfloat16 and float16 tensors on the first one's device."""
        device = tensors[0].device
        return CompiledPack(self._table, device, _native.pack(tensors, _index_of(device)))

    def update(self, rule: Rule, device: torch.device) -> "CompiledUpdate":
        """Return the update of one optimizer that follows the rule, on one device."""
        update = _native.Update(*_RULES[rule], _index_of(device), self._host_is_apart)
        return CompiledUpdate(self._table, update, device)

    def region_maker(self) -> RegionMaker:
        """Return the function that makes the regions of one timer."""
        return _native.make_region

    columns = staticmethod(_native.columns)
    stack = staticmethod(_native.stack)

    def augment_image(self, images: Images, row: Tensor | npt.NDArray[Any], key: int) -> Tensor:
        """Augment one image; see `fastamp._ops.HostOps`."""
        if isinstance(row, np.ndarray):
            row = np.ascontiguousarray(row)
            source = row.ctypes.data
        else:
            row = row.contiguous()
            source = row.data_ptr()
        nbytes = math.prod(images.row_shape) * row.dtype.itemsize
        output = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        _native.augment_image(_describe(images), key, source, output.data_ptr())
        return output

    def gatherer(self, columns: Sequence[Column], depth: int) -> _native.Gatherer:
        """Gather on threads of the core; see `fastamp._ops.HostOps`."""
        # One thread less, since the consumer copies, too, while it waits.
        threads = max(1, torch.get_num_threads() - 1)
        return _native.Gatherer([_memory(column) for column in columns], depth, threads, columns)


class CompiledPack:
    """Tensors whose addresses the core has read; see `fastamp._ops.Packed`."""

    has_fallback = False

    def __init__(
        self, table: _native.Ops, device: torch.device, packed: _native.PackedTensors
    ) -> None:
        self.device = device
        self._table = table
        self._packed = packed

    @property
    def rest(self) -> list[int]:
        """Indices of the tensors that the core does not handle."""
        return self._packed.rest

    @property
    def has_float16(self) -> bool:
        """Whether any tensor that it handles is float16."""
        return self._packed.has_float16

    def grad_stats(self, norm_type: float, clip: Clip) -> GradStats:
        """Read every element once, on CUDA in two launches, or three where float64 is slow."""
        work = None if self.device == _CPU else self._allocate_work()
        stats = torch.empty(_native.NUM_STATS, dtype=torch.float32, device=self.device)
        threads = torch.get_num_threads()
        self._table.grad_stats(self._packed, _NORM_TYPES[norm_type], *clip, work, stats, threads)
        return GradStats(stats)

    def reduce(self, norm_type: float) -> Reduced:
        """Read every element once, as a part of a longer list."""
        work = self._allocate_work()
        stats = torch.empty(_native.NUM_STATS, dtype=torch.float32, device=self.device)
        threads = torch.get_num_threads()
        self._table.grad_stats(self._packed, _NORM_TYPES[norm_type], *Clip(), work, stats, threads)
        return Reduced(work[0], GradStats(stats).found_inf, torch.float32)

    def _allocate_work(self) -> Tensor:
        size = 1 + self._packed.num_chunks
        return torch.empty(size, dtype=torch.float64, device=self.device)

    def rescale_(self, factor: Tensor) -> None:
        """Multiply in place, on CUDA in one launch."""
        torch.autograd.graph.increment_version(self._packed.tensors)
        self._table.rescale(self._packed, factor.to(torch.float32), torch.get_num_threads())


_RULES = {
    Rule.ADAM: (_native.Rule.ADAM, False),
    Rule.ADAMW: (_native.Rule.ADAM, True),
    Rule.SGD: (_native.Rule.SGD, False),
    Rule.ADAGRAD: (_native.Rule.ADAGRAD, False),
}


class CompiledUpdate:
    """The update of one optimizer on one device by the core; see `fastamp._ops.Update`."""

    def __init__(self, table: _native.Ops, update: _native.Update, device: torch.device) -> None:
        self._table = table
        self._update = update
        self._device = device
        self._slots: Tensor | None = None
        self._may_have_skipped = False

    def read(
        self, groups: list[dict[str, Any]], states: dict[Tensor, Any]
    ) -> tuple[CompiledPack, Apply] | str:
        """Return the gradients and the step's update, or say why torch has to make this step."""
        found = self._update.read(groups, states)
        if isinstance(found, str):
            return found
        return CompiledPack(self._table, self._device, found), partial(self._apply_, found)

    @property
    def counts_on_host(self) -> bool:
        """Whether step counts are on the host while a device updates."""
        return self._update.num_slots > 0

    def settle(self, states: dict[Tensor, Any]) -> None:
        """Subtract the steps that the device has skipped from the counts on the host."""
        if self._may_have_skipped and self._slots is not None:
            self._update.settle(self._slots.tolist(), states)
        self._may_have_skipped = False

    def _apply_(
        self,
        step: _native.ReadStep,
        stats: GradStats | None,
        found_inf: Tensor | None = None,
        *,
        zero_grad: bool = False,
    ) -> None:
        whole, factor = None, None
        if stats is not None:
            whole = stats.whole
            if whole is None:
                factor, found_inf = stats.factor, stats.found_inf
        self._may_have_skipped |= stats is not None or found_inf is not None
        slots = self._slots_for(self._update.num_slots)
        if slots is not None and slots.is_cuda:  # allocated on the stream of an earlier step
            slots.record_stream(torch.cuda.current_stream(self._device))
        threads = torch.get_num_threads()
        written = self._table.update(
            self._update, step, whole, factor, found_inf, zero_grad, slots, threads
        )
        if written:
            torch.autograd.graph.increment_version(written)

    def _slots_for(self, count: int) -> Tensor | None:
        """Return at least `count` counters on the device; the kernels set new ones."""
        before = self._slots
        if count > (0 if before is None else len(before)):
            self._slots = torch.empty(2 * count, dtype=torch.float32, device=self._device)
            if before is not None:
                self._slots[: len(before)] = before
        return self._slots


def _index_of(device: torch.device) -> int | None:
    return device.index if device.type == "cuda" else None


def _memory(column: Column) -> tuple[list[tuple[int, int]], int, int, int, int, Any]:
    """Return a column's parts (address, nbytes), rows, stride, row size, `widened` and images.

    All sizes are in bytes. `widened` is the item size of integers that become int64, negative if
    they are signed; 0 copies the rows as they are.
    """
    array, images = column.array, column.images
    if isinstance(array, torch.Tensor):
        itemsize, dtype = array.element_size(), array.dtype
        parts, stride = [(array.data_ptr(), array.nbytes)], array.stride(0) * itemsize
    else:
        itemsize = array.dtype.itemsize
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        arrays = array.parts if isinstance(array, Windows) else (array,)
        parts, stride = [(part.ctypes.data, part.nbytes) for part in arrays], array.strides[0]
    row_nbytes = math.prod(array.shape[1:]) * itemsize
    widened = 0 if dtype == column.dtype else -itemsize if dtype.is_signed else itemsize
    how = images and _describe(images)
    return parts, array.shape[0], stride, row_nbytes, widened, how


def _describe(images: Images) -> tuple[Any, ...]:
    return (*images[:4], images.steps, images.fills.ctypes.data)


def available() -> dict[str, CompiledOps]:
    """Return the compiled backends that can run here, best first."""
    if not _native.has_exchange_table:
        return {}
    found = {"cpu": CompiledOps("cpu", _native.cpu_ops)}
    if _native.built_with_cuda and torch.version.cuda is not None and torch.cuda.is_available():
        found = {"cuda": CompiledOps("cuda", _native.cuda_ops, host_is_apart=True), **found}
    return found


def fault_of(cuda_device: int) -> str | None:
    """Say why the CUDA kernels cannot run on a device, and what helps; None if they can."""
    if torch.version.hip is not None:
        return "the compiled code is for NVIDIA GPUs"
    try:
        _native.check_device(cuda_device)
    except RuntimeError as error:
        return str(error)
    return None
