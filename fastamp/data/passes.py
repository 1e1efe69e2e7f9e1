"""One pass over a loader: where its batches come from, and who waited for whom."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fastamp import _backend
from fastamp.data.slots import DEFAULT_MAX_BYTES
from fastamp.data.structure import count_nbytes

if TYPE_CHECKING:
    from fastamp.data.arrays import Gatherable
    from fastamp.data.fetch import Measured
    from fastamp.data.position import Position
    from fastamp.data.slots import Slots
    from fastamp.data.stats import LoaderStats

__all__ = ["GatheredBatches", "LoaderPass", "fetch_batches"]


class Failed:
    """Stands for a batch whose making raised; the pass goes on after it, as torch's does."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class LoaderPass(Iterator[Any]):
    """One pass over a loader, which keeps count of what was delivered and of who waited."""

    def __init__(
        self,
        batches: Iterator[Any],
        position: Position,
        stats: LoaderStats,
        states: deque[Any],
        length: Callable[[], int],
    ) -> None:
        self._batches = batches
        self._position = position
        self._stats = stats
        self._states = states
        self._length = length
        self._ended = False
        self._left_s: float | None = None  # when the consumer went off with a batch

    def __len__(self) -> int:
        return self._length()

    def __next__(self) -> Any:
        stats, start_s = self._stats, time.perf_counter()
        if self._left_s is not None:
            stats.elapsed_s += start_s - self._left_s
        try:
            batch = next(self._batches)
        except StopIteration:
            if not self._ended:
                self._position.end_epoch()
            self._ended, self._left_s = True, None
            raise
        self._left_s = time.perf_counter()
        stats.elapsed_s += self._left_s - start_s
        stats.wait_s += self._left_s - start_s
        self._position.batch += 1
        if type(batch) is Failed:
            try:
                raise batch.error
            finally:
                del batch  # whose traceback has this frame
        stats.batches += 1
        if self._states:
            self._position.dataset, self._position.exhausted = self._states.popleft()
        return batch


class _UnderWay(NamedTuple):
    """A batch that the gatherer fills, or the indices of one that Python makes in its turn."""

    outputs: list[torch.Tensor] | None
    indices: list[Any]
    nbytes: int


class GatheredBatches(Iterator[Any]):
    """The batches of the rows at the indices, with others under way; or `Failed`.

    `make` is for indices that are not plain integers: it does what torch would do with them.
    """

    def __init__(
        self,
        gatherable: Gatherable,
        indices: Iterator[Any],
        slots: Slots,
        stats: LoaderStats,
        max_bytes: int | None,
        make: Callable[[list[Any]], Any],
    ) -> None:
        self._gatherable = gatherable
        self._indices = indices
        self._slots = slots
        self._stats = stats
        self._max_bytes = max_bytes
        self._make = make
        columns = gatherable.columns
        self._rows = [(column.row_shape, column.dtype) for column in columns]
        self._row_nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._rows)
        self._depth = torch.get_num_threads() + 1
        self._gatherer: Any = _backend.host_ops().gatherer(columns, self._depth)
        self._under_way: deque[_UnderWay] = deque()
        self._held_nbytes = 0
        self._began = False
        self._drawn: Any = None  # the next batch's indices; None at the end

    def __next__(self) -> Any:
        if not self._began:
            self._began, self._drawn = True, _or_failed(self._draw)
        while self._has_room():
            self._under_way.append(self._submit(self._drawn))
            self._held_nbytes += self._under_way[-1].nbytes
            self._drawn = _or_failed(self._draw)
        self._stats.slot_wait_s += self._slots.wait_s
        self._slots.wait_s = 0.0
        if self._under_way:
            batch = self._under_way.popleft()
            self._held_nbytes -= batch.nbytes
            return _or_failed(self._finish, batch)
        self._gatherer = None  # and its threads
        if self._drawn is None:
            raise StopIteration
        failed, self._drawn = self._drawn, None
        return failed

    def _draw(self) -> Any:
        rows = next(self._indices, None)
        if self._gatherable.rows is None or not isinstance(rows, torch.Tensor):
            return rows
        try:
            return self._gatherable.rows[rows]
        except IndexError:  # the dataset says it in its own words
            return rows.tolist()

    def _has_room(self) -> bool:
        full = len(self._under_way) == self._depth
        if full or self._drawn is None or type(self._drawn) is Failed:
            return False
        if not self._under_way or isinstance(self._drawn, list):
            return True
        nbytes = self._held_nbytes + self._drawn.numel() * self._row_nbytes
        return bool(nbytes <= (self._max_bytes or DEFAULT_MAX_BYTES))

    def _submit(self, rows: Any) -> _UnderWay:
        if isinstance(rows, list):
            return _UnderWay(None, rows, 0)
        count = rows.numel()
        nbytes = count * self._row_nbytes
        if self._max_bytes is not None and nbytes > self._max_bytes:
            msg = f"max_bytes={self._max_bytes}: one batch takes {nbytes} bytes"
            raise ValueError(msg)
        outputs = [
            self._slots.allocate((count, *row_shape), dtype) for row_shape, dtype in self._rows
        ]
        self._gatherer.submit(rows, outputs)
        return _UnderWay(outputs, [], nbytes)

    def _finish(self, batch: _UnderWay) -> Any:
        if batch.outputs is None:
            return self._make(batch.indices)
        self._stats.copy_s += self._gatherer.wait()
        self._stats.nbytes += batch.nbytes
        return self._gatherable.build(batch.outputs)


def fetch_batches(
    iterator: Iterator[Measured],
    stats: LoaderStats,
    save: Callable[[], Any] | None,
    states: deque[Any],
    *,
    persist: bool,
) -> Iterator[Any]:
    """Yield the batches of torch's iterator, or `Failed`.

    Put the dataset's state after each into `states`, with whether the dataset has ended.
    """
    try:
        while True:
            measured = _or_failed(_fetch, iterator)
            if measured is None:
                return
            if type(measured) is Failed:
                if hasattr(iterator, "_workers"):
                    # The message has the worker's traceback; torch's frames would keep it alive.
                    measured.error.__traceback__ = None
                failed = [measured]
                del measured  # nor may this frame, which the next traceback leads to
                yield failed.pop()
                continue
            stats.getitem_s += measured.getitem_s
            stats.collate_s += measured.collate_s
            stats.nbytes += count_nbytes(measured.batch)
            if save is not None:
                fetcher = getattr(iterator, "_dataset_fetcher", None)
                states.append((save(), bool(getattr(fetcher, "ended", False))))
            yield measured.batch
    finally:
        if not persist and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()


def _fetch(iterator: Iterator[Measured]) -> Measured | None:
    """Return the next batch of torch's iterator, None at its end."""
    workers = getattr(iterator, "_workers", ())
    try:
        return next(iterator, None)
    except (ConnectionError, EOFError) as error:
        # So torch tells of a worker that died after it had announced a batch; it may be dying yet.
        if workers and wait([worker.sentinel for worker in workers], timeout=1.0):
            msg = "DataLoader worker exited unexpectedly: its last batch is lost"
            raise RuntimeError(msg) from error
        raise


def _or_failed(function: Callable[..., Any], *args: Any) -> Any:
    """Return what the function returns, or its exception as `Failed`."""
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001 - raised where the consumer is
        return Failed(error)
