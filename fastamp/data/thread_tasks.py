"""The tasks of thread workers: the samples of a batch, or the next batch of a stream."""

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from operator import getitem
from queue import SimpleQueue
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from fastamp.data.items import Make, find_together, hand_on, make_rows, note_index
from fastamp.data.row_writer import Rows, find_get
from fastamp.data.sample_rng import Batch, Order, current
from fastamp.data.slots import Slots
from fastamp.data.structure import count_nbytes


class Maker(NamedTuple):
    """What the threads of a pass share. It holds no reference to the pass, whose end stops them."""

    get: Callable[[Any], Any]
    whole: bool
    """Whether `get` makes all samples of a batch at once."""
    rows: Callable[[int], Rows] | None
    collate_fn: Callable[[Any], Any]
    order: Order
    grad: bool
    pins: bool
    lock: Lock
    ready: SimpleQueue[int]
    """Receives the numbers of tasks that are done."""
    used_s: deque[float]
    """Receives the processor time of each thread's part of a batch."""
    dropped: list[Any]
    """Not empty once no more batches are wanted."""
    ended: "weakref.ref[Any]"
    """Refers to the pass. At its end `dropped.append` is called: no Python code, which Ctrl-C
    could interrupt."""


def find_maker(
    dataset: Any,
    collate_fn: Callable[[Any], Any],
    order: Order,
    batches: Any,
    *,
    make: Make | None,
    single: bool,
    pins: bool,
    slots: Slots | None,
) -> Maker:
    """Return what the threads of a pass need; large leaves are written into rows of `slots`."""
    dropped: list[Any] = []
    together = None if single else find_together(dataset)
    if make is not None:
        together, collate_fn = partial(make_rows, make), hand_on
    whole = single or together is not None
    return Maker(
        get=together or partial(getitem, dataset),
        whole=whole,
        rows=None if whole or slots is None else partial(Rows, find_get(dataset), slots),
        collate_fn=collate_fn,
        order=order,
        grad=torch.is_grad_enabled(),
        pins=pins,
        lock=Lock(),
        ready=SimpleQueue(),
        used_s=deque(),
        dropped=dropped,
        ended=weakref.ref(batches, dropped.append),
    )


class Task:
    """What thread workers do for one batch, and the batch or the error in its place."""

    def __init__(self, number: int, count: int, maker: Maker) -> None:
        self.number, self.count, self._maker = number, count, maker
        self.getitem_s = self.collate_s = 0.0
        self.batch: Any = None
        self.error: BaseException | None = None
        self.nbytes = 0

    def _deliver(self, batch: Any) -> None:
        """Pin and measure the batch."""
        self.batch = pin_memory(batch) if self._maker.pins else batch  # type: ignore[no-untyped-call]
        self.nbytes = count_nbytes(batch)


class BatchTask(Task):
    """One batch: several threads make its samples, and the one that makes the last collates."""

    def __init__(self, number: int, indices: Any, first: int, maker: Maker) -> None:
        self._indices = [indices] if maker.whole else indices
        super().__init__(number, len(self._indices), maker)
        self._first = first
        self._claimed, self._left = 0, self.count
        self._samples: list[Any] = [None] * self.count
        self._rows = None if maker.rows is None else maker.rows(self.count)
        self._failed_at = self.count

    def __call__(self, failed: BaseException | None) -> bool:
        """Make samples until all are begun; say whether the thread's own error was handed on."""
        maker = self._maker
        torch.set_grad_enabled(maker.grad)  # for this thread
        place, start_s = self.count, time.thread_time()
        cell = current.sample = Batch(maker.order)
        while not maker.dropped:
            with maker.lock:
                place = self._claimed
                self._claimed += 1
            if place < self.count:
                cell.number = self._first + place
                is_last = self._note(place, *self._make(place, failed))
            else:
                is_last = place == self.count == 0  # a batch of no samples
            if is_last:
                cell.number = ~self._first
                self._finish()
            if place >= self.count or failed is not None:
                break
        current.sample = None
        maker.used_s.append(time.thread_time() - start_s)
        return failed is not None and place < self.count

    def _make(self, place: int, failed: BaseException | None) -> tuple[BaseException | None, float]:
        """Make one sample; return its error or None, and the seconds that it took."""
        index, start_s = self._indices[place], time.perf_counter()
        if failed is not None:
            return failed, 0.0
        try:
            if self._rows is None:
                self._samples[place] = self._maker.get(index)
            else:
                self._samples[place] = self._rows.make(place, index, self._maker.lock)
        except BaseException as error:  # noqa: BLE001 - raised where the consumer is
            return note_index(error, index), time.perf_counter() - start_s
        return None, time.perf_counter() - start_s

    def _note(self, place: int, error: BaseException | None, elapsed_s: float) -> bool:
        """Note that a sample is done; say whether it was the last one of the batch."""
        with self._maker.lock:
            self.getitem_s += elapsed_s
            self._left -= 1
            if error is not None:
                if place < self._failed_at:
                    self._failed_at, self.error = place, error
                # As in a loop, no sample after the failed one is made.
                self._left -= self.count - min(self._claimed, self.count)
                self._claimed = max(self._claimed, self.count)
            return self._left == 0

    def _finish(self) -> None:
        start_s = time.perf_counter()
        try:
            if self.error is None:
                self._collate(self._maker)
        except BaseException as error:  # noqa: BLE001 - raised where the consumer is
            self.error = error
        self.collate_s = time.perf_counter() - start_s
        self._samples, self._rows = [], None
        self._maker.ready.put(self.number)

    def _collate(self, maker: Maker) -> None:
        if self._rows is not None:
            self._deliver(self._rows.collate(self._samples, maker.collate_fn))
        else:
            self._deliver(maker.collate_fn(self._samples[0] if maker.whole else self._samples))


class StreamTask(Task):
    """The next batch of one worker's stream."""

    def __init__(self, number: int, reader: "StreamReader", maker: Maker) -> None:
        super().__init__(number, 1, maker)
        self._reader = reader

    def __call__(self, failed: BaseException | None) -> bool:
        """Read the batch; a StopIteration as its error is the end of the stream."""
        maker = self._maker
        if maker.dropped:
            return False
        torch.set_grad_enabled(maker.grad)
        start_s = time.thread_time()
        try:
            if failed is not None:
                raise failed  # noqa: TRY301 - delivered in the batch's place
            samples, self.getitem_s, cell = self._reader.read()
            collate_s = time.perf_counter()
            self._deliver(maker.collate_fn(samples))
            cell.number += 1
            self.collate_s = time.perf_counter() - collate_s
        except BaseException as error:  # noqa: BLE001 - raised where the consumer is
            self.error = error
        current.sample = None
        maker.used_s.append(time.thread_time() - start_s)
        maker.ready.put(self.number)
        return failed is not None


class StreamReader:
    """The samples of one worker's copy of an iterable dataset, in batches, as torch takes them."""

    def __init__(self, dataset: Any, order: Order, batch_size: int | None, *, cuts: bool) -> None:
        """`cuts` drops a last batch that is too short."""
        self._dataset, self._size, self._cuts = dataset, batch_size, cuts
        self._cell = Batch(order)
        self._iterator: Iterator[Any] | None = None  # begun in the worker's thread
        self._ended = False

    def read(self) -> tuple[Any, float, Batch]:
        """Return the samples of the next batch, the seconds that they took, and their numbers.

        Raises:
            StopIteration: there are no more.
        """
        start_s = time.perf_counter()
        current.sample = self._cell
        if self._iterator is None:
            self._iterator = iter(self._dataset)
        if self._ended:
            raise StopIteration
        if self._size is None:
            return next(self._iterator), time.perf_counter() - start_s, self._cell
        samples = [*_take(self._iterator, self._size)]
        self._ended = len(samples) < self._size
        if not samples or (self._ended and self._cuts):
            raise StopIteration
        return samples, time.perf_counter() - start_s, self._cell


def _take(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    """Yield at most `count` items. `islice` would call `iter` again, which may begin anew."""
    end = object()
    for _ in range(count):
        item = next(iterator, end)
        if item is end:
            return
        yield item
