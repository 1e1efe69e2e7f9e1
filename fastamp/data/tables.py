"""Hugging Face datasets: columns of numbers, read once into memory through the dataset itself.

A few rows in the dataset's own format show which batches torch's loader makes of it. The whole is
read in the format "numpy", through an indices mapping where there is one (`select`, `shuffle`,
`filter`, `train_test_split`).
"""

import re
import weakref
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from fastamp.data.arrays import Columns, plain_dtype, torch_dtype

_FORMATS = (None, "numpy", "torch")
# Not uint64, of which large numbers become int64 or an error, nor float16, whose NaNs torch
# converts in two ways.
_NUMBER = re.compile(r"bool|u?int(8|16|32)|int64|float|double")
_ROWS = 1 << 16  # read at a time: rows that are lists take 100 bytes more

# What each dataset was found to be, after the state of it and of torch for which that holds.
_known: "weakref.WeakKeyDictionary[Any, tuple[Any, Columns | str]]" = weakref.WeakKeyDictionary()


def is_table(dataset: object) -> bool:
    """Say whether this is a Hugging Face dataset, without an import of their library."""
    kind = type(dataset)
    return kind.__module__ == "datasets.arrow_dataset" and kind.__name__ == "Dataset"


def columns_of_table(dataset: Any, max_bytes: int) -> Columns | str:
    """Read a dataset's columns, once; return them, or why it has to be read item by item.

    Args:
        dataset: a `datasets.Dataset`.
        max_bytes: the most bytes that the columns may take.
    """
    like = torch.empty(0)  # of the default dtype, on the default device
    state = dataset.format, like.dtype, like.device, max_bytes, id(dataset.data)
    known = _known.get(dataset)
    if known is None or known[0] != state:
        known = _known[dataset] = state, _read(dataset, max_bytes)
    return known[1]


def _read(dataset: Any, max_bytes: int) -> Columns | str:
    kind, count, what = dataset.format["type"], len(dataset), "the Hugging Face dataset has"
    if kind not in _FORMATS or not count:
        return f"{what} " + (f"the format {kind}" if count else "no rows")
    rows = sorted({0, count // 2, count - 1})
    try:
        batch = default_collate(dataset.__getitems__(rows))
    except (TypeError, ValueError, RuntimeError, StopIteration) as error:
        return f"{what} no batch: {error}"
    for name, part in batch.items():
        if not _is_plain(dataset.data.table[name], part):
            return f"{what} a column {name!r} of no plain numbers, or of lists without with_format"
    nbytes = sum(prod(part.shape[1:]) * part.itemsize * count for part in batch.values())
    if nbytes > max_bytes:
        return f"{what} {nbytes:,} bytes of numbers, more than max_bytes ({max_bytes:,})"
    columns = {
        name: torch.empty(count, *part.shape[1:], dtype=part.dtype, device="cpu")
        for name, part in batch.items()
    }
    odd = _fill(columns, dataset)
    for name, part in batch.items():
        if odd == name or columns[name][rows].numpy().tobytes() != part.numpy().tobytes():
            return f"{what} a column {name!r} of several lengths, or converted in a way of its own"
    dtypes = [column.dtype for column in columns.values()]
    build = lambda parts: dict(zip(columns, parts, strict=True))  # noqa: E731
    return Columns([*columns.values()], dtypes, build)


def _is_plain(column: Any, part: Any) -> bool:
    """Say whether a column has plain numbers only, and batches of it are tensors."""
    kind = column.type
    while hasattr(kind, "storage_type") or hasattr(kind, "value_type"):
        kind = kind.storage_type if hasattr(kind, "storage_type") else kind.value_type
    is_number = _NUMBER.fullmatch(str(kind)) and not column.null_count
    return bool(is_number) and plain_dtype(part) is not None


def _fill(columns: dict[str, Tensor], dataset: Any) -> str | None:
    """Read all rows; return the name of a column that does not become what a batch has."""
    # In the order of Arrow's table, whose slices are read 20 times as fast as scattered rows.
    wanted = np.arange(len(dataset))
    if dataset._indices is not None:
        wanted = dataset._indices.column(0).to_numpy().astype(np.int64)
    places = np.argsort(wanted, kind="stable")
    wanted, table = wanted[places], type(dataset)(dataset.data, info=dataset.info)
    for options in ({}, {"dtype": np.float64}):
        is_double = bool(options)
        names = [n for n, part in columns.items() if (part.dtype == torch.float64) == is_double]
        view = table.with_format("numpy", columns=names, **options)
        for begin in range(0, len(table) if names else 0, _ROWS):
            first, last = np.searchsorted(wanted, (begin, begin + _ROWS))
            for name, part in view[begin : begin + _ROWS].items() if first < last else ():
                like = columns[name]
                if part.shape[1:] != like.shape[1:] or torch_dtype(part.dtype) != like.dtype:
                    return str(name)
                found = torch.from_numpy(part[wanted[first:last] - begin])
                like[torch.from_numpy(places[first:last])] = found
    return None
