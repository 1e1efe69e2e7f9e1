"""Batches made by threads of this process, in place of torch's worker processes."""

import os
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from queue import Empty
from typing import Any

import numpy as np
import torch

from fastamp.data.ahead import Ahead, too_large
from fastamp.data.position import mark_undelivered
from fastamp.data.prefetch import FORKED, is_last
from fastamp.data.stats import LoaderStats
from fastamp.data.thread_tasks import BatchTask, Maker
from fastamp.data.workers import Team

_COPY: dict[type, Callable[[Any], Any]] = {
    list: list.copy,
    torch.Tensor: torch.Tensor.clone,
    np.ndarray: np.ndarray.copy,
}
_Drawn = tuple[Any, int] | Exception


class Room:
    """Says how many batches threads may have under way, by the largest one so far."""

    def __init__(self, max_bytes: int | None) -> None:
        """`max_bytes` is the user's limit, which a single batch may not exceed."""
        self.max_bytes, self._largest = max_bytes, 0

    def has(self, ahead: Ahead, under_way: int) -> bool:
        """Say whether there is room for another batch."""
        if under_way == 0 or not self._largest:
            # The size of a batch is known after the first one, on which all threads work.
            return under_way == 0
        return under_way < ahead.batches and (under_way + 1) * self._largest <= ahead.nbytes

    @property
    def is_known(self) -> bool:
        """Whether a batch has been measured."""
        return bool(self._largest)

    def check(self, nbytes: int) -> Exception | None:
        """Note how large a batch is; return an error if it is larger than the user's limit."""
        self._largest = max(self._largest, nbytes, 1)
        if self.max_bytes is not None and nbytes > self.max_bytes:
            return too_large(self.max_bytes, nbytes)
        return None


class ThreadBatches(Iterator[Any]):
    """The batches of one pass over a map-style dataset."""

    def __init__(
        self,
        batches: Iterator[tuple[Any, int]],
        team: Team,
        find_maker: Callable[[Any], Maker],
        stats: LoaderStats,
        room: Room,
        ahead: Ahead,
        timeout_s: float,
        *,
        in_order: bool,
    ) -> None:
        """`batches` are indices, with the number of the first sample."""
        self._maker = find_maker(self)
        self._batches, self._ahead, self._stats, self._room = batches, ahead, stats, room
        self._timeout_s, self._in_order, self._owner_pid = timeout_s, in_order, os.getpid()
        self._done: set[int] = set()
        self._under_way: dict[int, BatchTask | Exception] = {}
        self._number = 0  # of the next task
        self._team: Team | None = team
        self._drawn: deque[_Drawn] = deque()
        for _ in range(ahead.batches):  # as far ahead as torch's
            self._draw()
        self._submit()

    def _draw(self) -> None:
        try:
            for indices, first in islice(self._batches, 1):
                # A sampler may yield the same list, tensor or array again and again.
                copied = _COPY.get(type(indices))
                kept = copied(indices) if copied else indices
                self._drawn.append((kept if self._maker.whole else list(kept), first))
        except Exception as error:  # noqa: BLE001 - raised where the batch would come
            # Its traceback refers to this pass, and would keep it alive until the error is raised.
            told = "".join(traceback.format_exception(error))
            error.__cause__ = RuntimeError(f"raised by the sampler, ahead of the loop:\n\n{told}")
            self._drawn.append(error.with_traceback(None))

    def _submit(self) -> None:
        """Let threads make the batches that were drawn, as far as there is room for them."""
        under_way = self._under_way
        while self._team and self._drawn:
            if not (self._room.has(self._ahead, len(under_way)) or self._leaves_idle()):
                return
            drawn, number = self._drawn.popleft(), self._number
            self._number += 1
            if isinstance(drawn, Exception):
                under_way[number] = drawn
                self._maker.ready.put(number)
                continue
            task = under_way[number] = BatchTask(number, *drawn, self._maker)
            self._team.submit(task, min(max(task.count, 1), self._ahead.threads))

    def _leaves_idle(self) -> bool:
        """Say whether the first batches have too few samples to keep all threads busy."""
        if self._room.is_known or self._room.max_bytes is not None:
            return False
        counts = (task.count for task in self._under_way.values() if isinstance(task, BatchTask))
        return sum(counts) < self._ahead.threads

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

    def _check(self, task: BatchTask) -> BaseException | None:
        """Count a batch; return its error or None."""
        stats, error, task.error = self._stats, task.error, None
        stats.getitem_s += task.getitem_s
        stats.collate_s += task.collate_s
        stats.nbytes += task.nbytes
        return error or self._room.check(task.nbytes)

    def __next__(self) -> Any:
        if self._owner_pid != os.getpid():
            raise RuntimeError(FORKED)
        if not self._under_way:
            self.close()
            raise StopIteration
        number = self._wait(next(iter(self._under_way)))
        self._draw()
        task: Any = self._under_way.pop(number)
        error = task if isinstance(task, Exception) else self._check(task)
        if error is not None and is_last(error):
            self.close()
        self._submit()
        try:
            if error is not None:
                raise error
            return task.batch
        finally:
            del error, task  # whose traceback refers to this frame

    def close(self) -> None:
        """Drop the batches under way."""
        self._maker.dropped.append(True)
        self._under_way, self._drawn, self._team = {}, deque(), None
