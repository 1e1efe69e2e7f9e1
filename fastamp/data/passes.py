"""One pass over a loader: it counts what is delivered and how long the consumer waits."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

from fastamp._ops import untraced
from fastamp.data.position import Position
from fastamp.data.prefetch import Taken
from fastamp.data.states import unmark
from fastamp.data.stats import LoaderStats


@dataclass(eq=False, repr=False)
class LoaderPass(Iterator[Any]):
    """What `iter(loader)` returns.

    A batch that raises counts as delivered; the next may follow. A timeout or a dead worker does
    not, since the batch is still to come.
    """

    _batches: Iterator[Any]
    _position: Position
    _stats: LoaderStats
    _states: deque[Any]  # of the dataset or its workers, after each batch made
    _length: Callable[[], int]
    _ask: Callable[[], dict[str, Any]] | None = None
    """For a thread that takes batches ahead: returns the dataset's state after the last one."""
    _ended: bool = False
    _interrupted: bool = False
    _left_s: float = 0.0  # when the last batch was delivered

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
        position = self._position
        before = vars(position).copy()
        try:
            batch, error, delivered = self._take()
            delivered()
            if error is None:
                return batch
        except Exception:
            raise
        except BaseException:
            # Ctrl-C, anywhere: a sampler or an iterator may have been left halfway.
            self._interrupted = True
            if not self._ended:
                vars(position).update(before)
                if isinstance(position.dataset, MethodType):
                    position.dataset = self._refuse_state
            raise
        try:
            raise error
        finally:
            del error  # whose traceback refers to this frame

    def take_ahead(self) -> Callable[[], Taken]:
        """Let the position move not when a batch is taken, but when it is delivered.

        Returns:
            A function that takes a batch, or the error in its place, with the function to call at
            its delivery.
        """
        position = self._position
        if isinstance(position.dataset, MethodType):
            self._ask = position.dataset
            vars(position).update(self._ask())
        return self._take

    def _take(self) -> Taken:
        start_s = time.perf_counter()
        batch = error = None
        try:
            batch = next(self._batches)
        except StopIteration as end:
            return None, end, partial(self._end, start_s)
        except Exception as raised:  # noqa: BLE001 - raised where the consumer is
            error = raised
        stats, end_s = self._stats, time.perf_counter()
        stats.wait_s += end_s - start_s
        stats.elapsed_s += end_s - (self._left_s or start_s)
        self._left_s = end_s
        stats.batches += error is None
        try:
            if error is not None and unmark(error):
                return None, error, bool
            news = self._states.popleft() if self._states else ()
            if self._ask is not None:
                news = (*news, self._ask())
            return batch, error, partial(self._position.advance, news)
        finally:
            del error  # whose traceback refers to this frame

    def _end(self, start_s: float) -> None:
        if not self._ended:
            self._stats.elapsed_s += start_s - (self._left_s or start_s)
            for news in self._states:
                self._position.take(news)
            self._position.end_epoch()
        self._ended = True

    def _refuse_state(self) -> Any:
        """Raise an error: where an iterable dataset was after the last batch is unknown."""
        msg = "the pass was interrupted while the dataset was read: its position is unknown"
        raise RuntimeError(msg)
