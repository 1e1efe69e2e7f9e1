"""What a dataset can do for a loader: hand out the memory of its rows, or make whole batches.

Arrays, tokens, Arrow tables, and any `fastamp.Source` have columns: memory that the core gathers
rows out of. All other datasets are read item by item.
"""

import math
from collections.abc import Callable, Iterable
from itertools import zip_longest
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils import collate as torch_collate

from fastamp.data import arrays as new
from fastamp.data.collate import BatchCollator
from fastamp.data.columns import Column, Images, plain_dtype
from fastamp.data.datasets import ArrayDataset
from fastamp.data.plan import as_rows
from fastamp.data.sample_rng import sample_rng
from fastamp.data.structure import map_tensors
from fastamp.data.tables import columns_of_table, is_table
from fastamp.data.tokens import TokenDataset

_ARRAYS = (Tensor, np.ndarray, np.memmap)
_TORCHS = {**torch_collate.default_collate_fn_map}
_IN_MEMORY = (Subset, TensorDataset, ArrayDataset, *_ARRAYS)


class Source(Dataset[Any]):
    """A dataset of a kind of your own that is not read item by item.

    Give it `__len__` and one of two methods:

    - `columns()`, if all rows lie in memory or in a mapped file: the core gathers them, ahead of
      the loop, on its threads;
    - `make(rows, keys)`, if a batch is read at one go, as from Parquet or a database.

    Both are used where batches are made without a `collate_fn` of the user's. `dataset[i]`, and so
    torch's own loader, work as well.

    Example:
        >>> class Halves(fastamp.Source):
        ...     def __len__(self):
        ...         return 6
        ...
        ...     def make(self, rows, keys):
        ...         return {"half": rows / 2}
        >>> next(iter(fastamp.DataLoader(Halves(), batch_size=3)))["half"]
        tensor([0.0000, 0.5000, 1.0000])
    """

    def __len__(self) -> int:
        raise NotImplementedError

    def columns(self) -> Any:
        """Return the arrays whose rows are the samples.

        Called when a pass begins, so it should only hand out what is there.

        Returns:
            A tensor, a NumPy array or memmap, or a dict, list or tuple of them, as for
            `fastamp.ArrayDataset`. All have as many rows as the dataset.
        """
        raise NotImplementedError

    def make(self, rows: Tensor, keys: Tensor) -> Any:
        """Return the batch of some rows.

        Called in the loop's thread, or in a worker: several threads may call it at once.

        Args:
            rows: int64, of shape (batch,).
            keys: int64, of shape (batch,): numbers to seed the random draws of each sample with,
                the same whoever makes it.

        Returns:
            Tensors of shape (batch, ...), in any nesting of dicts, lists and tuples.
        """
        msg = f"{type(self).__name__}: write columns() or make(rows, keys)"
        raise NotImplementedError(msg)

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            msg = f"index {index} is out of range for {len(self)} samples"
            raise IndexError(msg)
        row = index % len(self)
        if gives_columns(self):
            return tree_map(itemgetter(row), self.columns())
        key = sample_rng().take_key()
        keys = torch.tensor([key], dtype=torch.uint64, device="cpu").view(torch.int64)
        return map_tensors(itemgetter(0), self.make(torch.tensor([row], device="cpu"), keys))


def gives_columns(source: Source) -> bool:
    """Say whether a class has the method `columns` of its own."""
    return type(source).columns is not Source.columns


def find_make(dataset: Any, collate_fn: Any) -> Callable[[Tensor, Tensor], Any] | None:
    """Return the method that makes whole batches, unless the user wants to collate samples."""
    is_own = isinstance(dataset, Source) and type(dataset).make is not Source.make
    return dataset.make if is_own and is_default(collate_fn) else None


class Columns(NamedTuple):
    """The columns of a dataset, out of which the core gathers batches."""

    columns: list[Column]
    build: Callable[[list[Tensor]], Any]
    """Makes the batch, as default_collate would, out of one tensor for each column."""
    rows: Tensor | None = None
    """For a subset: the row of each index, int64."""
    find: Callable[[Tensor, Any], Tensor] | None = None
    """For random offsets: returns the rows to gather for indices and the keys of their samples."""


def is_default(collate_fn: Any) -> bool:
    """Say whether batches are those of torch's own `default_collate`."""
    return not why_not(collate_fn)


def why_not(collate_fn: Any, worker_init_fn: Any = None) -> str:
    """Return why a loader cannot gather any dataset; an empty string if it can."""
    if type(collate_fn) is BatchCollator:
        if collate_fn.pad is not None:
            return "collate_fn pads"
    elif collate_fn is not default_collate:
        return "collate_fn is the user's"
    if torch_collate.default_collate_fn_map != _TORCHS:
        return "default_collate_fn_map has functions of the user's"
    return "" if worker_init_fn is None else "worker_init_fn is given"


def read_columns(  # noqa: PLR0911 - one for each reason
    dataset: Any, device: torch.device | str | int | None, max_bytes: int
) -> tuple[Columns | None, str]:
    """Return the columns of a dataset, or None and why there are none.

    Args:
        dataset: of any kind.
        device: where the batches are to be; None is wherever the dataset is.
        max_bytes: the most that copies in row order may take.
    """
    source = find_columns(dataset)
    kind, module = type(dataset).__name__, type(dataset).__module__
    if source is not None:
        own = find_device(source.columns)
        if own.type != "cpu" and device is not None and own != torch.empty(0, device=device).device:
            return None, f"the {kind} is on another device"
        copied = count_scattered(source)
        if copied > max_bytes:
            copy = f"a copy in row order takes {copied:,} bytes, more than max_bytes"
            return None, f"the numbers of a row lie apart, and {copy}"
        return source, ""
    if is_table(dataset):
        return None, str(columns_of_table(dataset, max_bytes))
    if module.startswith("datasets."):
        return None, "the dataset is a Hugging Face dataset"
    if type(dataset) in _IN_MEMORY:
        return None, f"the {kind} holds more than plain arrays"
    return None, f"the dataset is a {kind}"


def find_columns(dataset: object) -> Columns | None:  # noqa: PLR0911 - one for each kind
    """Return the columns of a dataset in memory; None for any other dataset.

    Batches have the values, types and dtypes that default_collate gives them.
    """
    if type(dataset) is Subset:
        inner = find_columns(dataset.dataset)
        rows = None if inner is None else as_rows(dataset.indices)
        if inner is None or rows is None:
            return None
        try:
            return inner._replace(rows=rows if inner.rows is None else inner.rows[rows])
        except IndexError:  # raised by torch's Subset where the batch would come
            return None
    if type(dataset) is TokenDataset:
        return _stand_in(dataset.columns())
    if type(dataset) is TensorDataset:
        return _from_arrays(dataset.tensors)
    if type(dataset) is ArrayDataset:
        return _stand_in(dataset.columns())
    if isinstance(dataset, Source):
        return _from_arrays(dataset.columns()) if gives_columns(dataset) else None
    if is_table(dataset):
        return _stand_in(columns_of_table(dataset, 1 << 30))
    column = _column(dataset)
    return None if column is None else Columns([column], itemgetter(0))


def _stand_in(found: Any) -> Any:
    if isinstance(found, str) or found.then is not None:
        return None
    found = new.in_row_order(found, 1 << 30)
    pairs = zip(found.arrays, found.dtypes, strict=True)
    return Columns([Column(*pair) for pair in pairs], found.build, found.rows, found.starts)


def _from_arrays(tree: Any, images: Iterable[Images | None] = ()) -> Columns | None:
    arrays = tree_leaves(tree)
    found = zip_longest(map(_column, arrays), images)
    columns = [column._replace(images=how) if how else column for column, how in found if column]
    if len(columns) < len(arrays) or len({find_device([column]) for column in columns}) > 1:
        return None
    if type(tree) is tuple and all(type(part) in _ARRAYS for part in tree):
        return Columns(columns, list)
    # Tuples become lists, as in default_collate.
    _, spec = tree_flatten(default_collate([tree_map(lambda _: 0, tree)]))
    return Columns(columns, lambda tensors: tree_unflatten(tensors, spec))


def find_device(columns: list[Column]) -> torch.device:
    """Return the device of the columns."""
    array = columns[0].array
    return array.device if isinstance(array, Tensor) else torch.device("cpu")


def _column(array: Any) -> Column | None:
    """Return an array as a column; None if its rows are not plain memory."""
    dtype = plain_dtype(array, on_host=False)
    if dtype is None or array.ndim == 0 or type(array) not in _ARRAYS:
        return None
    if isinstance(array, Tensor):
        column = Column(array, dtype)
        return None if column.is_scattered and array.device.type != "cpu" else column
    try:  # whether default_collate gives rows this dtype
        fits = default_collate([np.ones((1, *array.shape[1:]), array.dtype)[0]]).dtype == dtype
    except TypeError:  # a dtype that torch does not have
        return None
    if not fits or min(array.strides[1:], default=0) < 0:  # torch's error
        return None
    return Column(array, dtype)


def count_scattered(source: Columns) -> int:
    """Return the bytes of the copies that put the numbers of each row side by side."""
    columns = (column for column in source.columns if column.is_scattered)
    return sum(math.prod(column.array.shape) * column.array.dtype.itemsize for column in columns)
