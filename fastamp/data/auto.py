"""The choice between threads and processes: measured in the first pass, and kept."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, MapDataPipe

from fastamp.data.fetch import FetchSource
from fastamp.data.indices import Drawn
from fastamp.data.position import Position
from fastamp.data.states import find_save, is_undelivered

_MEASURE_S = 1.0
_SHARE = 0.05  # of an epoch: a measurement takes no more
_LEAST = 4  # batches for each worker in a measurement: processes deliver in bursts
_KEEPS_UP = 0.05  # threads keep up if the loop waits for less than this share of its time
_BUSY = 0.9  # of all cores
_GAIN = 1.1  # processes have to be this many times as fast


def choose(loader: Any, worker: str, reason: str) -> None:
    """Make a loader use this kind of workers from now on."""
    loader._chosen, loader._trying = worker, None
    loader._stats.workers = f"{worker}s: {reason}".replace("processs", "processes")


def choose_at_once(loader: Any) -> bool:
    """Choose processes without a measurement for some loaders; say whether this is one."""
    dataset = loader.dataset
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset | MapDataPipe):
        reason = f"{name} is read by each worker for itself"
    elif find_save(dataset) is not None:
        reason = f"{name} has a state_dict"
    elif loader.worker_init_fn is not None:
        reason = "worker_init_fn is given"
    else:
        return False
    choose(loader, "process", reason)
    return True


class TrialPass(Iterator[Any]):
    """The batches of a pass in which a loader finds out which workers make them faster.

    1. Threads begin. After a second, or a twentieth of the epoch, they are chosen if they keep up
       with the loop, or keep all cores busy: processes could do no better.
    2. Otherwise processes make the next batches, for as long.
    3. The faster kind makes the rest: threads, unless processes are over a tenth faster.
    """

    def __init__(
        self, loader: Any, position: Position, fetch: Callable[[Position], FetchSource]
    ) -> None:
        self._loader, self._position, self._fetch = loader, position, fetch
        self._drawn = position.drawn = Drawn()
        self._before = position.batch  # batches delivered before this pass
        self._made = 0
        self._thread_rate = 0.0
        try:
            self._most = _SHARE * len(loader)
        except (NotImplementedError, TypeError):  # a sampler without a length
            self._most = float("inf")
        self._begin("thread", position)

    def _begin(self, worker: str, position: Position) -> None:
        loader = self._loader
        loader._trying, loader._inner = worker, None
        self._counted = -1 if worker == "thread" else -loader.num_workers  # below 0: all begin
        self._begin_s = self._begin_cpu_s = self._wait_s = 0.0
        self._source = self._fetch(position)

    def __next__(self) -> Any:
        start_s = time.perf_counter()
        try:
            batch = next(self._source)
        except StopIteration:
            tried = self._loader._trying == "process"
            if tried or not self._thread_rate or self._loader._chosen is not None:
                self._end("the first pass was over before there was a choice")
                raise
            self._try_processes()
            return next(self)
        except Exception as error:
            self._made += not is_undelivered(error)
            raise
        self._made += 1
        if self._loader._chosen is None:
            self._measure(start_s)
        return batch

    def _measure(self, start_s: float) -> None:
        now_s = time.perf_counter()
        self._counted += 1
        self._wait_s += now_s - start_s
        if self._counted == 0:
            self._begin_s, self._begin_cpu_s, self._wait_s = now_s, time.process_time(), 0.0
        if self._counted < _LEAST * self._loader.num_workers:
            return
        elapsed_s = max(now_s - self._begin_s, 1e-9)
        if elapsed_s < _MEASURE_S and self._counted < self._most:
            return
        rate = self._counted / elapsed_s
        if self._loader._trying == "thread":
            self._look_at_threads(rate, elapsed_s)
        elif self._loader._trying == "process":
            self._look_at_processes(rate)

    def _look_at_threads(self, rate: float, elapsed_s: float) -> None:
        if self._thread_rate:  # measured already: they only finish the batches that they have begun
            return
        cores = min(count_cores(), self._loader.num_workers)
        busy = (time.process_time() - self._begin_cpu_s) / elapsed_s
        if self._wait_s < _KEEPS_UP * elapsed_s:
            self._end("threads keep up with the loop")
        elif busy >= _BUSY * cores:
            self._end(f"threads keep {busy:.1f} cores busy")
        elif self._source.finish():
            self._thread_rate = rate
        else:
            self._end("the first pass was over before there was a choice")

    def _look_at_processes(self, rate: float) -> None:
        rates = f"threads made {self._thread_rate:.3g} batches/s, processes {rate:.3g}"
        self._drawn.keeps = False
        if rate > _GAIN * self._thread_rate:
            choose(self._loader, "process", rates)
            return
        position = self._next_position(self._source.late)
        choose(self._loader, "thread", rates)
        self._loader._inner = None
        del self._source  # ends the processes
        self._source = self._fetch(position)

    def _try_processes(self) -> None:
        try:
            self._begin("process", self._next_position())
        except Exception as error:  # noqa: BLE001 - whatever keeps processes from starting
            self._loader._inner = None
            self._end(f"processes do not start: {error}")
            self._source = self._fetch(self._next_position())

    def _next_position(self, late: Iterable[int] = ()) -> Position:
        position = replace(self._position, batch=self._before + self._made, late=[*late])
        position.drawn = self._drawn
        return position

    def _end(self, reason: str) -> None:
        self._drawn.keeps = False
        if self._loader._chosen is None:
            choose(self._loader, "thread", reason)


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
