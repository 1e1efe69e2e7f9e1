"""The tasks of thread workers: the samples of a batch."""

import time
import weakref
from collections import deque
from collections.abc import Callable
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


class BatchTask:
    """One batch: several threads make its samples, and the one that makes the last collates."""

    def __init__(self, number: int, indices: Any, first: int, maker: Maker) -> None:
        self._indices = [indices] if maker.whole else indices
        self.number, self.count, self._maker = number, len(self._indices), maker
        self.getitem_s = self.collate_s = 0.0
        self.batch: Any = None
        self.error: BaseException | None = None
        self.nbytes = 0
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
        """Make, pin and measure the batch."""
        if self._rows is not None:
            batch = self._rows.collate(self._samples, maker.collate_fn)
        else:
            batch = maker.collate_fn(self._samples[0] if maker.whole else self._samples)
        self.batch = pin_memory(batch) if maker.pins else batch  # type: ignore[no-untyped-call]
        self.nbytes = count_nbytes(batch)
