"""Batches of datasets in memory, gathered by the core without running Python for each row."""

import math
from collections import deque
from collections.abc import Iterator
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastamp.data.columns import keep, make_gatherer
from fastamp.data.items import Items
from fastamp.data.resident import DeviceGatherer
from fastamp.data.sample_rng import Batch, Order
from fastamp.data.slots import DEFAULT_MAX_BYTES, Slots
from fastamp.data.sources import Columns, find_device
from fastamp.data.stats import LoaderStats


class _Job(NamedTuple):
    """A batch that is drawn: gathered if it has rows, else made by Python."""

    indices: Any
    """An int64 tensor, or a list where Python has to find the rows, or an error."""
    number: int = 0
    """Of the first sample in the pass."""
    rows: Tensor | None = None
    keys: Tensor | None = None
    """Of the random numbers of its samples, where the core draws them."""
    outputs: tuple[Tensor, ...] = ()
    nbytes: int = 0


class GatherSource(Iterator[Any]):
    """Gathers batches of rows, some ahead of the consumer.

    1. `batches` yields pairs: the indices of a batch, as an int64 tensor, or as a list where Python
       has to find the rows; and the number of its first sample.
    2. `items` make the batch of a list. They also make the rest of the batches if the dataset gets
       other memory in the middle of the pass.
    3. After `num_full` batches no other is drawn until the consumer asks for it: the generator of a
       sampler moves on then, as torch's.
    """

    def __init__(
        self,
        source: Columns,
        batches: Iterator[tuple[Any, int]],
        slots: Slots,
        stats: LoaderStats,
        items: Items,
        order: Order,
        *,
        is_computed: bool,
        num_full: float = math.inf,
        max_bytes: int | None = None,
    ) -> None:
        """Gather further ahead if the order is computed: a user's sampler is read batch by batch.

        Batches larger than the user's `max_bytes` are refused.
        """
        threads = torch.get_num_threads()
        # Pinning takes time, and other batches are being copied to the device.
        ahead = 1 if not is_computed else 2 if slots.pinned else threads + 1
        self._threads = max(1, threads - 1)  # the consumer copies, too, while it waits
        columns, self._build, self._subset, self._find = source
        scattered = [c.array for c in columns if c.is_scattered and isinstance(c.array, Tensor)]
        originals = [tensor for tensor in scattered if not tensor.is_inference()]
        columns = [column.in_row_order() for column in columns]
        self._rows = [(column.row_shape, column.dtype) for column in columns]
        self._row_nbytes = [math.prod(shape) * dtype.itemsize for shape, dtype in self._rows]
        aliases, moves = zip(*(keep(column.array) for column in columns), strict=True)
        pairs = zip(aliases, columns, strict=True)
        self._aliases = [column._replace(array=alias) for alias, column in pairs]
        self._changes = [has_moved for has_moved in moves if has_moved is not None]
        self._changes += [partial(_was_written, tensor, tensor._version) for tensor in originals]
        tensors = [alias for alias in aliases if isinstance(alias, Tensor)]
        self._counting = [tensor for tensor in tensors if not tensor.is_inference()]
        if len(self._counting) < len(tensors):  # nobody can tell what is written into the others
            ahead = 1
        self._owner = get_ident()
        self._gatherer: Any  # None: item by item
        self._slots: Slots | DeviceGatherer = slots
        self._ahead = ahead
        if find_device(columns).type == "cpu":
            self._gatherer = self._make_gatherer()
        else:
            self._gatherer = self._slots = DeviceGatherer(self._aliases)
            self._ahead, self._counting = 1, []  # nothing is made ahead
        self._versions = [tensor._version for tensor in self._counting]
        self._batches, self._stats, self._items, self._cell = batches, stats, items, Batch(order)
        self._has_draws = self._find is not None or any(column.images for column in columns)
        self._max_bytes, self._num_left = max_bytes, num_full
        self._drawn: _Job | None = None  # the next one, while there is no room for it
        self._under_way: deque[_Job] = deque()
        self._held_nbytes = 0

    def _make_gatherer(self) -> Any:
        return make_gatherer(self._aliases, self._ahead, self._threads)

    def __next__(self) -> Any:
        self._look_for_moves()
        self._look_for_writes()
        self._submit_ahead()
        if not self._under_way:
            raise StopIteration
        job = self._under_way[0]
        indices, error = job.indices, job.indices if isinstance(job.indices, Exception) else None
        is_gathered = job.rows is not None and self._gatherer is not None
        if is_gathered:
            try:
                self._stats.copy_s += self._gatherer.wait()
            except (BufferError, IndexError) as refused:
                error = refused
            if get_ident() != self._owner:  # the loop's thread may have moved the memory meanwhile
                self._look_for_moves()
        self._under_way.popleft()
        self._held_nbytes -= job.nbytes
        if self._gatherer is None and type(indices) is torch.Tensor:
            indices, is_gathered, error = indices.tolist(), False, None
        if error is not None:
            try:
                raise error
            finally:
                del error, indices, job  # whose traceback refers to this frame
        if is_gathered:
            self._stats.nbytes += sum(output.nbytes for output in job.outputs)
            return self._build([*job.outputs])
        return self._items.make(indices, self._cell, job.number)

    def is_next_ready(self) -> bool:
        """Say whether the next batch is gathered, or will be in no time."""
        is_under_way = self._under_way and self._gatherer is not None
        is_gathered = is_under_way and self._under_way[0].rows is not None
        return bool(is_gathered) and bool(self._gatherer.is_ready())

    def _look_for_moves(self) -> None:
        """Leave the rest to Python if the dataset has other memory."""
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
        self._gatherer = self._make_gatherer()
        for job in self._under_way:
            if job.rows is not None:
                self._gatherer.submit(job.rows, job.outputs, job.keys)

    def _submit_ahead(self) -> None:
        """Start as many batches as may be under way."""
        under_way, most_nbytes = self._under_way, self._max_bytes or DEFAULT_MAX_BYTES
        while len(under_way) < self._ahead and (self._num_left > 0 or not under_way):
            job, self._drawn = self._drawn or self._draw(), None
            if job is None:
                return
            if job.rows is not None:
                if under_way and self._held_nbytes + job.nbytes > most_nbytes:
                    self._drawn = job
                    return
                count, allocate = job.rows.numel(), self._slots.allocate
                outputs = tuple(allocate((count, *shape), dtype) for shape, dtype in self._rows)
                self._gatherer.submit(job.rows, outputs, job.keys)
                job = job._replace(outputs=outputs)
                self._held_nbytes += job.nbytes
            under_way.append(job)

    def _draw(self) -> _Job | None:
        """Draw the next batch; None at the end."""
        self._num_left -= 1
        try:
            indices, number = next(self._batches)
            if type(indices) is not torch.Tensor or self._gatherer is None:
                return _Job(indices, number)
            count = indices.numel()
            nbytes = sum(self._slots.size(count * row_nbytes) for row_nbytes in self._row_nbytes)
            needed = count * sum(self._row_nbytes)
            if self._max_bytes is not None and needed > self._max_bytes:
                msg = f"max_bytes={self._max_bytes}: one batch takes {needed} bytes"
                return _Job(ValueError(msg), number)
            keys = self._cell.order.find_keys(number, count) if self._has_draws else None
            try:
                rows = indices if self._subset is None else self._subset[indices]
                rows = rows if self._find is None else self._find(rows, keys)
            except IndexError:  # raised by the dataset instead, in its own words
                return _Job(indices.tolist(), number)
            return _Job(indices, number, rows, keys, nbytes=nbytes)
        except StopIteration:
            return None
        except Exception as error:  # noqa: BLE001 - raised where the batch would come
            return _Job(error)


def _was_written(tensor: Tensor, version: int) -> bool:
    return tensor._version != version
