"""The timer's regions: those of the compiled core, or csrc/timer/bind.cpp in Python.

In Python a region appends its duration to a list, which needs no lock; the list is counted in
batches.
"""

import functools
import os
import threading
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, TypeAlias

import numpy as np
from torch.autograd import profiler
from typing_extensions import Self

from fastamp import _ops

# csrc/timer/clock.h, csrc/timer/bind.cpp
_NUM_BUCKETS = 44 * 32
_LONGEST_NS = (1 << 48) - 1
_MAX_PENDING = 2048

RegionMaker: TypeAlias = "Callable[[str, Any, bool], Region]"
_Frame = tuple["Region", Any, int, Any]

_lock = threading.RLock()
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)


def region_maker() -> RegionMaker:
    """Return the function that makes a timer's regions from path, `begin` and `always`.

    `begin`, the same for all regions, is called with a region that opens, if `always` is set or
    torch's profiler is on. It returns a function that is called when the region closes, with the
    start and the end in nanoseconds.
    """
    core = _ops.host_core()
    if core is None:
        return functools.partial(Region, threading.local())
    make_region: RegionMaker = core.make_region
    return make_region


class Region:
    """One path of nested regions, in all threads, on the host's clock; the core's have its methods.

    `local` belongs to one timer. Its `stack`, one for each thread, is a list of one frame, that of
    the innermost open region: the region, the function to call at its end, its start, and the frame
    around it. A list of all frames would be slower.
    """

    __slots__ = ("_always", "_begin", "_exact", "_hits", "_local", "_pending", "children", "path")

    def __init__(self, local: threading.local, path: str, begin: Any, always: bool) -> None:  # noqa: FBT001
        self.path = path
        self.children: dict[str, Region] = {}
        self._local = local
        self._begin = begin
        self._always = always
        self._pending: list[int] = []
        self._exact = (0, 0, 0, 0)
        self._hits = np.zeros(_NUM_BUCKETS, np.int64)

    def innermost(self) -> "Region":
        """Return the innermost open region of this thread and this timer, or else this one."""
        try:
            frame: _Frame | None = self._local.stack[0]
        except AttributeError:
            return self
        return frame[0] if frame else self

    def find(self, name: object) -> "Region | None":
        """Return the known region of a name inside the innermost open one."""
        return self.innermost().children.get(name)  # type: ignore[call-overload, no-any-return]

    def __enter__(self) -> Self:
        """Open the region in this thread."""
        try:
            stack: list[_Frame] = self._local.stack
        except AttributeError:
            stack = self._local.stack = [None]
        end = None
        if self._always or profiler._is_profiler_enabled:
            end = self._begin(self)
        stack[0] = (self, end, perf_counter_ns(), stack[0])
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Close it and the regions left open inside it.

        Nothing happens if it has been closed with a region around it.
        """
        end_ns = perf_counter_ns()
        try:
            stack: list[_Frame] = self._local.stack
            region, end, start_ns, outer = stack[0]
        except (AttributeError, TypeError):  # nothing was or is open
            return
        if region is not self:
            if self._is_open(stack):
                try:
                    region.__exit__(None, None, None)
                finally:
                    self.__exit__(None, None, None)
            return
        stack[0] = outer
        pending = self._pending
        pending.append(end_ns - start_ns)
        if len(pending) > _MAX_PENDING:
            self._fold()
        if end is not None:
            end(start_ns, end_ns)

    def _is_open(self, stack: list[Any]) -> bool:
        """Return whether this region is open; it may have been closed with one around it."""
        frame: _Frame | None = stack[0]
        while frame and frame[0] is not self:
            frame = frame[3]
        return frame is not None

    def add(self, duration_ns: int) -> None:
        """Count a duration that was measured elsewhere."""
        self._pending.append(duration_ns)
        if len(self._pending) > _MAX_PENDING:
            self._fold()

    def _fold(self) -> None:
        """Count what is pending; other threads may append meanwhile."""
        with _lock:
            ns = np.fromiter(self._pending[:], np.int64)
            if not ns.size:
                return
            del self._pending[: ns.size]
            count, sum_ns, min_ns, max_ns = self._exact
            low, high = int(ns.min()), int(ns.max())
            self._exact = (
                count + ns.size,
                sum_ns + int(ns.sum()),
                min(min_ns, low) if count else low,
                max(max_ns, high) if count else high,
            )
            ns = np.minimum(ns, _LONGEST_NS)
            shift = np.maximum(np.frexp(ns)[1] - 6, 0)  # frexp's exponent is the length in bits
            self._hits += np.bincount((shift << 5) + (ns >> shift), minlength=_NUM_BUCKETS)

    def figures(self) -> tuple[Any, ...]:
        """Return count, sum, minimum and maximum, and the histogram as a buffer of int64."""
        with _lock:
            self._fold()
            return (*self._exact, self._hits.tobytes())

    def reset(self) -> None:
        """Reset all figures; if the region is open, it is counted when it ends."""
        with _lock:
            self._pending.clear()
            self._exact = (0, 0, 0, 0)
            self._hits = np.zeros(_NUM_BUCKETS, np.int64)
