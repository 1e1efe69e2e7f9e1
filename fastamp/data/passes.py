"""One pass over a loader: it counts what is delivered and how long the consumer waits."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

from fastamp._ops import untraced
from fastamp.data.position import Position
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
        delivered = vars(position).copy()
        try:
            start_s = time.perf_counter()
            try:
                batch = next(self._batches)
            except StopIteration:
                self._end(start_s)
                raise
            except Exception as error:
                self._count(start_s, moves=not unmark(error))
                raise
            self._count(start_s)
            self._stats.batches += 1
            return batch  # noqa: TRY300 - Ctrl-C may come here too
        except Exception:
            raise
        except BaseException:
            # Ctrl-C, anywhere: a sampler or an iterator may have been left halfway.
            self._interrupted = True
            if not self._ended:
                vars(position).update(delivered)
                if isinstance(position.dataset, MethodType):
                    position.dataset = self._refuse_state
            raise

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

    def _count(self, start_s: float, *, moves: bool = True) -> None:
        end_s = time.perf_counter()
        self._stats.wait_s += end_s - start_s
        self._stats.elapsed_s += end_s - (self._left_s or start_s)
        self._left_s = end_s
        if moves:
            self._position.batch += 1
            if self._states:
                self._position.take(self._states.popleft())
