"""The timer: how long each part of a program takes, on the host and on the GPU, without a wait.

Counts and sums are exact, percentiles come from a histogram: the memory is bounded, however long
the program runs.
"""

import contextlib
import functools
import inspect
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.compiler import is_dynamo_compiling

from fastamp._files import write
from fastamp.timer.events import DeviceClock, Extras
from fastamp.timer.regions import Region, region_maker

_F = TypeVar("_F", bound="Callable[..., Any]")
_T = TypeVar("_T")

_MAX_PATHS = 1000
_MAX_DEPTH = 200
_OTHER = "(other)"


class RegionStats(NamedTuple):
    """The figures of one region, in seconds: on the GPU where the timer has one.

    Args:
        count: how often it was timed; exact, like `total`, `min` and `max`.
        p50, p90, p99: from a histogram whose buckets are at most 3.2 % wide.
        host: total on the host. Where it is near the GPU's total, the region is launch-bound.
        gap: total on the GPU between the event before the region, in its stream, and the region.
        dropped: how often it was not timed: 4,096 events in flight, or a CUDA graph's capture.
        histogram: (bucket, count): a bucket for each nanosecond below 64, 32 for each doubling.

    Example:
        >>> timer = fastamp.Timer("cpu")
        >>> with timer("sum"):
        ...     total = sum(range(1000))
        >>> stats = timer.summary()["sum"]
        >>> stats.count, stats.min <= stats.p50 <= stats.max
        (1, True)
    """

    count: int  # type: ignore[assignment]  # hides the tuple's method
    total: float
    mean: float
    min: float
    max: float
    p50: float
    p90: float
    p99: float
    host: float = 0.0
    gap: float = 0.0
    dropped: int = 0
    histogram: tuple[tuple[int, int], ...] = ()


class Timer:
    """Time regions of a program, on a GPU without waiting for it.

    `with timer("forward"): ...` costs about three times two reads of a clock. On CUDA an
    event is recorded on the current stream when the region begins and when it ends; only
    `summary()` waits for them. A region that is opened inside another one is named by its path,
    "outer/inner". Nesting is per thread: asyncio tasks that interleave in one need a timer each. A
    region that an exception ends is counted, too; one that is left open ends with the region around
    it. 1,000 paths are kept apart; further ones are counted together as "(other)".

    Inside `torch.compile` regions are left out of the graph. While a CUDA graph is captured they
    are not timed on the GPU, and counted in `dropped`. torch's profiler shows them as ranges.

    A copy of a timer, as in a module that is copied or pickled, is a new one of the same device.

    Args:
        device: "cpu" for the host's clock, or a CUDA device; None is the current CUDA device where
            there is one, else "cpu".

    Raises:
        ValueError: the device is neither "cpu" nor a CUDA device.
        RuntimeError: the device is not available, or torch knows none of this name.

    Example:
        >>> timer = fastamp.Timer("cpu")
        >>> for _ in range(3):
        ...     with timer("step"):
        ...         with timer("forward"):
        ...             result = torch.ones(2) + 1
        >>> {name: stats.count for name, stats in timer.summary().items()}
        {'step': 3, 'step/forward': 3}
    """

    def __init__(self, device: str | torch.device | None = None) -> None:
        self._device = _device(device)
        make_region = region_maker()
        self._clock: DeviceClock | None = None
        if self._device.type == "cuda":
            self._clock = DeviceClock(self._device, make_region)
        begin = Extras(self._clock).begin
        always = self._clock is not None
        self._make: Callable[[str], Region] = lambda path: make_region(path, begin, always)
        self._root = self._make("")
        self._regions: dict[str, Region] = {}
        self._start_s = 0.0  # of the first region, or of the newest reset after it

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._device,)

    def __call__(self, name: str) -> Region | contextlib.nullcontext[None]:
        """Return the region of this name inside the innermost open one, for a `with` statement.

        Raises:
            RuntimeError: 200 regions are open around it.
            TypeError: `name` is not a string.
        """
        if is_dynamo_compiling():
            return contextlib.nullcontext()
        return self._root.find(name) or self._new_region(name)

    def _new_region(self, name: object) -> Region:
        outer = self._root.innermost()
        name = _check_name(name)
        self._start_s = self._start_s or perf_counter()
        path = f"{outer.path}/{name}" if outer.path else name
        if outer.path.count("/") >= _MAX_DEPTH:
            msg = f"region {name!r}: {_MAX_DEPTH} are open around it; is a stop() missing?"
            raise RuntimeError(msg)
        if path not in self._regions and len(self._regions) >= _MAX_PATHS:
            return self._regions.setdefault(_OTHER, self._make(_OTHER))
        region = self._regions.setdefault(path, self._make(path))
        outer.children[name] = region
        return region

    def start(self, name: str) -> None:
        """Open a region, to be closed by `stop` in the same thread; raises what a call does."""
        if not is_dynamo_compiling():
            self(name).__enter__()

    def stop(self, name: str) -> None:
        """Close the region, which is the innermost open one of this thread.

        Raises:
            RuntimeError: another region is the innermost one, which the message names, or none is
                open; nothing changes.
        """
        if is_dynamo_compiling():
            return
        inner = self._root.innermost()
        if inner is self._root:
            msg = f"stop({name!r}): no region is open in this thread"
            raise RuntimeError(msg)
        if inner.path != _OTHER and not f"/{inner.path}".endswith(f"/{name}"):
            msg = f"stop({name!r}): the innermost open region of this thread is {inner.path!r}"
            raise RuntimeError(msg)
        inner.__exit__(None, None, None)

    def each(self, name: str, iterable: Iterable[_T]) -> "Each[_T]":
        """Return an iterable with the items of another, such as a loader, and its `len`.

        Each wait for an item is a region. The last wait, which finds the end, counts too.
        """
        return Each(self, name, iterable)

    def wrap(self, name: str) -> Callable[[_F], _F]:
        """Return a decorator that makes every call of a function a region.

        The calls that a recursive function makes of itself are part of the first one's region.

        Raises:
            TypeError: `name` is not a string, as in `@timer.wrap` without one; or the function is a
                generator or asynchronous, whose body runs in pieces.
        """
        _check_name(name)

        def decorate(function: _F) -> _F:
            is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
            if is_async or inspect.isgeneratorfunction(function):
                called = getattr(function, "__qualname__", function)  # a partial has none
                msg = f"wrap({name!r}): {called} is a generator or asynchronous"
                raise TypeError(msg)

            in_thread = threading.local()

            @functools.wraps(function)
            def timed(*args: Any, **kwargs: Any) -> Any:
                if is_dynamo_compiling() or getattr(in_thread, "is_running", False):
                    return function(*args, **kwargs)
                in_thread.is_running = True
                try:
                    with self(name):
                        return function(*args, **kwargs)
                finally:
                    in_thread.is_running = False

            return timed  # type: ignore[return-value]

        return decorate

    def summary(self) -> dict[str, RegionStats]:
        """Return the figures of every region so far, after one wait for the GPU.

        Regions that are still open are left out. On the CPU there is no wait.

        Raises:
            RuntimeError: the current stream is being captured into a CUDA graph.
        """
        if self._clock is not None:
            self._clock.wait()
        stats = {path: self._stats(region) for path, region in list(self._regions.items())}
        return {path: s for path, s in stats.items() if s.count or s.dropped}

    def _stats(self, region: Region) -> RegionStats:
        figures, others = region.figures(), (0.0, 0)
        host_s = figures[1] / 1e9
        if self._clock is not None:
            device = self._clock.figures_of(region.path)
            figures = device.series.figures()
            others = (device.gap_ns / 1e9, device.dropped)
        count, sum_ns, min_ns, max_ns, buffer = figures
        hits = np.frombuffer(buffer, np.int64)
        ranks = np.ceil(np.multiply((0.5, 0.9, 0.99), count))
        middles = middles_ns(np.searchsorted(hits.cumsum(), ranks))
        p50, p90, p99 = (np.clip(middles, min_ns, max_ns) / 1e9).tolist()
        total, low, high = sum_ns / 1e9, min_ns / 1e9, max_ns / 1e9
        mean = total / max(count, 1)
        histogram = tuple((bucket, int(hits[bucket])) for bucket in hits.nonzero()[0].tolist())
        return RegionStats(count, total, mean, low, high, p50, p90, p99, host_s, *others, histogram)

    def table(self) -> str:
        """Return `summary()` as text: a line for each region, then how many were not timed."""
        times = ["total", "mean", "min", "p50", "p90", "p99", "max"]
        times += ["host", "gap"] * (self._clock is not None)
        rows, notes = [["region", "count", *times]], []
        for path, stats in self.summary().items():
            durations = [_duration(getattr(stats, name)) for name in times]
            rows.append([path, f"{stats.count:,}", *durations])
            if stats.dropped:
                reason = "too many events in flight, or the capture of a CUDA graph"
                notes.append(f"{path}: {stats.dropped:,} not timed: {reason}")
        return "\n".join(align(rows) + notes)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write `summary()` to a file, in seconds, for `python -m fastamp.bench doctor --timer`.

        It also has the time since the first region, or since `reset()`: call it right after the
        loop. The file is written whole or stays as it was. That command says where the time goes.

        Raises:
            OSError: the file cannot be written.
        """
        regions = {name: stats._asdict() for name, stats in self.summary().items()}
        elapsed_s = perf_counter() - (self._start_s or perf_counter())
        facts = {"schema": 1, "unit": "s", "device": str(self._device), "elapsed": elapsed_s}
        content = {**facts, "regions": regions}
        write(Path(path), (json.dumps(content) + "\n").encode())

    def reset(self) -> None:
        """Forget all figures."""
        if self._clock is not None:
            self._clock.reset()
        for region in list(self._regions.values()):
            region.reset()
        self._start_s = perf_counter() if self._regions else 0.0


class Each(Generic[_T]):
    """The items of an iterable; each wait for one is a region of a timer."""

    def __init__(self, timer: Timer, name: str, iterable: Iterable[_T]) -> None:
        self._timer, self._name, self._iterable = timer, name, iterable

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]  # without one it raises a TypeError

    def __iter__(self) -> Iterator[_T]:
        items = iter(self._iterable)
        while True:
            with self._timer(self._name):
                item: Any = next(items, items)
            if item is items:
                return
            yield item


def _check_name(name: object) -> str:
    """Return a region's name, or raise an error."""
    if not isinstance(name, str):
        msg = f"name: expected a str, got {name!r}"
        raise TypeError(msg)
    return name


def _device(device: str | torch.device | None) -> torch.device:
    """Return the device to time, with its index."""
    has_cuda = torch.cuda.is_available()
    chosen = torch.device(device or ("cuda" if has_cuda else "cpu"))
    if chosen.type == "cpu":
        return chosen
    if chosen.type != "cuda":
        msg = f"device: expected 'cpu' or a CUDA device, got {str(device)!r}"
        raise ValueError(msg)
    if not has_cuda:
        msg = f"device={str(chosen)!r}: no CUDA device is available here"
        raise RuntimeError(msg)
    return torch.device("cuda", torch._utils._get_device_index(chosen, optional=True))


def middles_ns(buckets: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the middles of a histogram's buckets, in nanoseconds."""
    shift = np.maximum(buckets // 32 - 1, 0)
    middles: NDArray[np.float64] = ((buckets - 32 * shift) << shift) + ((1 << shift) - 1) / 2
    return middles


def align(rows: list[list[str]]) -> list[str]:
    """Return the lines of a table: its first column is aligned to the left, all others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]


def _duration(seconds: float) -> str:
    """Return a duration with three or four digits and a unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e9:.4g} ns"
