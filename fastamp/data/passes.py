"""One pass over a loader: where its batches come from, and who waited for whom."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

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

__all__ = ["LoaderPass", "fetch_batches", "gather_batches"]


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
        stats.batches += 1
        self._position.batch += 1
        if self._states:
            self._position.dataset = self._states.popleft()
        return batch


def gather_batches(
    gatherable: Gatherable,
    indices: Iterator[torch.Tensor],
    slots: Slots,
    stats: LoaderStats,
    max_bytes: int | None,
) -> Iterator[Any]:
    """Yield batches of the rows at the indices, with others under way."""
    columns = gatherable.columns
    row_nbytes = sum(math.prod(c.row_shape) * c.dtype.itemsize for c in columns)
    most, depth = max_bytes or DEFAULT_MAX_BYTES, torch.get_num_threads() + 2
    gatherer = _backend.host_ops().gatherer(columns, depth)
    under_way: deque[list[torch.Tensor]] = deque()
    held, failed = 0, None

    def draw() -> torch.Tensor | None:
        nonlocal failed
        try:
            return next(indices, None)
        except Exception as error:  # noqa: BLE001 - it is raised when its batch's turn comes
            failed = error
            return None

    rows = draw()
    while rows is not None or under_way:
        while rows is not None and len(under_way) < depth:
            nbytes = len(rows) * row_nbytes
            if under_way and held + nbytes > most:
                break
            if max_bytes is not None and nbytes > max_bytes:
                msg = f"max_bytes={max_bytes}: one batch takes {nbytes} bytes"
                raise ValueError(msg)
            outputs = [slots.allocate((len(rows), *c.row_shape), c.dtype) for c in columns]
            gatherer.submit(rows, outputs)
            under_way.append(outputs)
            del outputs  # held no longer than the consumer holds them
            held, stats.nbytes = held + nbytes, stats.nbytes + nbytes
            rows = draw()
        stats.copy_s += gatherer.wait()
        stats.slot_wait_s, slots.wait_s = stats.slot_wait_s + slots.wait_s, 0.0
        held -= len(under_way[0][0]) * row_nbytes
        yield gatherable.build(under_way.popleft())
    if failed is not None:
        raise failed


def fetch_batches(
    iterator: Iterator[Measured],
    stats: LoaderStats,
    save: Callable[[], Any] | None,
    states: deque[Any],
    *,
    persist: bool,
) -> Iterator[Any]:
    """Yield the batches of torch's iterator; put the dataset's state after each into `states`."""
    try:
        for measured in iterator:
            stats.getitem_s += measured.getitem_s
            stats.collate_s += measured.collate_s
            stats.nbytes += count_nbytes(measured.batch)
            if save is not None:
                states.append(save())
            yield measured.batch
    except (ConnectionError, EOFError) as error:
        # So torch tells of a worker that died after it had announced a batch; it may be dying yet.
        workers = getattr(iterator, "_workers", ())
        if workers and wait([worker.sentinel for worker in workers], timeout=1.0):
            msg = "DataLoader worker exited unexpectedly: its last batch is lost"
            raise RuntimeError(msg) from error
        raise
    finally:
        if not persist and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()  # now, whoever keeps the exception's traceback
