"""What is gathered without running Python for each item, or not, and why."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, Subset, TensorDataset

from fastamp._ops import core_for
from fastamp.data.arrays import Columns, columns_of, in_row_order
from fastamp.data.datasets import ArrayDataset
from fastamp.data.items import Items, Made
from fastamp.data.memory import LEASED_NBYTES, Memory
from fastamp.data.order import as_rows
from fastamp.data.sample_rng import Keys, Order
from fastamp.data.tables import columns_of_table, is_table
from fastamp.data.tokens import TokenDataset

_CPU = torch.device("cpu")
# From this size on batches evict each other from the caches: the core writes them past these.
_CORE_NBYTES = 4 << 20
_LONG_ROW = 4096  # bytes; shorter rows are gathered by torch
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Signed dtypes of the same size: torch does not gather the unsigned ones everywhere."""
Start: TypeAlias = Callable[[Any, Callable[[Any], Any] | None], Any]
"""Begins the copy of a batch, or of tensors and what finishes a batch of them on the device."""
_rows_of: "WeakKeyDictionary[Any, tuple[Any, list[Any], Tensor | None]]" = WeakKeyDictionary()
"""Of a Subset: its indices, some of them, and the tensor of all."""


class Source(Dataset[Any]):
    """A dataset of a kind of your own whose rows lie in memory or in a mapped file.

    Give it `__len__` and `columns()`: the loader gathers the batches, and runs no Python for each
    item. `dataset[i]`, and so torch's own loader, work as well. A dataset that reads a batch at one
    go, as from Parquet or a database, has a method `__getitems__(indices)` instead, and the loader
    a `collate_fn`, as in torch.

    Example:
        >>> class Squares(fastamp.Source):
        ...     def __len__(self):
        ...         return 6
        ...
        ...     def columns(self):
        ...         return {"square": torch.arange(6) ** 2}
        >>> next(iter(fastamp.DataLoader(Squares(), batch_size=3)))["square"]
        tensor([0, 1, 4])
    """

    def columns(self) -> Any:
        """Return the arrays whose rows are the samples.

        Called when a pass begins, so it should only hand out what is there.

        Returns:
            A tensor, a NumPy array or memmap, or a dict, list or tuple of them, as for
            `fastamp.ArrayDataset`. All have as many rows as the dataset.
        """
        msg = f"{type(self).__name__}: write columns()"
        raise NotImplementedError(msg)

    def __getitem__(self, index: int) -> Any:
        return tree_map(lambda array: array[index], self.columns())


def find_columns(  # noqa: PLR0911 - one for each kind
    dataset: Any, max_bytes: int = 1 << 30
) -> Columns | str:
    """Return the columns of a dataset, or why it is read item by item.

    Batches have the values, types and dtypes that default_collate gives them.
    """
    if _inherits(dataset, Subset):
        inner = find_columns(dataset.dataset, max_bytes)
        return inner if isinstance(inner, str) else _select(inner, dataset)
    if _inherits(dataset, TensorDataset):
        return columns_of(dataset.tensors)
    if _inherits(dataset, ArrayDataset) or _inherits(dataset, TokenDataset):
        return dataset.columns()  # type: ignore[no-any-return]
    if isinstance(dataset, Source) and type(dataset).__getitem__ is Source.__getitem__:
        return columns_of(dataset.columns())
    if is_table(dataset):
        return columns_of_table(dataset, max_bytes)
    if type(dataset) in (Tensor, np.ndarray, np.memmap):
        return columns_of(dataset)
    return f"the dataset is a {type(dataset).__name__}"


def _inherits(dataset: Any, kind: Any) -> bool:
    """Say whether a dataset is of a kind, or of a subclass that reads its items in no other way."""
    own, names = type(dataset), ("__getitem__", "__getitems__", "__len__", "columns")
    return (
        isinstance(dataset, kind)
        and all(getattr(own, name, None) is getattr(kind, name, None) for name in names)
        and vars(dataset).keys().isdisjoint(names)
    )


def _select(columns: Columns, subset: Any) -> Columns | str:
    """Return the columns of a Subset. Its list of indices becomes a tensor once."""
    indices = subset.indices
    step = max(1, len(indices) // 64)
    some = [indices[place] for place in range(0, len(indices), step)]
    known = _rows_of.get(subset)
    if known is None or known[0] is not indices or known[1] != some:
        known = _rows_of[subset] = indices, some, as_rows(indices)
    rows, length = known[2], len(subset.dataset)
    if rows is None or not _are_within(rows, -length, length):
        return "the indices of the Subset are not all rows of its dataset"
    rows = torch.where(rows < 0, rows + length, rows)
    return replace(columns, rows=rows if columns.rows is None else columns.rows[rows])


def _are_within(rows: Tensor, first: int, end: int) -> bool:
    return not len(rows) or (int(rows.min()) >= first and int(rows.max()) < end)


class _Part:
    """An array that is gathered, and how."""

    def __init__(self, array: Tensor, dtype: torch.dtype) -> None:
        self.array, self.own, self.dtype = array, array.dtype, dtype
        self.signed = array.view(_SIGNED.get(array.dtype, array.dtype))
        self.shape, self.is_widened = tuple(array.shape[1:]), dtype is not array.dtype
        self.like = torch.empty(0, dtype=dtype, device=_CPU)  # asked for memory, it is faster
        self.is_long = array[:1].nbytes >= _LONG_ROW and array[:1].is_contiguous()


class Gathered:
    """Makes batches of a dataset's columns. `items` make those of no plain rows."""

    def __init__(self, columns: Columns, memory: Memory, items: Items, max_bytes: int) -> None:
        self._columns = columns = in_row_order(columns, max_bytes)
        self._memory, self._items, self.device = memory, items, columns.arrays[0].device
        self._on_host = self.device == _CPU
        self._parts = [*map(_Part, columns.arrays, columns.dtypes)]
        sizes = [math.prod(part.shape) * part.dtype.itemsize for part in self._parts]
        # So many rows take memory that is leased, and so many more fill the caches.
        self._leased_from = 0 if memory.pinned else LEASED_NBYTES // max(1, *sizes)
        self._core_from = _CORE_NBYTES // max(1, sum(sizes))
        self._core, self._num_threads = core_for(_CPU), torch.get_num_threads()
        self._keyed = columns.starts is not None or columns.then is not None

    def make(self, rows: Any, order: Order, number: int, start: Start | None = None) -> Made:
        """Return the batch of some rows; with `start`, the batch as that returns it."""
        start_s, columns = time.perf_counter(), self._columns
        is_run = type(rows) is range and rows.step == 1 and 0 <= rows.start < rows.stop
        if is_run and rows.stop <= len(self._items.dataset):
            rows = torch.arange(rows.start, rows.stop, device="cpu")
        elif type(rows) is not Tensor:
            found, length = as_rows(rows), len(self._items.dataset)
            if found is None or not _are_within(found, 0, length):
                made = self._items.make(rows, order, number)
                return made if start is None else made._replace(batch=start(made.batch, None))
            rows = found
        keys = order.find_keys(number, rows.shape[0]) if self._keyed else None
        if columns.starts is not None and keys is not None:
            rows = columns.starts(keys)
        elif columns.rows is not None:
            rows = columns.rows.index_select(0, rows)
        parts = self._take(rows, rows.shape[0]) if self._on_host else self._take_on_device(rows)
        if start is None:
            batch = _finish(columns, keys, parts)
        else:
            batch = start(parts, partial(_finish, columns, keys))
        return Made(batch, 0.0, 0.0, time.perf_counter() - start_s)

    def _take(self, rows: Tensor, count: int) -> list[Tensor]:
        """Gather on the host; by the core as int64, and what fills the caches."""
        parts, arrays, outs = [], [], []
        for part in self._parts:
            if count >= self._leased_from:
                out = self._memory.allocate((count, *part.shape), part.dtype)
            elif part.is_widened:
                out = part.like.new_empty(count, *part.shape)
            else:
                taken = part.signed.index_select(0, rows)
                parts.append(taken if taken.dtype is part.own else taken.view(part.own))
                continue
            parts.append(out)
            if self._core and (part.is_widened or (part.is_long and count >= self._core_from)):
                arrays.append(part.array)
                outs.append(out)
            elif part.is_widened:
                out.copy_(part.signed.index_select(0, rows).view(part.own))
            else:
                torch.index_select(part.signed, 0, rows, out=out.view(part.signed.dtype))
        if outs:
            self._core.gather(arrays, rows, outs, self._num_threads)
        return parts

    def _take_on_device(self, rows: Tensor) -> list[Tensor]:
        """Gather on the current stream of the columns' device; nothing waits for the rows."""
        on_cuda = self.device.type == "cuda"
        rows = (rows.pin_memory() if on_cuda else rows).to(self.device, non_blocking=True)
        parts = []
        for part in self._parts:
            if on_cuda:
                part.signed.record_stream(torch.cuda.current_stream(self.device))
            taken = part.signed.index_select(0, rows).view(part.own)
            parts.append(taken.to(part.dtype) if part.is_widened else taken)
        return parts


def _finish(columns: Columns, keys: Keys | None, parts: list[Tensor]) -> Any:
    """Return the batch of its tensors, on whatever device they are now."""
    if columns.then is not None and keys is not None:
        parts = columns.then(parts, keys)
    return columns.build(parts)
