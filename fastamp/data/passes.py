"""One pass over a loader: where its batches come from, and who waited for whom."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import torch

from fastamp import _ops
from fastamp.data.slots import DEFAULT_MAX_BYTES
from fastamp.data.structure import count_nbytes

if TYPE_CHECKING:
    from fastamp.data.datasets import Gatherable
    from fastamp.data.fetch import Measured
    from fastamp.data.position import Position
    from fastamp.data.slots import Slots
    from fastamp.data.stats import LoaderStats

__all__ = ["LoaderPass", "fetch_batches", "gather_batches"]


@dataclass(eq=False)
class Failed:
    """Stands for a batch whose making raised; the pass goes on after it, as torch's does."""

    error: Exception


@dataclass(eq=False, repr=False)
class LoaderPass(Iterator[Any]):
    """One pass over a loader, which keeps count of what was delivered and of who waited."""

    _batches: Iterator[Any]
    _position: Position
    _stats: LoaderStats
    _states: deque[Any]
    _length: Callable[[], int]
    _ended: bool = False
    _left_s: float = 0.0  # when the consumer went off with a batch

    def __len__(self) -> int:
        return self._length()

    def __next__(self) -> Any:
        stats, start_s = self._stats, time.perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            if not self._ended:
                stats.elapsed_s += start_s - (self._left_s or start_s)
                self._position.end_epoch()
            self._ended = True
            raise
        end_s = time.perf_counter()
        stats.wait_s += end_s - start_s
        stats.elapsed_s += end_s - (self._left_s or start_s)
        self._left_s = end_s
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


def gather_batches(
    gatherable: Gatherable,
    indices: Iterator[Any],
    slots: Slots,
    stats: LoaderStats,
    max_bytes: int | None,
    make: Callable[[list[Any]], Any],
) -> Iterator[Any]:
    """Yield the batches of the rows at the indices, with others under way; or `Failed`.

    `make` is for indices that are not plain integers: it does what torch would do with them.
    """
    columns, build, subset = gatherable
    rows = [(column.row_shape, column.dtype) for column in columns]
    row_nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in rows)
    depth = torch.get_num_threads() + 1
    gatherer = _ops.host_ops().gatherer(columns, depth)
    under_way: deque[tuple[Any, ...]] = deque()  # functions that return a batch, with arguments
    held_nbytes = 0

    def collect(outputs: list[torch.Tensor], nbytes: int) -> Any:
        nonlocal held_nbytes
        held_nbytes -= nbytes
        stats.copy_s += gatherer.wait()
        stats.nbytes += nbytes
        return build(outputs)

    drawn = _or_failed(_draw, indices, subset)
    while True:
        while len(under_way) < depth:
            if type(drawn) is torch.Tensor:
                count = drawn.numel()
                nbytes = count * row_nbytes
                if max_bytes is not None and nbytes > max_bytes:
                    msg = f"max_bytes={max_bytes}: one batch takes {nbytes} bytes"
                    raise ValueError(msg)
                if under_way and held_nbytes + nbytes > (max_bytes or DEFAULT_MAX_BYTES):
                    break
                outputs = [slots.allocate((count, *shape), dtype) for shape, dtype in rows]
                gatherer.submit(drawn, outputs)
                under_way.append((collect, outputs, nbytes))
                del outputs  # held no longer than the consumer holds them
                held_nbytes += nbytes
            elif type(drawn) is list:
                under_way.append((make, drawn))
            else:
                break
            drawn = _or_failed(_draw, indices, subset)
        if not under_way:
            break
        yield _or_failed(*under_way.popleft())
    if drawn is not None:
        yield drawn


def _draw(indices: Iterator[Any], subset: torch.Tensor | None) -> Any:
    """Return the rows of the next batch; as a list where Python finds them; None at the end."""
    rows = next(indices, None)
    if subset is None or type(rows) is not torch.Tensor:
        return rows
    try:
        return subset[rows]
    except IndexError:  # the dataset says it in its own words
        return rows.tolist()


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
