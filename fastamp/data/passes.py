"""One pass over a loader: what moves as batches are delivered, and where its time goes."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, TypeAlias

from torch.autograd.profiler import record_function

from fastamp._ops import is_profiling, untraced
from fastamp.data.items import Made, reraise
from fastamp.data.position import Position

_Length: TypeAlias = Callable[[], int]
_STARVED_SHARE = 0.05
_EXPLAINED_SHARE = 0.75  # of the waiting, by the cause that is named
_BROKEN = "this pass was interrupted or failed in the middle of a batch: after "
_BROKEN += "loader.load_state_dict(loader.state_dict()) the next one begins behind the last batch"


@dataclass
class LoaderStats:
    """What a loader has done since it was made. Seconds of several threads or workers add up.

    Args:
        batches: delivered to the consumer.
        elapsed_s: time in the consumer's loop: waiting for a batch and working on it.
        wait_s: the part of it spent waiting for a batch.
        getitem_s: time in the dataset: reading and transforming items.
        collate_s: time in the collate function: making batches of them.
        copy_s: time gathering rows.
        path: how batches are made: "gathered", or "item by item: " and the reason.

    Example:
        >>> loader = fastamp.DataLoader(torch.arange(8), batch_size=4)
        >>> print(loader.stats())
        nothing measured yet
        >>> for batch in loader:
        ...     pass
        >>> loader.stats().batches
        2
    """

    batches: int = 0
    elapsed_s: float = 0.0
    wait_s: float = 0.0
    getitem_s: float = 0.0
    collate_s: float = 0.0
    copy_s: float = 0.0
    path: str = ""

    def __str__(self) -> str:
        """Return the verdict: "compute-bound", or "starved 18 %: getitem", the share and its cause.

        "compute-bound": the loop waits for less than 5 % of its time; with thread workers, for
        whose GIL its own Python may wait as well, it says so. The cause is the largest of the times
        above, "getitem", "collate" or "copy", and named if it is at least three quarters of the
        waiting. Before the first batch: "nothing measured yet".
        """
        if not self.batches:
            return "nothing measured yet"
        waited = self.wait_s / self.elapsed_s if self.elapsed_s else 0.0
        if waited < _STARVED_SHARE:
            threads = "; its threads may hold the GIL: time some steps with worker='process' too"
            return "compute-bound" + threads * ("thread" in self.path)
        causes = {"getitem": self.getitem_s, "collate": self.collate_s, "copy": self.copy_s}
        cause = max(causes, key=lambda name: causes[name])
        share = f"starved {100 * waited:.0f} %"
        return f"{share}: {cause}" if causes[cause] >= _EXPLAINED_SHARE * self.wait_s else share


class LoaderPass(Iterator[Any]):
    """What `iter(loader)` returns.

    A batch that raises counts as delivered; the next may follow. A timeout or a dead worker does
    not, since the batch is still to come.
    """

    def __init__(
        self, batches: Iterator[Made], position: Position, stats: LoaderStats, length: _Length
    ) -> None:
        self._batches, self.position, self._stats = batches, position, stats
        self._length = length
        self.ended = self.broken = False
        self._left_s = 0.0  # when the last batch was delivered

    def __len__(self) -> int:
        return self._length()

    @untraced
    def __next__(self) -> Any:
        if self.broken:
            raise RuntimeError(_BROKEN)
        stats, position, start_s = self._stats, self.position, time.perf_counter()
        try:
            made: Any = next(self._batches) if not is_profiling() else _profiled(self._batches)
            end_s = time.perf_counter()
            stats.wait_s += end_s - start_s
            stats.elapsed_s += end_s - (self._left_s or start_s)
            self._left_s = end_s
            batch, getitem_s, collate_s, copy_s, error = made
            if error is None:
                stats.batches += 1
                stats.getitem_s += getitem_s
                stats.collate_s += collate_s
                stats.copy_s += copy_s
                position.batch += 1
                return batch
        except StopIteration:
            if not self.ended:
                stats.elapsed_s += start_s - (self._left_s or start_s)
            self.ended, self._batches = True, iter(())  # whose threads end now
            raise
        except BaseException as raised:  # no batch has come: of a sampler, a timeout, a dead worker
            is_ctrl_c = not isinstance(raised, Exception)  # a sampler or a runner may be halfway
            self.broken = is_ctrl_c or isinstance(self._batches, GeneratorType)
            raise
        position.batch += 1
        errors = [error]
        del made, error  # whose traceback refers to this frame
        reraise(errors.pop())
        return None


def _profiled(batches: Iterator[Any]) -> Any:
    with record_function("enumerate(DataLoader)#fastamp.__next__"):
        return next(batches)
