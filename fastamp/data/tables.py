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
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import default_collate

from fastamp.data.arrays import Columns, torch_dtype

_FORMATS = (None, "numpy", "torch")
# Not uint64, of which large numbers become int64 or an error, nor float16, whose NaNs torch
# converts in two ways.
_NUMBER = re.compile(r"bool|u?int(8|16|32)|int64|float|double")
_ROWS = 1 << 16  # read at a time: rows that are lists take 100 bytes more

# What each dataset was found to be, after the state of it and of torch for which that holds.
_known: "weakref.WeakKeyDictionary[Any, tuple[Any, Columns | str]]" = weakref.WeakKeyDictionary()


class _UnfitError(Exception):
    """Why a dataset has to make its batches itself."""


def _unfit(name: str, what: str) -> _UnfitError:
    return _UnfitError(f"a column {name!r} {what}")


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
        try:
            found: Columns | str = _read(dataset, max_bytes)
        except _UnfitError as reason:
            found = f"the Hugging Face dataset has {reason}"
        known = _known[dataset] = state, found
    return known[1]


def _read(dataset: Any, max_bytes: int) -> Columns:
    kind, count = dataset.format["type"], len(dataset)
    if kind not in _FORMATS or not count:
        what = "a transform" if kind == "custom" else f"the format {kind}" if count else "no rows"
        raise _UnfitError(what)
    rows = sorted({0, count // 2, count - 1})
    try:
        batch = default_collate(dataset.__getitems__(rows))
    except (TypeError, ValueError, RuntimeError, StopIteration) as error:
        msg = f"no batch: {error}"
        raise _UnfitError(msg) from error
    for name, part in batch.items():
        _check(name, dataset.data.table[name], part)
    nbytes = sum(prod(part.shape[1:]) * part.itemsize * count for part in batch.values())
    if nbytes > max_bytes:
        msg = f"{nbytes:,} bytes of numbers, more than max_bytes ({max_bytes:,})"
        raise _UnfitError(msg)
    columns, names = _read_columns(dataset, batch, rows), [*batch]
    dtypes = [column.dtype for column in columns]
    return Columns(columns, dtypes, lambda parts: dict(zip(names, parts, strict=True)))


def _check(name: str, column: Any, part: Any) -> None:
    """Raise an error unless a column has plain numbers only, and batches of it are tensors."""
    kind = column.type
    while hasattr(kind, "storage_type") or hasattr(kind, "value_type"):
        kind = kind.storage_type if hasattr(kind, "storage_type") else kind.value_type
    reason = None
    if not _NUMBER.fullmatch(str(kind)):
        reason = f"of {column.type}"
    elif column.null_count:
        reason = "with nulls"
    elif type(part) is not Tensor:
        reason = "of lists and no format: see with_format('torch')"
    elif part.device.type != "cpu" or part.requires_grad:
        reason = f"that becomes a tensor on {part.device}" + ", requires grad" * part.requires_grad
    if reason is not None:
        raise _unfit(name, reason)


def _find_rows(dataset: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the rows of Arrow's table in its order, whose slices are read 20 times as fast.

    And the place of each in the dataset.
    """
    wanted = np.arange(len(dataset))
    if dataset._indices is not None:
        wanted = dataset._indices.column(0).to_numpy().astype(np.int64)
    places = np.argsort(wanted, kind="stable")
    return wanted[places], places


def _read_columns(dataset: Any, batch: dict[str, Tensor], rows: list[int]) -> list[Tensor]:
    """Return columns, whose values at some rows must be those of a batch of the dataset's own."""
    columns = {
        name: torch.empty(len(dataset), *part.shape[1:], dtype=part.dtype, device="cpu")
        for name, part in batch.items()
    }
    table, (wanted, places) = type(dataset)(dataset.data, info=dataset.info), _find_rows(dataset)
    for names, options in (
        ([name for name in batch if batch[name].dtype != torch.float64], {}),
        ([name for name in batch if batch[name].dtype == torch.float64], {"dtype": np.float64}),
    ):
        view = table.with_format("numpy", columns=names, **options)
        for begin in range(0, len(table) if names else 0, _ROWS):
            first, last = np.searchsorted(wanted, (begin, begin + _ROWS))
            if first == last:
                continue
            for name, part in view[begin : begin + _ROWS].items():
                if part.shape[1:] != columns[name].shape[1:]:
                    raise _unfit(name, "of lists of several lengths")
                if torch_dtype(part.dtype) != columns[name].dtype:
                    raise _unfit(name, f"that becomes {columns[name].dtype} in another way")
                found = torch.from_numpy(part[wanted[first:last] - begin])
                columns[name][torch.from_numpy(places[first:last])] = found
    for name, part in batch.items():
        if columns[name][rows].numpy().tobytes() != part.numpy().tobytes():
            raise _unfit(name, f"that becomes {part.dtype} in another way")
    return [*columns.values()]
