"""The timer's regions: those of the compiled core, or csrc/timer/bind.cpp in Python."""

import functools
import os
import threading
from array import array
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, TypeAlias

from torch.autograd import profiler
from typing_extensions import Self

from fastamp import _ops

# csrc/timer/clock.h, csrc/timer/bind.cpp
_NUM_BUCKETS = 44 * 32
_LONGEST_NS = (1 << 48) - 1

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

    __slots__ = ("_always", "_begin", "_exact", "_hits", "_local", "children", "path")

    _exact: tuple[int, int, int, int]
    _hits: "array[int]"

    def __init__(self, local: threading.local, path: str, begin: Any, always: bool) -> None:  # noqa: FBT001
        self.path = path
        self.children: dict[str, Region] = {}
        self._local = local
        self._begin = begin
        self._always = always
        self.reset()

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
        stack: list[Any] = getattr(self._local, "stack", [None])
        frame: _Frame | None = stack[0]
        while frame and frame[0] is not self:
            frame = frame[3]
        if not frame:
            return
        if frame is not stack[0]:
            try:
                stack[0][0].__exit__(None, None, None)
            finally:
                self.__exit__(None, None, None)
            return
        _, end, start_ns, stack[0] = frame
        self.add(end_ns - start_ns)
        if end is not None:
            end(start_ns, end_ns)

    def add(self, duration_ns: int) -> None:
        """Count a duration."""
        ns = min(duration_ns, _LONGEST_NS)
        shift = max(ns.bit_length() - 6, 0)
        with _lock:
            count, sum_ns, low, high = self._exact
            low = min(low, duration_ns) if count else duration_ns
            self._exact = (count + 1, sum_ns + duration_ns, low, max(high, duration_ns))
            self._hits[(shift << 5) + (ns >> shift)] += 1

    def figures(self) -> tuple[Any, ...]:
        """Return count, sum, minimum and maximum, and the histogram as a buffer of int64."""
        with _lock:
            return (*self._exact, self._hits.tobytes())

    def reset(self) -> None:
        """Reset all figures; if the region is open, it is counted when it ends."""
        with _lock:
            self._exact = (0, 0, 0, 0)
            self._hits = array("q", bytes(8 * _NUM_BUCKETS))
