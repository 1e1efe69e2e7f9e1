"""What is done with rows and samples on the host: by the compiled core, or in Python without it."""

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, itemgetter
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastamp import _ops
from fastamp.data.columns import Column, Images, Windows, check_rows
from fastamp.data.painting import paint_image

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]

_CPU = torch.device("cpu")
# Below this size of a batch, glibc's allocator reuses memory by itself.
_STACK_BYTES = 32 << 20


def find_core() -> ModuleType | None:
    """Return the compiled core if it serves the host now, else None."""
    found: ModuleType | None = _ops.core_for(_CPU)
    return found


def columns_of(
    core: ModuleType | None, samples: tuple[Any, ...], keys: tuple[Any, ...]
) -> Iterable[Sequence[Any]]:
    """Return, for each key, sample[key] of every sample."""
    found = core and core.columns(samples, keys)
    return found or (list(map(itemgetter(key), samples)) for key in keys)


def stack(
    core: ModuleType | None,
    samples: Sequence[Any],
    dtype: torch.dtype,
    allocate: Allocate,
    pad: Tensor | None = None,
    multiple: int = 1,
) -> Tensor | None:
    """Copy samples into one tensor; None where torch's own function has to.

    Args:
        core: the compiled core; samples that it does not support are copied in Python.
        samples: at least one; all tensors or all arrays, of any shapes.
        dtype: the batch's, which is that of the first sample.
        allocate: gives memory for a shape and a dtype; called once, after all checks.
        pad: the element that fills ragged dimensions, 0-dim on the CPU; None refuses them.
        multiple: ragged dimensions, and that of vectors, are rounded up to a multiple of this.
    """
    if core is not None:
        stacked: Tensor | None = core.stack(samples, dtype, allocate, pad, multiple)
        if stacked is not None:
            return stacked
    if pad is not None:
        return _pad([torch.as_tensor(s) for s in samples], allocate, pad, multiple)
    is_array = isinstance(samples[0], np.ndarray)
    if not (_are_arrays_alike(samples) if is_array else _is_stackable(samples)):
        return None
    out = allocate((len(samples), *samples[0].shape), dtype)
    if is_array:
        np.stack(samples, out=out.numpy())
    else:
        torch.stack(tuple(samples), out=out)
    return out


def _pad(rows: list[Tensor], allocate: Allocate, pad: Tensor, multiple: int) -> Tensor | None:
    """Copy tensors to the start of padded rows; gradients flow through the copies."""
    shapes = [row.shape for row in rows]
    if len({*map(len, shapes)}) > 1:
        return None
    longest = []
    for lengths in zip(*shapes, strict=True):
        is_ragged = len(shapes[0]) == 1 or len({*lengths}) > 1
        longest.append(-(-max(lengths) // multiple) * multiple if is_ragged else lengths[0])
    dtype = functools.reduce(torch.promote_types, [row.dtype for row in rows])
    shape = (len(rows), *longest)
    device = rows[0].device
    on_cpu = device.type == "cpu"
    out = allocate(shape, dtype) if on_cpu else torch.empty(shape, dtype=dtype, device=device)
    out.copy_(pad)
    for i, row in enumerate(rows):
        out[i][tuple(slice(length) for length in row.shape)].copy_(row)
    return out


def _are_arrays_alike(samples: Sequence[Any]) -> bool:
    """Say whether all samples are contiguous arrays of one type, dtype and shape."""
    first = samples[0]
    return (
        first.flags.c_contiguous
        and {*map(type, samples)} == {type(first)}
        and _are_alike(samples, "dtype", "shape", "flags.c_contiguous")
    )


def _is_stackable(samples: Sequence[Tensor]) -> bool:
    """Say whether torch.stack(out=) does what torch.stack does."""
    first = samples[0]
    return (
        first.device.type == "cpu"
        and first.layout is torch.strided
        and not (first.is_nested or first.is_quantized)
        and len(samples) * first.nbytes >= _STACK_BYTES
        and {*map(type, samples)}.issubset(_ops.PLAIN_TYPES)
        and not _ops.in_dispatch_mode()
        and _are_alike(samples, "dtype", "shape", "device", "layout")
        and not any(sample.requires_grad for sample in samples)
    )


def _are_alike(samples: Sequence[Any], *names: str) -> bool:
    """Say whether all samples have the first one's attributes."""
    read = attrgetter(*names)
    expected = read(samples[0])
    return all(read(sample) == expected for sample in samples)


def augment_image(images: Images, row: Tensor | npt.NDArray[Any], key: int) -> Tensor:
    """Return the bytes of the augmented image, in new memory; `key` seeds its random numbers."""
    core = find_core()
    if core is None:
        return paint_image(images, row, key)
    if isinstance(row, np.ndarray):
        row = np.ascontiguousarray(row)
        source = row.ctypes.data
    else:
        row = row.contiguous()
        source = row.data_ptr()
    nbytes = math.prod(images.row_shape) * row.dtype.itemsize
    output = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    core.augment_image(_describe(images), key, source, output.data_ptr())
    return output


def make_gatherer(columns: Sequence[Column], depth: int, threads: int = 1) -> Any:
    """Return a gatherer of batches with `TorchGatherer`'s methods, which keeps the columns alive.

    Args:
        columns: at least one array; all have the same number of rows.
        depth: batches that may be in flight.
        threads: threads that gather them, beside the consumer's.
    """
    core = find_core()
    if core is None:
        return TorchGatherer(columns)
    return core.Gatherer([_memory(column) for column in columns], depth, threads, columns)


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


class TorchGatherer:
    """Gathers batches out of columns, in the order of submission, for one consumer."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns
        self._in_flight: deque[tuple[Tensor, Sequence[Tensor], Tensor | None]] = deque()

    def submit(
        self, indices: Tensor, outputs: Sequence[Tensor], keys: Tensor | None = None
    ) -> None:
        """Add a batch: int64 indices of rows, and one contiguous tensor to fill for each column.

        `keys`, one int64 for each row, seed the random numbers of its augmentation.
        """
        self._in_flight.append((indices, outputs, keys))

    def is_ready(self) -> bool:
        """Say whether the oldest batch is copied, or so small that `wait` copies it at once."""
        return False  # a batch is copied in `wait`, not before

    def wait(self) -> float:
        """Wait for the oldest batch and return the seconds that its copy took.

        Raises:
            IndexError: an index of that batch is out of bounds.
        """
        start_s = time.perf_counter()
        indices, outputs, keys = self._in_flight.popleft()
        for column, output in zip(self._columns, outputs, strict=True):
            _take(column, indices, output, keys)
        return time.perf_counter() - start_s


def _take(column: Column, indices: Tensor, output: Tensor, keys: Tensor | None) -> None:
    """Write the rows at the indices, which may count from the end."""
    array = column.array
    rows = check_rows(indices, array.shape[0])
    if isinstance(array, Windows):
        output.copy_(torch.from_numpy(array.take(rows.numpy())))
    elif column.images is not None and keys is not None:
        for row, target, key in zip(rows.tolist(), output, keys.tolist(), strict=True):
            target.view(-1).view(torch.uint8).copy_(paint_image(column.images, array[row], key))
    elif isinstance(array, np.ndarray):
        output.copy_(torch.from_numpy(np.take(array, rows.numpy(), axis=0)))
    elif array.dtype == output.dtype:
        # torch selects rows of uint16, uint32 and uint64, but not single numbers.
        torch.index_select(array[..., None], 0, rows, out=output[..., None])
    else:
        output.copy_(torch.index_select(array, 0, rows))
