"""Batches made by threads of this process, in place of torch's worker processes."""

import copy
import os
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from fastamp.data.batch_tasks import BatchTask, find_maker
from fastamp.data.indices import Indices
from fastamp.data.position import Position
from fastamp.data.prefetch import FORKED, Pass, is_last
from fastamp.data.sample_rng import Placed, draw_seed
from fastamp.data.slots import DEFAULT_MAX_BYTES, Slots, too_large
from fastamp.data.states import Measured, WorkerStream, mark_undelivered
from fastamp.data.workers import Team, WorkerInfo, become_worker

_COPY: dict[type, Callable[[Any], Any]] = {
    list: list.copy,
    torch.Tensor: torch.Tensor.clone,
    np.ndarray: np.ndarray.copy,
}


class ThreadLoader:
    """Makes the passes of a loader with thread workers, as torch's own loader makes others."""

    _team: Team | None = None  # whose threads persist
    _streams: list[WorkerStream] | None = None
    _base_seed: int | None = None

    def __init__(self, loader: Any, indices: Indices, slots: Slots) -> None:
        self._find_loader, self._indices, self._slots = weakref.ref(loader), indices, slots
        self.generator: torch.Generator | None = loader.generator

    def __iter__(self) -> Iterator[Measured]:
        """Begin a pass, with the draws of torch's iterators."""
        loader: Any = self._find_loader()
        if not loader.prefetch_factor:
            msg = f"prefetch_factor must be greater than 0, got {loader.prefetch_factor}"
            raise AssertionError(msg)  # as torch's
        new = self._base_seed is None
        if self._base_seed is None:
            iter(self._indices)  # torch's iterators begin a sampler before this draw, too
            self._base_seed = draw_seed(self.generator)
        if isinstance(loader.dataset, IterableDataset):
            return self._begin_streams(loader, new=new)
        team = self._team
        if team is None or not team.is_here:
            infos = [self._info(loader, worker) for worker in range(loader.num_workers)]
            team = Team(infos, loader.worker_init_fn)
        self._team = team if loader.persistent_workers else None
        return ThreadBatches(loader, iter(self._indices), team, self._slots)

    def _begin_streams(self, loader: Any, *, new: bool) -> "StreamBatches":
        position = self._indices.position
        if self._streams is None or not loader.persistent_workers:
            self._streams = [_copy_stream(loader, position) for _ in range(loader.num_workers)]
        parts: list[Iterator[Measured]] = []
        used_s: deque[float] = deque()
        for worker, stream in enumerate(self._streams):
            info = replace(self._info(loader, worker), dataset=stream.dataset)
            init_fn = loader.worker_init_fn if new else None
            parts.append(_run_stream(stream, info, init_fn, used_s))
        return StreamBatches(parts, loader, position.turn, used_s)

    def _info(self, loader: Any, worker: int) -> WorkerInfo:
        seed = (self._base_seed or 0) + worker
        return WorkerInfo(worker, loader.num_workers, seed, loader.dataset)


def _copy_stream(loader: Any, position: Position) -> WorkerStream:
    """Return a worker's stream, over a copy of the dataset as a process has it."""
    stream = WorkerStream(loader, position.workers, 0, position.epoch)
    try:
        stream.dataset = copy.deepcopy(loader.dataset)
    except Exception as error:
        msg = (
            "dataset: each thread reads a copy of an iterable dataset, and "
            f"copy.deepcopy of this {type(loader.dataset).__name__} fails: {error}"
        )
        raise TypeError(msg) from error
    return stream


def _run_stream(
    stream: WorkerStream,
    info: WorkerInfo,
    init_fn: Callable[[int], None] | None,
    used_s: deque[float],
) -> Iterator[Measured]:
    become_worker(info, init_fn)
    before_s = time.thread_time()
    for measured in stream:
        now_s = time.thread_time()
        used_s.append(now_s - before_s)
        before_s = now_s
        yield measured


def _add_up(used_s: deque[float], loader: Any) -> None:
    """Add the processor time that threads have reported to a loader's statistics."""
    while used_s:
        loader._stats.thread_cpu_s += used_s.popleft()


def _timed_out(loader: Any) -> Exception:
    msg = f"DataLoader timed out after {loader.timeout} seconds"  # as torch's
    return mark_undelivered(RuntimeError(msg))


class ThreadBatches(Iterator[Measured]):
    """The batches of one pass over a map-style dataset."""

    _workers = ()  # no processes

    def __init__(self, loader: Any, indices: Iterator[Any], team: Team, slots: Slots) -> None:
        self._loader, self._indices, self._owner_pid = loader, indices, os.getpid()
        self._team: Team | None = team
        self._maker = find_maker(loader, slots, self)
        self._drawn: deque[Placed | BaseException] = deque()
        self._done: set[int] = set()
        # Named as in torch's iterators: batches submitted, and those of them not delivered yet.
        self._send_idx, self._task_info = 0, dict[int, BatchTask | BaseException]()
        for _ in range(loader.prefetch_factor * loader.num_workers):  # as far ahead as torch's
            self._draw()
        self._submit()

    def _draw(self) -> None:
        try:
            for drawn in islice(self._indices, 1):
                # A sampler may yield the same list, tensor or array again and again.
                copied = _COPY.get(type(drawn.indices))
                indices = copied(drawn.indices) if copied else drawn.indices
                kept = indices if self._maker.whole else list(indices)
                self._drawn.append(drawn._replace(indices=kept))
        except Exception as error:  # noqa: BLE001 - raised where the batch would come
            # Its traceback refers to this pass, and would keep it alive until the error is raised.
            told = "".join(traceback.format_exception(error))
            error.__cause__ = RuntimeError(f"raised by the sampler, ahead of the loop:\n\n{told}")
            self._drawn.append(error.with_traceback(None))

    def _submit(self) -> None:
        """Let threads make the batches that were drawn, as far as there is room for them."""
        loader, under_way = self._loader, self._task_info
        limit = loader.max_bytes or DEFAULT_MAX_BYTES
        while self._drawn and self._team:
            # The size of a batch is known after the first one, on which all threads work.
            nbytes = limit if loader._batch_nbytes is None else loader._batch_nbytes
            if under_way and (len(under_way) + 1) * nbytes > limit and not self._leaves_idle():
                return
            drawn, number = self._drawn.popleft(), self._send_idx
            self._send_idx += 1
            if isinstance(drawn, BaseException):
                under_way[number] = drawn
                self._maker.ready.put(number)
                continue
            task = under_way[number] = BatchTask(number, drawn, self._maker)
            self._team.submit(task, min(max(task.count, 1), loader.num_workers))

    def _leaves_idle(self) -> bool:
        """Say whether the first batches have too few samples to keep all threads busy."""
        loader = self._loader
        if loader._batch_nbytes is not None or loader.max_bytes is not None:
            return False
        counts = (task.count for task in self._task_info.values() if isinstance(task, BatchTask))
        return bool(sum(counts) < loader.num_workers)

    def __next__(self) -> Measured:
        if self._owner_pid != os.getpid():
            raise RuntimeError(FORKED)
        if not self._task_info:
            _add_up(self._maker.used_s, self._loader)
            self.close()
            raise StopIteration
        task: Any = self._take()
        _add_up(self._maker.used_s, self._loader)
        error = task if isinstance(task, BaseException) else self._check(task)
        if error is not None and is_last(error):
            self.close()
        self._submit()
        try:
            if error is not None:
                raise error
            return Measured(task.batch, task.getitem_s, task.collate_s)
        finally:
            del error, task  # whose traceback refers to this frame

    def _check(self, task: BatchTask) -> BaseException | None:
        """Note how large a batch is; return its error or None."""
        loader, error = self._loader, task.error
        task.error = None
        loader._batch_nbytes = max(loader._batch_nbytes or 0, task.nbytes)
        if loader.max_bytes is not None and task.nbytes > loader.max_bytes:
            return too_large(loader.max_bytes, task.nbytes)
        return error

    def _take(self) -> BatchTask | BaseException:
        """Wait for the next batch, or with `in_order=False` for any."""
        loader, done = self._loader, self._done
        number = next(iter(self._task_info))
        while number not in done:
            try:
                done.add(self._maker.ready.get(timeout=loader.timeout or None))
            except Empty:
                raise _timed_out(loader) from None
            number = number if loader.in_order else next(iter(done))
        done.remove(number)
        self._draw()
        return self._task_info.pop(number)

    def close(self) -> None:
        """Drop the batches under way, and the threads unless they persist."""
        self._maker.dropped.append(True)
        self._task_info, self._team = {}, None


class StreamBatches(Iterator[Measured]):
    """The batches of one pass over an iterable dataset: of each worker in turn, or as they come."""

    _workers = ()  # no processes

    def __init__(
        self, parts: list[Iterator[Measured]], loader: Any, turn: int, used_s: deque[float]
    ) -> None:
        depth, timeout_s = loader.prefetch_factor, loader.timeout
        # Receives a worker's number for each of its batches, if they come in any order.
        ready: SimpleQueue[int] | None = None if loader.in_order else SimpleQueue()
        self._ready = ready
        self._parts: list[Pass[Measured] | None] = [
            Pass(
                part, None, depth, timeout_s, None if ready is None else partial(ready.put, worker)
            )
            for worker, part in enumerate(parts)
        ]
        self._turn, self._loader, self._used_s = turn, loader, used_s
        self._length, self._counted = loader._IterableDataset_len_called, 0

    def __next__(self) -> Measured:
        while any(self._parts):
            turn = self._turn
            try:
                if self._ready is not None:
                    turn = self._ready.get(timeout=self._loader.timeout or None)
                self._turn = (turn + 1) % len(self._parts)
                part = self._parts[turn]
                if part is not None:
                    measured = next(part)
                    _add_up(self._used_s, self._loader)
                    return self._count(measured)
            except StopIteration:
                self._parts[turn] = None
            except Empty:
                self._turn = turn
                raise _timed_out(self._loader) from None
        raise StopIteration

    def _count(self, measured: Measured) -> Measured:
        """Warn, as torch does, of more batches than `len(loader)` has said."""
        self._counted += measured.is_batch
        if self._length is not None and measured.is_batch and self._counted > self._length:
            warnings.warn(
                f"Length of IterableDataset {self._loader.dataset} was reported to be "
                f"{self._length}(when accessing len(dataloader)), but {self._counted} samples have "
                "been fetched. For multiprocessing data-loading, this could be caused by not "
                "properly configuring the IterableDataset replica at each worker. Please see "
                "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for "
                "examples.",
                stacklevel=7,
            )
        return measured
