"""What accompanies a region of the timer: CUDA events and a range of torch's profiler.

Events are pooled and recorded on the current stream. Completed ones are read when the pool is
empty, all others when the results are read.
"""

import threading
from collections import deque
from collections.abc import Callable
from itertools import islice

import torch
from torch.autograd import profiler

from fastamp.timer.regions import Region, RegionMaker

_MAX_EVENTS = 4096  # in flight
_HARVEST_LIMIT = 32  # bounds the time that one region spends on reading earlier events


class Extras:
    """Begins and ends the events and the profiler's range of each region of a timer."""

    def __init__(self, clock: "DeviceClock | None") -> None:
        self._clock = clock

    def begin(self, region: Region) -> Callable[[int, int], None]:
        """Begin them; return the function to call when the region ends, with the host's times."""
        opened = None
        if profiler._is_profiler_enabled:
            opened = torch._C._profiler._RecordFunctionFast(region.path)
            opened.__enter__()
        interval = self._clock.begin(region.path) if self._clock else None

        def end(_start_ns: int, _end_ns: int) -> None:
            if self._clock and interval is not None:
                self._clock.record(interval)
            if opened is not None:
                opened.__exit__(None, None, None)

        return end


class DeviceFigures:
    """The figures of one path on the device."""

    def __init__(self, series: Region) -> None:
        self.series = series
        self.gap_ns = self.dropped = 0


class _Interval:
    """A region on the device: the time between two events of one stream."""

    def __init__(self, path: str, stream: torch.cuda.Stream) -> None:
        self.path = path
        self.stream = stream
        self.start_ns: int | None = None  # on the stream's clock, once it is known


class _StreamClock:
    """A stream's clock: its events complete in order, so the times between them add up."""

    def __init__(self) -> None:
        # In flight: the event, and the interval that it begins or ends.
        self.marks: deque[tuple[torch.cuda.Event, _Interval, DeviceFigures]] = deque()
        self.last: torch.cuda.Event | None = None  # the newest completed one
        self.now_ns = 0  # its time, since the stream's first one


class DeviceClock:
    """The events of one timer on one device."""

    def __init__(self, device: torch.device, make_region: RegionMaker) -> None:
        self._figures: dict[str, DeviceFigures] = {}
        self._device = device
        self._make_region = make_region
        self._lock = threading.RLock()
        self._streams: dict[int, _StreamClock] = {}
        self._free: list[torch.cuda.Event] = []
        self._num_events = 0

    def begin(self, path: str) -> _Interval | None:
        """Record a region's first event on the current stream, or count why not."""
        if torch.cuda._is_in_bad_fork():
            return None
        interval = _Interval(path, torch.cuda.current_stream(self._device))
        return interval if self.record(interval) else None

    def figures_of(self, path: str) -> DeviceFigures:
        """Return a path's figures, which `wait` completes."""
        with self._lock:
            if path not in self._figures:
                self._figures[path] = DeviceFigures(self._make_region(path, None, False))
            return self._figures[path]

    def record(self, interval: _Interval) -> bool:
        """Record an event on the interval's stream, or count why not."""
        with self._lock:
            figures = self.figures_of(interval.path)
            is_capturing = torch.cuda.is_current_stream_capturing()
            event = None if is_capturing else self._take_event()
            if event is None:
                figures.dropped += 1
                return False
            key = interval.stream.cuda_stream
            stream = self._streams.get(key) or self._streams.setdefault(key, _StreamClock())
            stream.marks.append((event, interval, figures))
            event.record(interval.stream)
        return True

    def _take_event(self) -> torch.cuda.Event | None:
        if not self._free:
            self._harvest(_HARVEST_LIMIT)
        if not self._free and self._num_events < _MAX_EVENTS:
            self._num_events += 1
            return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        return self._free.pop() if self._free else None

    def _harvest(self, limit: int) -> None:
        """Read the completed events, at most `limit` of each stream."""
        for stream in self._streams.values():
            for event, interval, figures in list(islice(stream.marks, limit)):
                if not event.query():  # type: ignore[no-untyped-call]
                    break
                stream.marks.popleft()
                step_ns = 0
                if stream.last is not None:
                    step_ns = round(stream.last.elapsed_time(event) * 1e6)
                    self._free.append(stream.last)
                stream.last = event
                stream.now_ns += step_ns
                if interval.start_ns is None:
                    interval.start_ns = stream.now_ns
                    figures.gap_ns += step_ns
                else:
                    figures.series.add(stream.now_ns - interval.start_ns)

    def wait(self) -> None:
        """Wait for the last event of each stream and read them all.

        Raises:
            RuntimeError: the current stream is being captured into a CUDA graph.
        """
        if torch.cuda.is_current_stream_capturing():
            msg = "a timer cannot be read while a CUDA graph is captured"
            raise RuntimeError(msg)
        with self._lock:
            last = [each.marks[-1][0] for each in self._streams.values() if each.marks]
        for event in last:  # a wait for the whole device would break captures
            event.synchronize()
        with self._lock:
            self._harvest(_MAX_EVENTS)

    def reset(self) -> None:
        """Forget all figures, also those of events in flight."""
        with self._lock:
            self._figures = {}
