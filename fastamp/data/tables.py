"""Hugging Face datasets: their columns of numbers, gathered from where Arrow keeps them.

An Arrow column is immutable, and lies in chunks, of 1,000 rows in a file of `save_to_disk`. Each
chunk is read through a view of its memory, or of the mapped file. A few rows are also read by the
dataset itself: they show which dtype a batch has, and whether the views have the same values.
Batches are bit-identical to those of torch's loader, except for signalling NaNs, which NumPy makes
quiet in the format "numpy".
"""

import math
import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import default_collate

from fastamp.data.columns import Column, Windows, torch_dtype

_FORMATS = (None, "numpy", "torch")
# Not uint64, which becomes int64 or an error, nor float16, whose NaNs torch converts one way in a
# large tensor and another in a small one.
_NUMBERS = {"uint8", "uint16", "uint32", "int8", "int16", "int32", "int64", "float", "double"}
_WIDENED = (torch.uint8, torch.uint16, torch.uint32, torch.int32)  # to int64, by the core
_TO_FLOATS = (torch.float32, torch.float64)

Table: TypeAlias = tuple[list[Column], Callable[[list[Tensor]], dict[str, Tensor]]]

# What each dataset was found to be, after the state of it and of torch for which that holds.
_known: "weakref.WeakKeyDictionary[Any, tuple[Any, ...]]" = weakref.WeakKeyDictionary()


class _UnfitError(Exception):
    """Why a dataset has to make its batches itself."""


def _unfit(name: str, what: str) -> _UnfitError:
    return _UnfitError(f"a column {name!r} {what}")


def is_table(dataset: object) -> bool:
    """Say whether this is a Hugging Face dataset, without an import of their library."""
    kind = type(dataset)
    return kind.__module__ == "datasets.arrow_dataset" and kind.__name__ == "Dataset"


def read_table(dataset: Any) -> Table | str:
    """Return a dataset's columns and the function that makes a batch, or why it has none."""
    like = torch.empty(0)  # of the default dtype, on the default device
    state = dataset.data, dataset._indices is None, dataset.format, like.dtype, like.device
    known = _known.get(dataset)
    if known is None or known[0] is not state[0] or known[1:-1] != state[1:]:
        try:
            known = _known[dataset] = (*state, _read(dataset))
        except _UnfitError as reason:
            known = _known[dataset] = (*state, str(reason))
    table: Table | str = known[-1]
    return table


def _read(dataset: Any) -> Table:
    wanted, count = dataset.format, len(dataset)
    kind = wanted["type"]
    for reason, applies in {
        "an indices mapping, which flatten_indices() removes": dataset._indices is not None,
        "a transform": kind == "custom",
        f"the format {kind}": kind not in _FORMATS,
        "no rows": not count,
    }.items():
        if applies:
            raise _UnfitError(reason)
    arrow, rows = dataset.data.table, [0, count // 2, count - 1]
    names = arrow.column_names if wanted["output_all_columns"] else wanted["columns"]
    found = {name: _read_column(name, arrow[name]) for name in names}
    try:
        batch = default_collate(dataset.__getitems__(rows))
    except (TypeError, ValueError, RuntimeError, StopIteration) as error:
        msg = f"no batch: {error}"
        raise _UnfitError(msg) from error
    columns = {}
    for name, expected in batch.items():
        columns[name] = _check(name, *found[name], rows, expected)
    rows_of = {name: (expected.shape[1:], expected.dtype) for name, expected in batch.items()}

    def build(tensors: list[Tensor]) -> dict[str, Tensor]:
        pairs = zip(rows_of.items(), tensors, strict=True)
        return {name: _convert(tensor, *like) for (name, like), tensor in pairs}

    return [*columns.values()], build


def _check(
    name: str, column: Column, shape: tuple[int, ...], rows: list[int], expected: Any
) -> Column:
    """Compare rows of a column with the dataset's own; return the column as the core gathers it."""
    if type(expected) is not torch.Tensor:
        raise _unfit(name, "of lists and no format: see with_format('torch')")
    dtype, to = column.dtype, expected.dtype
    array: Any = column.array
    found = torch.from_numpy(np.stack([array[row] for row in rows]))
    fits = to == dtype or to in (_TO_FLOATS if dtype.is_floating_point else (torch.int64,))
    fits = fits and expected.device.type == "cpu" and not expected.requires_grad
    fits = fits and shape == expected.shape[1:]
    if not fits or found.to(to).numpy().tobytes() != expected.numpy().tobytes():
        raise _unfit(name, f"that becomes {to} in another way")
    return column._replace(dtype=to) if dtype in _WIDENED and to == torch.int64 else column


def _convert(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    tensor = tensor.view(len(tensor), *shape)
    if tensor.dtype == dtype:
        return tensor
    return torch.empty_like(tensor, dtype=dtype, pin_memory=tensor.is_pinned()).copy_(tensor)


def _read_column(name: str, column: Any) -> tuple[Column, tuple[int, ...]]:
    """Return where the numbers of an Arrow column lie, and the shape of a row."""
    parts = [_read_chunk(name, chunk) for chunk in column.chunks if len(chunk)]
    shape, dtype = parts[0].shape[1:], torch_dtype(parts[0].dtype)
    if any(part.shape[1:] != shape for part in parts):
        raise _unfit(name, "of lists of several lengths")
    if dtype is None:  # an older torch
        raise _unfit(name, f"of {column.type}")
    size = math.prod(shape)
    rows = Windows([part.reshape(-1) for part in parts], size, (sum(map(len, parts)), size))
    return Column(rows, dtype), shape


def _read_chunk(name: str, chunk: Any) -> npt.NDArray[Any]:
    arrow: Any = sys.modules["pyarrow"]
    values, shape = getattr(chunk, "storage", chunk), [len(chunk)]
    while not values.null_count:
        if isinstance(values, arrow.FixedSizeListArray):
            shape.append(values.type.list_size)
        elif type(values) in (arrow.ListArray, arrow.LargeListArray):
            offsets = values.offsets.to_numpy()
            shape.append(int(offsets[1] - offsets[0]))
            if (np.diff(offsets) != shape[-1]).any():
                raise _unfit(name, "of lists of several lengths")
        elif str(values.type) not in _NUMBERS:
            raise _unfit(name, f"of {chunk.type}")
        else:
            array: npt.NDArray[Any] = values.to_numpy()
            return array.reshape(shape)
        if not shape[-1]:
            raise _unfit(name, "of empty lists")
        values = values.flatten()
    raise _unfit(name, "with nulls")
