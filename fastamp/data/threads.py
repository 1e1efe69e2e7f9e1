"""Batches made by threads of this process, in place of torch's worker processes."""

import os
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from operator import getitem
from queue import Empty, SimpleQueue
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from fastamp.data.items import Make, find_together, hand_on, make_rows, note_index
from fastamp.data.position import mark_undelivered
from fastamp.data.prefetch import FORKED, is_last
from fastamp.data.row_writer import Rows, find_get
from fastamp.data.sample_rng import Batch, Order, current
from fastamp.data.slots import Slots
from fastamp.data.stats import LoaderStats
from fastamp.data.workers import Team

_COPY: dict[type, Callable[[Any], Any]] = {
    list: list.copy,
    torch.Tensor: torch.Tensor.clone,
    np.ndarray: np.ndarray.copy,
}


class Maker:
    """What the threads of a pass share. It holds no reference to the pass, whose end stops them."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        order: Order,
        *,
        make: Make | None,
        single: bool,
        pins: bool,
        slots: Slots | None,
    ) -> None:
        """Take what `Items` takes; large leaves are written into rows of `slots`."""
        together = None if single else find_together(dataset)
        if make is not None:
            together, collate_fn = partial(make_rows, make), hand_on
        self.get: Callable[[Any], Any] = together or partial(getitem, dataset)
        self.whole = single or together is not None  # `get` makes all samples of a batch at once
        rows = None if self.whole or slots is None else partial(Rows, find_get(dataset), slots)
        self.rows = rows
        self.collate_fn, self.order, self.pins = collate_fn, order, pins
        self.grad = torch.is_grad_enabled()
        self.lock = Lock()
        self.ready: SimpleQueue[int] = SimpleQueue()  # receives the numbers of tasks that are done
        self.used_s: deque[float] = deque()  # processor time of each thread's part of a batch
        self.dropped: list[Any] = []  # not empty once no more batches are wanted

    def end_with(self, batches: Any) -> None:
        """Drop what is under way when a pass dies, by no Python code: Ctrl-C could interrupt it."""
        self._ended = weakref.ref(batches, self.dropped.append)


class BatchTask:
    """One batch: several threads make its samples, and the one that makes the last collates."""

    def __init__(self, number: int, indices: Any, first: int, maker: Maker) -> None:
        self._indices = [indices] if maker.whole else indices
        self.number, self.count, self._maker = number, len(self._indices), maker
        self.getitem_s = self.collate_s = 0.0
        self.batch: Any = None
        self.error: BaseException | None = None
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
        """Make and pin the batch."""
        if self._rows is not None:
            batch = self._rows.collate(self._samples, maker.collate_fn)
        else:
            batch = maker.collate_fn(self._samples[0] if maker.whole else self._samples)
        self.batch = pin_memory(batch) if maker.pins else batch  # type: ignore[no-untyped-call]


class ThreadBatches(Iterator[Any]):
    """The batches of one pass over a map-style dataset."""

    def __init__(
        self,
        batches: Iterator[tuple[Any, int]],
        team: Team,
        maker: Maker,
        stats: LoaderStats,
        timeout_s: float,
        *,
        ahead: int,
        in_order: bool,
    ) -> None:
        """`batches` are indices, with the number of the first sample; `ahead` are made ahead."""
        self._maker = maker
        maker.end_with(self)
        self._batches, self._stats = batches, stats
        self._timeout_s, self._in_order, self._owner_pid = timeout_s, in_order, os.getpid()
        self._done: set[int] = set()
        self._under_way: dict[int, BatchTask | Exception] = {}
        self._number = 0  # of the next task
        self._team: Team | None = team
        for _ in range(ahead):
            self._submit()

    def _submit(self) -> None:
        """Let threads make the next batch of the sampler."""
        team, number = self._team, self._number
        if team is None:
            return
        try:
            for indices, first in islice(self._batches, 1):
                # A sampler may yield the same list, tensor or array again and again.
                copied = _COPY.get(type(indices))
                kept = copied(indices) if copied else indices
                rows = kept if self._maker.whole else list(kept)
                task = self._under_way[number] = BatchTask(number, rows, first, self._maker)
                team.submit(task, min(max(task.count, 1), len(team.infos)))
        except Exception as error:  # noqa: BLE001 - raised where the batch would come
            # Its traceback refers to this pass, and would keep it alive until the error is raised.
            told = "".join(traceback.format_exception(error))
            error.__cause__ = RuntimeError(f"raised by the sampler, ahead of the loop:\n\n{told}")
            self._under_way[number] = error.with_traceback(None)
            self._maker.ready.put(number)
        self._number += 1

    def __next__(self) -> Any:
        if self._owner_pid != os.getpid():
            raise RuntimeError(FORKED)
        if not self._under_way:
            self.close()
            raise StopIteration
        number = self._wait(next(iter(self._under_way)))
        task, stats = self._under_way.pop(number), self._stats
        error: BaseException | None
        batch: Any = None
        if isinstance(task, Exception):
            error = task
        else:
            error, batch, task.error = task.error, task.batch, None
            stats.getitem_s += task.getitem_s
            stats.collate_s += task.collate_s
        if error is not None and is_last(error):
            self.close()
        self._submit()
        try:
            if error is not None:
                raise error
            return batch
        finally:
            del error, task  # whose traceback refers to this frame

    def _wait(self, number: int) -> int:
        """Wait for a task, or with `in_order=False` for any; return the number of it."""
        done, maker = self._done, self._maker
        while number not in done:
            try:
                done.add(maker.ready.get(timeout=self._timeout_s or None))
            except Empty:
                msg = f"DataLoader timed out after {self._timeout_s} seconds"  # as torch's
                raise mark_undelivered(RuntimeError(msg)) from None
            number = number if self._in_order else next(iter(done))
        done.remove(number)
        while maker.used_s:
            self._stats.thread_cpu_s += maker.used_s.popleft()
        return number

    def close(self) -> None:
        """Drop the batches under way."""
        self._maker.dropped.append(True)
        self._under_way, self._team = {}, None
