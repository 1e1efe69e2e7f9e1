"""Arrays whose rows become the rows of batches, kept for a pass, and gathered.

The compiled core gathers them ahead of the consumer; without it `TorchGatherer` does in Python.
"""

import functools
import math
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from fastamp import _ops

Images = Any
paint_image: Any = None
_CPU = torch.device("cpu")  # made once: that takes a microsecond


@functools.cache
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """Return torch's name for a dtype of NumPy, or None where torch has none."""
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):
        return None


def plain_dtype(array: Any, *, on_host: bool = True) -> torch.dtype | None:
    """Return torch's dtype of an array in plain memory, `on_host` only on the CPU; else None."""
    if isinstance(array, np.ndarray):
        return torch_dtype(array.dtype)
    if type(array) is not Tensor or array.requires_grad or array.is_meta:
        return None
    if array.layout is not torch.strided or (on_host and array.device.type != "cpu"):
        return None
    odd = array.is_nested or array.is_quantized or array.is_conj() or array.is_neg()
    return None if odd or array._is_zerotensor() else array.dtype


class Windows:
    """Windows of one sequence, as the rows of an array. They may overlap.

    Args:
        parts: the sequence, end to end: one-dimensional arrays of one dtype, none of them empty.
        step: elements from the beginning of a window to that of the next.
        shape: number of windows, and of elements in each. All of them lie in the sequence.
    """

    def __init__(
        self, parts: Sequence[npt.NDArray[Any]], step: int, shape: tuple[int, int]
    ) -> None:
        self.parts, self.step, self.shape, self.dtype = parts, step, shape, parts[0].dtype
        self.strides = (step * self.dtype.itemsize, self.dtype.itemsize)
        self._begins = list(accumulate(map(len, parts), initial=0))
        one = len(parts) == 1
        self._rows: Any = (
            as_strided(parts[0], shape, self.strides, writeable=False) if one else None
        )

    def __getitem__(self, row: int) -> npt.NDArray[Any]:
        """Return a window, which may be a view; rows count from 0."""
        window: npt.NDArray[Any]
        if self._rows is not None:
            window = self._rows[row]
            return window
        window, done = np.empty(self.shape[1], self.dtype), 0
        while done < len(window):  # it may begin in one part and end in another
            place = row * self.step + done
            number = bisect_right(self._begins, place) - 1
            begin = place - self._begins[number]
            part = self.parts[number][begin : begin + len(window) - done]
            window[done : done + len(part)] = part
            done += len(part)
        return window

    def take(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return copies of windows."""
        if self._rows is not None:
            return np.take(self._rows, rows, axis=0)
        return np.array([self[row] for row in rows.tolist()], self.dtype).reshape(-1, self.shape[1])


class Column(NamedTuple):
    """An array on the CPU whose rows become the rows of one tensor of a batch."""

    array: Tensor | npt.NDArray[Any] | Windows
    """Rows along its first dimension; they may overlap."""
    dtype: torch.dtype
    """Of the batch: the array's own, or int64 for unsigned and 32-bit integers."""
    images: Images | None = None
    """How its rows are augmented; None copies them."""

    @property
    def is_scattered(self) -> bool:
        """Whether the numbers of a row lie apart, as in a table stored column by column."""
        array: Any = self.array
        if isinstance(array, Tensor):
            return not (array.is_contiguous() or array[:1].is_contiguous())
        return isinstance(array, np.ndarray) and not array[:1].flags.c_contiguous

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row of the batch."""
        return tuple(self.array.shape[1:]) if self.images is None else self.images.row_shape

    def in_row_order(self) -> "Column":
        """Return the column with the numbers of each row side by side: a copy, if they are not."""
        if not self.is_scattered:
            return self
        array: Any = self.array
        if not isinstance(array, torch.Tensor):
            return self._replace(array=np.ascontiguousarray(array))
        try:  # NumPy's copy takes a third of the time of torch's
            made = torch.from_numpy(np.ascontiguousarray(array.numpy()))
        except TypeError:  # a dtype that NumPy does not have
            made = array.contiguous()
        return self._replace(array=made)


def check_rows(indices: Tensor, num_rows: int) -> Tensor:
    """Return the rows at indices, which may count from the end, or raise torch's error."""
    rows = torch.where(indices < 0, indices + num_rows, indices)
    bad = (rows < 0) | (rows >= num_rows)
    if bad.any():
        raise index_error(int(indices[bad][0]), num_rows)
    return rows


def index_error(index: int, num_rows: int) -> IndexError:
    """Return torch's error for an index that is out of bounds."""
    msg = f"index {index} is out of bounds for dimension 0 with size {num_rows}"
    return IndexError(msg)


def keep(array: Any) -> tuple[Any, Callable[[], bool] | None]:
    """Return a view of a column's rows, which keeps their memory alive whatever is done to it.

    The second value says of a tensor whether it has other memory or another shape now.
    """
    if not isinstance(array, Tensor):
        return (array if isinstance(array, Windows) else array.view()), None
    alias, storage = array.detach(), array.untyped_storage()
    address_of, nbytes_of, looks_into = storage.data_ptr, storage.nbytes, array.is_set_to
    address, nbytes = address_of(), nbytes_of()

    def has_moved() -> bool:
        # A storage is resized and shared in place; `set_` gives the tensor another storage.
        return address_of() != address or nbytes_of() != nbytes or not looks_into(alias)

    return alias, has_moved


def find_core() -> ModuleType | None:
    """Return the compiled core if it serves the host now, else None."""
    found: ModuleType | None = _ops.core_for(_CPU)
    return found


def augment_image(images: Images, row: Any, key: int) -> Any:
    """Return the augmented row, in new memory; `key` seeds its random numbers."""
    core, is_array = find_core(), isinstance(row, np.ndarray)
    if core is None:
        made = paint_image(images, row, key)
    else:
        plain: Any = np.ascontiguousarray(row) if is_array else row.contiguous()
        source = plain.ctypes.data if is_array else plain.data_ptr()
        nbytes = math.prod(images.row_shape) * row.dtype.itemsize
        made = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        core.augment_image(images[:5], key, source, made.data_ptr())
    if is_array:
        return made.numpy().view(row.dtype).reshape(images.row_shape)
    return made.view(row.dtype).view(images.row_shape)


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
        itemsize, dtype = array.dtype.itemsize, torch_dtype(array.dtype) or column.dtype
        arrays = array.parts if isinstance(array, Windows) else (array,)
        parts, stride = [(part.ctypes.data, part.nbytes) for part in arrays], array.strides[0]
    row_nbytes = math.prod(array.shape[1:]) * itemsize
    widened = 0 if dtype == column.dtype else -itemsize if dtype.is_signed else itemsize
    return parts, array.shape[0], stride, row_nbytes, widened, images and images[:5]


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
