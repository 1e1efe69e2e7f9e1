"""One pass over a loader: it counts what is delivered and how long the consumer waits."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from fastamp._ops import untraced
from fastamp.data.position import Position, unmark
from fastamp.data.prefetch import Taken
from fastamp.data.stats import LoaderStats


class LoaderPass(Iterator[Any]):
    """What `iter(loader)` returns.

    A batch that raises counts as delivered; the next may follow. A timeout or a dead worker does
    not, since the batch is still to come.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        position: Position,
        stats: LoaderStats,
        length: Callable[[], int],
        sampler_states: deque[Any],
    ) -> None:
        """`sampler_states` receives the state of a sampler of the user's after each batch."""
        self._batches, self._position, self._stats = batches, position, stats
        self._length, self._sampler_states = length, sampler_states
        self._ask: Callable[[], Any] | None = None  # once batches are taken ahead
        self._ended = self._interrupted = False
        self._left_s = 0.0  # when the last batch was delivered

    def __len__(self) -> int:
        return self._length()

    @untraced
    def __next__(self) -> Any:
        if self._interrupted:
            msg = (
                "this pass was interrupted in the middle of a batch: "
                "loader.load_state_dict(loader.state_dict()) lets the next one begin after the "
                "last batch delivered"
            )
            raise RuntimeError(msg)
        position, stats, start_s = self._position, self._stats, time.perf_counter()
        delivered = position.batch
        try:
            batch = next(self._batches)
            self._count(stats, start_s)
            stats.batches += 1
            self._move()
        except StopIteration:
            self._end(start_s)
            raise
        except Exception as error:
            self._count(stats, start_s)
            if not unmark(error):
                self._move()
            raise
        except BaseException:
            # Ctrl-C, anywhere: a sampler or an iterator may have been left halfway.
            self._interrupted = True
            if not self._ended:
                position.batch = delivered
            if position.ask is not None:
                position.ask = _refuse_state
            raise
        return batch

    def _count(self, stats: LoaderStats, start_s: float) -> None:
        end_s = time.perf_counter()
        stats.wait_s += end_s - start_s
        stats.elapsed_s += end_s - (self._left_s or start_s)
        self._left_s = end_s

    def _move(self) -> None:
        """Move the position behind a batch."""
        if self._sampler_states:
            self._position.sampler_state = self._sampler_states.popleft()
        self._position.batch += 1

    def take_ahead(self) -> Callable[[], Taken]:
        """Let the position move not when a batch is taken, but when it is delivered.

        Returns:
            A function that takes a batch, or the error in its place, with the function to call at
            its delivery.
        """
        position = self._position
        if position.ask is not None:
            self._ask = position.ask
            position.dataset_state, position.ask = position.ask(), None
        return self._take

    def _take(self) -> Taken:
        start_s = time.perf_counter()
        batch = error = None
        try:
            batch = next(self._batches)
        except StopIteration as end:
            dataset = self._ask and self._ask()
            return None, end, partial(self._end, start_s, dataset)
        except Exception as raised:  # noqa: BLE001 - raised where the consumer is
            error = raised
        self._count(self._stats, start_s)
        self._stats.batches += error is None
        try:
            if error is not None and unmark(error):
                return None, error, bool
            sampler = self._sampler_states.popleft() if self._sampler_states else None
            dataset = self._ask and self._ask()
            return batch, error, partial(self._position.advance, sampler, dataset)
        finally:
            del error  # whose traceback refers to this frame

    def _end(self, start_s: float, dataset: Any = None) -> None:
        if not self._ended:
            self._stats.elapsed_s += start_s - (self._left_s or start_s)
            if dataset is not None:
                self._position.dataset_state = dataset
            self._position.end_epoch()
        self._ended = True


def _refuse_state() -> Any:
    """Raise an error: where a dataset with a state was after the last batch is unknown."""
    msg = "the pass was interrupted while the dataset was read: its position is unknown"
    raise RuntimeError(msg)
