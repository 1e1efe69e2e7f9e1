"""One pass over a loader: it counts what is delivered and how long the consumer waits."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fastamp.data.position import Position
from fastamp.data.stats import LoaderStats


@dataclass(eq=False, repr=False)
class LoaderPass(Iterator[Any]):
    """What `iter(loader)` returns. A batch that raises counts as one; the next can be taken."""

    _batches: Iterator[Any]
    _position: Position
    _stats: LoaderStats
    _states: deque[Any]  # of an iterable dataset, after each batch made
    _length: Callable[[], int]
    _ended: bool = False
    _left_s: float = 0.0  # when the consumer went off with a batch

    def __len__(self) -> int:
        return self._length()

    def __next__(self) -> Any:
        start_s = time.perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            if not self._ended:
                self._stats.elapsed_s += start_s - (self._left_s or start_s)
                self._position.end_epoch()
            self._ended = True
            raise
        except Exception:
            self._count(start_s)
            raise
        self._count(start_s)
        self._stats.batches += 1
        if self._states:
            self._position.dataset, self._position.exhausted = self._states.popleft()
        return batch

    def _count(self, start_s: float) -> None:
        end_s = time.perf_counter()
        self._stats.wait_s += end_s - start_s
        self._stats.elapsed_s += end_s - (self._left_s or start_s)
        self._left_s = end_s
        self._position.batch += 1
