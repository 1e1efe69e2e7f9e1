"""Arrays whose rows become the rows of batches, and how rows that are images are augmented."""

from bisect import bisect_right
from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor


class StepKind(IntEnum):
    """The augmentations of images."""

    CROP = 0
    FLIP = 1
    CUTOUT = 2


class AugmentStep(NamedTuple):
    """One augmentation, in pixels. It draws two numbers, y and x, below its bounds.

    The upper left corner of a crop or a hole lies at (y - top, x - left).
    """

    kind: StepKind
    y_bound: int
    """Of a flip: its probability times 2^32."""
    x_bound: int = 1
    top: int = 0
    left: int = 0
    height: int = 0
    """Of the crop or the hole."""
    width: int = 0


class Images(NamedTuple):
    """How to augment the rows of a column that are images: planes of pixels."""

    planes: int
    height: int
    width: int
    pixel_nbytes: int
    steps: tuple[AugmentStep, ...]
    """At most 8."""
    fills: npt.NDArray[np.uint8]
    """The pixel that each step fills each plane with: (steps, planes, pixel_nbytes)."""
    row_shape: tuple[int, ...]
    """Of the augmented images."""


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
    is_scattered: bool = False
    """Whether the numbers of a row lie apart, as in a table that is stored column by column."""

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
            return self._replace(array=np.ascontiguousarray(array), is_scattered=False)
        try:  # NumPy's copy takes a third of the time of torch's
            made = torch.from_numpy(np.ascontiguousarray(array.numpy()))
        except TypeError:  # a dtype that NumPy does not have
            made = array.contiguous()
        return self._replace(array=made, is_scattered=False)


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
