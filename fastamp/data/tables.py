"""Hugging Face datasets: columns of numbers, read once into memory.

A few rows in the dataset's own format show which batches torch's loader makes of it. The whole is
read from Arrow's table, by the rows that `select`, `shuffle` and others chose.
"""

import re
import weakref
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from fastamp.data.arrays import Columns, plain_dtype

# Not uint64, of which large numbers become int64 or an error, nor float16, whose NaNs torch
# converts in two ways.
_NUMBER = re.compile(r"bool|u?int(8|16|32)|int64|float|double")

# What each dataset was found to be, after the state of it and of torch for which that holds.
_known: "weakref.WeakKeyDictionary[Any, tuple[Any, Columns | str]]" = weakref.WeakKeyDictionary()


def is_table(dataset: object) -> bool:
    """Say whether this is a Hugging Face dataset, without an import of their library."""
    kind = type(dataset)
    return kind.__module__ == "datasets.arrow_dataset" and kind.__name__ == "Dataset"


def columns_of_table(dataset: Any, max_bytes: int) -> Columns | str:
    """Return a dataset's columns, read once, or why it has to be read item by item."""
    like = torch.empty(0)  # of the default dtype, on the default device
    state = dataset.format, like.dtype, like.device, max_bytes, id(dataset.data)
    known = _known.get(dataset)
    if known is None or known[0] != state:
        known = _known[dataset] = state, _read(dataset, max_bytes)
    return known[1]


def _read(dataset: Any, max_bytes: int) -> Columns | str:
    kind, count, what = dataset.format["type"], len(dataset), "the Hugging Face dataset has"
    if kind not in (None, "numpy", "torch") or not count:
        return f"{what} " + (f"the format {kind}" if count else "no rows")
    rows = sorted({0, count // 2, count - 1})
    try:
        batch = default_collate(dataset.__getitems__(rows))
    except (TypeError, ValueError, RuntimeError, StopIteration) as error:
        return f"{what} no batch: {error}"
    for name, part in batch.items():
        if plain_dtype(part) is None:
            return f"{what} a column {name!r} of no plain numbers, or of lists without with_format"
    nbytes = sum(prod(part.shape[1:]) * part.itemsize * count for part in batch.values())
    if nbytes > max_bytes:
        return f"{what} {nbytes:,} bytes of numbers, more than max_bytes ({max_bytes:,})"
    table, arrays = dataset.data.table.select([*batch]), []
    if dataset._indices is not None:
        table = table.take(dataset._indices.column(0))
    for name, part in batch.items():
        found = _numbers_of(table[name], (count, *part.shape[1:]))
        if found is not None and part.dtype not in (torch.float16, torch.bfloat16):
            arrays.append(found.to(part.dtype))
            if arrays[-1][rows].numpy().tobytes() == part.numpy().tobytes():
                continue
        return f"{what} a column {name!r} of nulls, of several lengths, or converted on its way"
    dtypes = [array.dtype for array in arrays]
    return Columns(arrays, dtypes, lambda parts: dict(zip(batch, parts, strict=True)))


def _numbers_of(column: Any, shape: tuple[int, ...]) -> Tensor | None:
    """Return the numbers of Arrow's column, whose rows may be lists of one length; else None."""
    column = column.combine_chunks()
    for length in shape[1:]:
        column = getattr(column, "storage", column)
        if column.value_lengths().unique().to_pylist() != [length]:
            return None
        column = column.flatten()
    if column.null_count or not _NUMBER.fullmatch(str(column.type)):
        return None
    return torch.tensor(column.to_numpy(zero_copy_only=False)).view(shape)
