"""Batches of datasets in memory, gathered by the core without running Python for each row."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import zip_longest
from operator import itemgetter
from threading import get_ident
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate
from torch.utils.data._utils import collate as torch_collate

from fastamp.data.augment import Images
from fastamp.data.collate import BatchCollator
from fastamp.data.columns import Column, find_core, keep, make_gatherer, plain_dtype
from fastamp.data.datasets import ArrayDataset
from fastamp.data.indices import as_rows
from fastamp.data.resident import DeviceGatherer
from fastamp.data.slots import DEFAULT_MAX_BYTES, Slots, too_large
from fastamp.data.stats import LoaderStats
from fastamp.data.tables import is_table, read_table
from fastamp.data.tokens import TokenDataset

_ARRAYS = (Tensor, np.ndarray, np.memmap)
_TORCHS = {**torch_collate.default_collate_fn_map}
_IN_MEMORY = (Subset, TensorDataset, ArrayDataset, *_ARRAYS)


class Gatherable(NamedTuple):
    """The columns of a dataset, out of which the core gathers batches."""

    columns: list[Column]
    build: Callable[[list[Tensor]], Any]
    """Makes the batch, as default_collate would, out of one tensor for each column."""
    rows: Tensor | None = None
    """For a subset: the row of each index, int64."""
    find: Callable[[Tensor, Any], Tensor] | None = None
    """For random offsets: returns the rows to gather for indices and the keys of their samples."""


def find_path(loader: DataLoader[Any]) -> tuple[Gatherable | None, str]:
    """Return a loader's columns if its batches can be gathered, and how batches are made."""
    gatherable, reason = None, _find_reason(loader)
    if not reason:
        gatherable, reason = _find_columns(loader)
    if gatherable is not None:
        device = find_device(gatherable.columns)
        if device.type != "cpu" or getattr(loader, "resident", False):
            return gatherable, f"gathered on {getattr(loader, 'device', None) or device}"
        way = "gathered by the compiled core" if find_core() else "gathered by Python"
        copied = _count_scattered(gatherable)
        rows = f", from a copy in row order of {copied:,} bytes, made for each pass"
        return gatherable, way + rows * (copied > 0)
    count = loader.num_workers
    kind = "thread" if getattr(loader, "_in_threads", False) else "worker"
    workers = f", in {count} {kind}{'s' * (count > 1)}" if count else ""
    return None, f"item by item{workers}: {reason}"


def _find_reason(loader: DataLoader[Any]) -> str:
    """Return why a loader cannot gather any dataset; an empty string if it can."""
    collate_fn = loader.collate_fn
    if loader.batch_sampler is None:
        return "the loader makes no batches"
    if type(collate_fn) is BatchCollator and collate_fn.pad is not None:
        return "collate_fn pads"
    if type(collate_fn) is not BatchCollator and collate_fn is not default_collate:
        return "collate_fn is the user's"
    registered = torch_collate.default_collate_fn_map
    added = tuple(kind for kind in registered if kind not in _TORCHS)
    changed = any(registered.get(kind) is not function for kind, function in _TORCHS.items())
    if changed or isinstance((), added) or isinstance({}, added):  # the samples of rows
        return "default_collate_fn_map has functions of the user's"
    return "" if loader.worker_init_fn is None else "worker_init_fn is given"


def _find_columns(loader: DataLoader[Any]) -> tuple[Gatherable | None, str]:
    """Return the columns of a loader's dataset, or None and why there are none."""
    dataset = loader.dataset
    gatherable = make_gatherable(dataset)
    kind, module = type(dataset).__name__, type(dataset).__module__
    if gatherable is not None and not _may_stay(loader, find_device(gatherable.columns)):
        return None, f"the {kind} is on another device"
    copied = 0 if gatherable is None else _count_scattered(gatherable)
    if copied > (getattr(loader, "max_bytes", None) or DEFAULT_MAX_BYTES):
        copy = f"a copy in row order takes {copied:,} bytes, more than max_bytes"
        return None, f"the numbers of a row lie apart, and {copy}"
    if gatherable is None and is_table(dataset):
        return None, f"the Hugging Face dataset has {read_table(dataset)}"
    if module.startswith("datasets."):
        return gatherable, "the dataset is a Hugging Face dataset"
    if type(dataset) in _IN_MEMORY:
        return gatherable, f"the {kind} holds more than plain arrays"
    return gatherable, f"the dataset is a {kind}"


def _may_stay(loader: Any, device: torch.device) -> bool:
    """Say whether the dataset is on the host, or else where the loader's batches are to be."""
    if device.type == "cpu" or loader.pin_memory:
        return device.type == "cpu"
    wanted = getattr(loader, "device", None)
    return wanted is None or torch.empty(0, device=wanted).device == device


def make_gatherable(dataset: object) -> Gatherable | None:  # noqa: PLR0911 - one for each kind
    """Return the columns of a dataset in memory; None for any other dataset.

    Batches have the values, types and dtypes that default_collate gives them.
    """
    if type(dataset) is Subset:
        inner = make_gatherable(dataset.dataset)
        rows = None if inner is None else as_rows(dataset.indices)
        if inner is None or rows is None:
            return None
        try:
            return inner._replace(rows=rows if inner.rows is None else inner.rows[rows])
        except IndexError:  # raised by torch's Subset where the batch would come
            return None
    if type(dataset) is TokenDataset:
        columns = [Column(part, torch.int64) for part in (dataset.x, dataset.y)]
        return Gatherable(
            columns, list, None, dataset.find_starts if dataset.random_offsets else None
        )
    if type(dataset) is TensorDataset:
        return _from_arrays(dataset.tensors)
    if type(dataset) is ArrayDataset:
        return _from_arrays(dataset.arrays, dataset.images())
    if is_table(dataset):
        table = read_table(dataset)
        return None if isinstance(table, str) else Gatherable(*table)
    column = _column(dataset)
    return None if column is None else Gatherable([column], itemgetter(0))


def _from_arrays(tree: Any, images: Iterable[Images | None] = ()) -> Gatherable | None:
    arrays = tree_leaves(tree)
    found = zip_longest(map(_column, arrays), images)
    columns = [column._replace(images=how) for column, how in found if column is not None]
    if len(columns) < len(arrays) or len({find_device([column]) for column in columns}) > 1:
        return None
    if type(tree) is tuple and all(type(part) in _ARRAYS for part in tree):
        return Gatherable(columns, list)
    # Tuples become lists, as in default_collate.
    _, spec = tree_flatten(default_collate([tree_map(lambda _: 0, tree)]))
    return Gatherable(columns, lambda tensors: tree_unflatten(tensors, spec))


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
        is_plain = array[:1].is_contiguous()
        return Column(array, dtype, None, not is_plain) if is_plain or _on_host(array) else None
    try:  # whether default_collate gives rows this dtype
        fits = default_collate([np.ones((1, *array.shape[1:]), array.dtype)[0]]).dtype == dtype
    except TypeError:  # a dtype that torch does not have
        return None
    if not fits or min(array.strides[1:], default=0) < 0:  # torch's error
        return None
    return Column(array, dtype, None, not array[:1].flags.c_contiguous)


def _on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _count_scattered(gatherable: Gatherable) -> int:
    """Return the bytes of the copies that put the numbers of each row side by side."""
    columns = (column for column in gatherable.columns if column.is_scattered)
    return sum(math.prod(column.array.shape) * column.array.dtype.itemsize for column in columns)


def _was_written(tensor: Tensor, version: int) -> bool:
    return tensor._version != version


class GatherSource(Iterator[Any]):
    """Gathers batches of rows, some ahead of the consumer, up to `max_bytes`.

    `indices` yields pairs: the indices of a batch, as an int64 tensor, or as a list where Python
    has to find the rows; and the keys of its samples, or None. `make` makes the batch of a list. It
    also makes the rest of the batches if the dataset gets other memory in the middle of the pass.
    What `indices` does after `num_batches`, it does when the consumer asks for the end.
    """

    makes_fresh = True  # nothing writes into the memory of a batch after it is delivered

    def __init__(
        self,
        gatherable: Gatherable,
        indices: Iterator[Any],
        slots: Slots,
        stats: LoaderStats,
        max_bytes: int | None,
        make: Callable[[list[Any], Tensor | None], Any],
        num_batches: float = math.inf,
    ) -> None:
        columns, self._build, self._subset, self._find = gatherable
        scattered = [c.array for c in columns if c.is_scattered and isinstance(c.array, Tensor)]
        originals = [tensor for tensor in scattered if not tensor.is_inference()]
        columns = [column.in_row_order() for column in columns]
        self._rows = [(column.row_shape, column.dtype) for column in columns]
        self._row_nbytes = [math.prod(shape) * dtype.itemsize for shape, dtype in self._rows]
        # For a GPU only two, since pinning memory takes time; two more batches are being copied.
        self._depth = 2 if slots.pinned else torch.get_num_threads() + 1
        self._kept = [keep(column.array) for column in columns]
        pairs = zip(self._kept, columns, strict=True)
        self._aliases = [column._replace(array=kept.alias) for kept, column in pairs]
        self._changes = {change for kept in self._kept for change in kept.changes()}
        self._changes |= {partial(_was_written, tensor, tensor._version) for tensor in originals}
        tensors = [kept.alias for kept in self._kept if isinstance(kept.alias, Tensor)]
        self._counting = [tensor for tensor in tensors if not tensor.is_inference()]
        if len(self._counting) < len(tensors):  # nobody can tell what is written into the others
            self._depth = 1
        self._owner = get_ident()
        self._gatherer: Any  # None: item by item
        self._slots: Slots | DeviceGatherer = slots
        if find_device(columns).type == "cpu":
            self._gatherer = make_gatherer(self._aliases, self._depth)
        else:
            self._gatherer = self._slots = DeviceGatherer(self._aliases)
            self._depth, self._counting = 1, []  # nothing is gathered ahead
        self._versions = [tensor._version for tensor in self._counting]
        self._indices, self._stats, self._make = indices, stats, make
        self._max_bytes, self._num_left = max_bytes, num_batches
        # The next batch, while there is no room for it: its indices, keys and rows.
        self._drawn: tuple[Any, Tensor | None, Tensor | None] | None = None
        # Indices or an error, keys, rows, the tensors to gather into, and their bytes.
        self._under_way: deque[tuple[Any, Tensor | None, Any, list[Tensor], int]] = deque()
        self._held_nbytes = 0

    def __next__(self) -> Any:
        self._look_for_moves()
        self._look_for_writes()
        self._submit_ahead()
        if not self._under_way:
            raise StopIteration
        indices, keys, _, outputs, nbytes = self._under_way[0]
        error = indices if isinstance(indices, Exception) else None
        if outputs and self._gatherer is not None:
            try:
                self._stats.copy_s += self._gatherer.wait()
            except (BufferError, IndexError) as refused:
                error = refused
            if get_ident() != self._owner:  # the loop's thread may have moved the memory meanwhile
                self._look_for_moves()
        self._under_way.popleft()
        self._held_nbytes -= nbytes
        if self._gatherer is None and type(indices) is torch.Tensor:
            indices, outputs, error = indices.tolist(), [], None
        if error is not None:
            try:
                raise error
            finally:
                del error, indices  # whose traceback refers to this frame
        if outputs:
            self._stats.nbytes += sum(output.nbytes for output in outputs)
            return self._build(outputs)
        for kept in self._kept:
            kept.check_file()
        return self._make(indices, keys)

    @property
    def has_threads(self) -> bool:
        """Whether threads gather batches while the consumer does other work."""
        return find_core() is not None

    def is_next_ready(self) -> bool:
        """Say whether the next batch is gathered, or will be in no time."""
        is_under_way = self._under_way and self._gatherer is not None and self._under_way[0][3]
        return bool(is_under_way) and bool(self._gatherer.is_ready())

    def _look_for_moves(self) -> None:
        """Leave the rest to Python if the dataset has other memory, or its file was cut short."""
        for has_changed in self._changes:
            if has_changed():
                self._gatherer = None  # its end waits for copies that run

    def _look_for_writes(self) -> None:
        """Gather the batches under way again if somebody has written into the dataset."""
        versions = [tensor._version for tensor in self._counting]
        if versions == self._versions:
            return
        self._versions = versions
        if self._gatherer is None or not self._under_way:
            return
        self._gatherer = None  # its end waits for copies that run
        self._gatherer = make_gatherer(self._aliases, self._depth)
        for _, keys, rows, outputs, _ in self._under_way:
            if outputs:
                self._gatherer.submit(rows, outputs, keys)

    def _submit_ahead(self) -> None:
        """Start as many batches as may be under way."""
        under_way, limit = self._under_way, self._max_bytes or DEFAULT_MAX_BYTES
        while len(under_way) < self._depth and (self._num_left > 0 or not under_way):
            if self._drawn is None:
                self._drawn, self._num_left = self._draw(), self._num_left - 1
            indices, keys, rows = self._drawn
            self._drawn = None
            if indices is None:
                return
            if rows is None:
                under_way.append((indices, keys, None, [], 0))
                continue
            count = rows.numel()
            nbytes = sum(self._slots.size(count * row_nbytes) for row_nbytes in self._row_nbytes)
            if under_way and self._held_nbytes + nbytes > limit:
                self._drawn = indices, keys, rows
                return
            outputs = [self._slots.allocate((count, *shape), dtype) for shape, dtype in self._rows]
            self._gatherer.submit(rows, outputs, keys)
            under_way.append((indices, keys, rows, outputs, nbytes))
            self._held_nbytes += nbytes

    def _draw(self) -> tuple[Any, Tensor | None, Tensor | None]:
        """Return a batch's indices (or an error, or None at the end), keys, and rows to gather."""
        try:
            indices, keys = next(self._indices, (None, None))
            if type(indices) is not torch.Tensor:
                return indices, keys, None
            if self._gatherer is None:
                return indices.tolist(), keys, None
            nbytes = indices.numel() * sum(self._row_nbytes)
            if self._max_bytes is not None and nbytes > self._max_bytes:
                raise too_large(self._max_bytes, nbytes)  # noqa: TRY301 - delivered in its place
            try:
                rows = indices if self._subset is None else self._subset[indices]
                return indices, keys, rows if self._find is None else self._find(rows, keys)
            except IndexError:  # raised by the dataset instead, in its own words
                return indices.tolist(), keys, None
        except Exception as error:  # noqa: BLE001 - raised where the batch would come
            return error, None, None
