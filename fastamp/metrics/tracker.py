"""The tracker: scalars go into a queue, which is emptied in bulk."""

import atexit
import operator
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from time import time
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from fastamp.metrics.series import ScalarStats, Series
from fastamp.metrics.sinks import Logged, Scalar, sink_of
from fastamp.metrics.watch import ScalerWatch, watch_gpu
from fastamp.step import GradScaler

Name: TypeAlias = str | Callable[[int, list[float]], Iterable[Scalar]]
OnDevice: TypeAlias = tuple[Tensor, torch.cuda.Stream | None]  # a copy, and its stream
Entry: TypeAlias = tuple[Name, int, float | list[float] | OnDevice, float]  # at last the time

QUEUE = 4096
BATCHES_IN_FLIGHT = 8
LIMIT = 2**63


class MetricsTracker:
    """Record scalars of a training run in bounded memory, without waiting for the device.

    `log_scalar` puts a value into a queue. `flush`, and every 4,096th value, empties the queue into
    the histories and the sinks, in order; values on a device follow once they have been copied. All
    other methods wait for them, and so does `log_scalar` when the device is 30,000 values behind.
    Any thread may log. A tracker with sinks is closed at exit. A copy, as in a module that is
    copied or pickled, is a new tracker of the same capacity, without sinks.

    Args:
        capacity: number of values in the history of one name at most; at least 2.
        sinks: callables that accept a list of (name, step, value), or TensorBoard's
            `SummaryWriter`. The tuples' attribute `time_s` is when they were logged, in seconds
            since 1970. The thread that empties the queue calls them. The first error of a sink is
            logged, none is raised. Only the first rank of torch.distributed calls its sinks.

    Raises:
        TypeError: `sinks` is no list, or a sink neither a callable nor a SummaryWriter.
        ValueError: `capacity` is not an integer of at least 2.

    Example:
        >>> seen = []
        >>> tracker = fastamp.MetricsTracker(sinks=[seen.extend])
        >>> for step in range(3):
        ...     tracker.log_scalar("train/loss", torch.tensor(3.0 - step), step)
        >>> tracker.history("train/loss")
        (array([0, 1, 2]), array([3., 2., 1.]))
        >>> seen[0]
        ('train/loss', 0, 3.0)
        >>> tracker.close()
    """

    def __init__(self, capacity: int = 4096, sinks: Iterable[Any] = ()) -> None:
        if not hasattr(capacity, "__index__") or capacity < 2:
            msg = f"capacity: expected an integer of at least 2, got {capacity!r}"
            raise ValueError(msg)
        if not hasattr(sinks, "__iter__"):
            msg = f"sinks: expected a list, such as sinks=[print], got {sinks!r}"
            raise TypeError(msg)
        self.last_step = 0
        """The step of the latest call of `log_scalar`."""
        self._capacity = capacity
        self._sinks = [sink_of(sink) for sink in sinks]
        self._series: dict[str, Series] = defaultdict(lambda: Series(capacity))
        self._watched: dict[Any, Callable[[], None]] = {}  # how to stop, by the source
        self._queue: list[Entry] = []
        self._in_flight: deque[tuple[list[Entry], list[Transfer]]] = deque()
        self._lock = threading.RLock()
        self._is_draining = False
        if self._sinks:
            atexit.register(self.close)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._capacity,)

    def log_scalar(self, name: str, value: Any, step: int, *, time_s: float | None = None) -> None:
        """Record a value; costs well under a microsecond for a Python number.

        Args:
            name: of the scalar, as "train/loss".
            value: a number, or a tensor or array with one element of any real dtype on any device,
                which may change in place afterwards; also inf and NaN.
            step: of the training; any integer of 64 bits, in any order.
            time_s: when it was measured, for the sinks, in seconds since 1970; None is now.

        Raises:
            RuntimeError: the value is on a device and a CUDA graph is being captured.
            TypeError: the value is no real number, the step no integer, or the name no string.
        """
        if type(step) is not int:
            with suppress(TypeError):
                step = int(operator.index(step))
        if type(name) is not str or type(step) is not int or not -LIMIT <= step < LIMIT:
            msg = f"expected a string and an integer of 64 bits, got {name=}, {step=}"
            raise TypeError(msg)
        self._put(name, value, step, time_s)
        self.last_step = step

    def watch(self, source: Any, *, first_step: int = 0) -> None:
        """Record the values of a scaler or a GPU until the tracker is closed.

        - `fastamp.GradScaler`: "train/grad_norm" at every step (NaN where it was not computed),
          "train/loss_scale" when it changes, and at every overflow "train/gradient_overflow" (1)
          and "train/skipped_steps" (how many so far). Steps are counted by calls of `update`.
        - a CUDA device, as "cuda": "gpu0/utilization_pct", "gpu0/memory_nbytes" (in use by all
          processes) and "gpu0/power_w", once a second. Nothing without a GPU; if its driver
          refuses, a warning is logged.

        Args:
            source: one of these; a second call with the same one has no effect.
            first_step: number of a scaler's next step, for a run that is resumed.

        Raises:
            ImportError: there is a GPU and no nvidia-ml-py; it comes with the extra `gpu`.
            RuntimeError: `source` is a string that names no device.
            TypeError: `source` is none of these.
        """
        if isinstance(source, GradScaler):
            if source not in self._watched:
                known = self.summary() if first_step else {}  # of the run that is resumed
                self._watched[source] = ScalerWatch(self._put, source, first_step, known).stop
            return
        if not isinstance(source, str | torch.device):
            msg = f"source: expected a GradScaler or a CUDA device, got {type(source)}"
            raise TypeError(msg)
        device = torch.device(source)
        has_nvml = torch.cuda.is_available() and torch.version.cuda is not None
        if device.type == "cuda" and has_nvml:
            index = torch.cuda.current_device() if str(device) == "cuda" else device.index
            if index not in self._watched:
                self._watched[index] = watch_gpu(self._put, index)

    def flush(self) -> None:
        """Pass everything logged so far to the histories and the sinks; waits for the device."""
        self._drain(wait=True)

    def history(self, name: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the steps and values of a name: the first, the last, and an even sample.

        They are two arrays of equal length, int64 and float64, at most `capacity`, in logging
        order. A name without any is a KeyError.
        """
        self._drain(wait=True)
        with self._lock:
            if name not in self._series:
                msg = f"name: nothing was logged as {name!r}, only as {list(self._series)}"
                raise KeyError(msg)
            return self._series[name].history()

    def summary(self) -> dict[str, ScalarStats]:
        """Return the statistics of all values of each name, in the order of their first."""
        self._drain(wait=True)
        with self._lock:
            return {name: series.stats() for name, series in self._series.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the histories and statistics, as plain numbers; waits for the device."""
        self._drain(wait=True)
        with self._lock:
            return {name: series.state_dict() for name, series in self._series.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, and drop what was logged before.

        Call `watch` for a scaler afterwards.
        """
        loaded = {name: Series.restore(saved) for name, saved in state.items()}
        self._drain(wait=True)  # what was logged before still goes to the sinks
        with self._lock:
            self._series.clear()
            self._series.update(loaded)
            self.last_step = max((each.last[0] for each in loaded.values()), default=0)

    def close(self) -> None:
        """Flush, and end what is watched; the sinks are called no more, the histories stay."""
        for stop in self._watched.values():
            stop()
        self.flush()
        self._sinks, self._watched = [], {}
        atexit.unregister(self.close)

    def _put(
        self, name: Name, value: Any, step: int | None = None, time_s: float | None = None
    ) -> None:
        """Queue a value of a step, or else of `last_step`, which it does not change."""
        step = self.last_step if step is None else step
        scalar = value if type(value) is float else _to_host(name, value)
        self._queue.append((name, step, scalar, time() if time_s is None else time_s))
        if len(self._queue) >= QUEUE:
            self._drain(wait=False)

    def _drain(self, *, wait: bool) -> None:
        """Empty the queue, and record the batches whose values are on the host, or all of them."""
        with self._lock:
            if self._is_draining or _is_capturing():
                return
            self._is_draining = True
            try:
                n = len(self._queue)  # other threads append behind it
                batch = self._queue[:n]
                del self._queue[:n]
                self._in_flight.append((batch, _send(batch)))
                while self._in_flight and (wait or self._is_first_ready()):
                    batch, transfers = self._in_flight[0]
                    # Ctrl-C here leaves the batch to the next call.
                    arrived = dict(pair for each in transfers for pair in each.read())
                    self._in_flight.popleft()
                    self._record(batch, arrived)
            finally:
                self._is_draining = False

    def _is_first_ready(self) -> bool:
        transfers = self._in_flight[0][1]
        return len(self._in_flight) > BATCHES_IN_FLIGHT or all(t.is_ready() for t in transfers)

    def _record(self, batch: list[Entry], arrived: dict[int, Any]) -> None:
        """Pass a batch to the histories and the sinks; `arrived` are values by place."""
        scalars: list[Logged] = []
        for place, (name, step, queued, time_s) in enumerate(batch):
            value: Any = arrived[place] if isinstance(queued, tuple) else queued
            made = ((name, step, value),) if isinstance(name, str) else name(step, value)
            for scalar in map(Logged, made):
                scalar.time_s = time_s
                scalars.append(scalar)
        columns: dict[str, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
        for name, step, value in scalars:
            steps, values = columns[name]
            steps.append(step)
            values.append(value)
        for name, column in columns.items():
            self._series[name].extend(*column)
        is_only = not (dist.is_available() and dist.is_initialized())
        for sink in self._sinks if scalars and (is_only or dist.get_rank() == 0) else ():
            sink([*scalars])


class Transfer:
    """Values of one stream on their way to the host in one copy, and their places in a batch."""

    def __init__(self, stream: Any, places: list[int], values: list[Tensor]) -> None:
        self._places, self._shapes = places, [each.shape for each in values]
        self._event: Any = None
        if stream is None:  # not CUDA: `read` copies and waits
            self._values = torch.cat([*map(torch.ravel, values)])
            return
        # Leaving the stream would make a context on the thread's device if that were another one.
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            flat = torch.cat([*map(torch.ravel, values)])
            self._values = flat.to("cpu", non_blocking=True)  # into pinned memory
            self._event = stream.record_event()

    def is_ready(self) -> bool:
        """Return whether `read` returns without waiting."""
        return self._event is not None and self._event.query()

    def read(self) -> Iterator[tuple[int, Any]]:
        """Wait for the values and return them with their places."""
        if self._event is not None:
            self._event.synchronize()
        parts = torch.split(self._values, [shape.numel() for shape in self._shapes])
        for place, part, shape in zip(self._places, parts, self._shapes, strict=True):
            yield place, part.view(shape).tolist()


def _send(batch: list[Entry]) -> list[Transfer]:
    """Start one copy to the host for each device and stream that a batch has scalars on."""
    by_stream: dict[Any, tuple[list[int], list[Tensor]]] = defaultdict(lambda: ([], []))
    for place, (_, _, value, _) in enumerate(batch):
        if isinstance(value, tuple):
            places, values = by_stream[value[0].device, value[1]]
            places.append(place)
            values.append(value[0])
    return [Transfer(stream, *group) for (_, stream), group in by_stream.items()]


def _is_capturing() -> bool:
    """Return whether a CUDA graph is being captured; a query would break the capture."""
    return bool(torch.cuda.is_initialized()) and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def _to_host(name: object, value: Any) -> float | list[float] | OnDevice:
    """Return a number as a Python float, or a copy of one that is on a device.

    A function makes scalars of several numbers: they are a list, or one copy.
    """
    several = callable(name) and isinstance(value, Tensor)
    is_far = isinstance(value, Tensor) and not (value.is_cpu or value.is_meta)
    if is_far and (several or value.numel() == 1) and not value.is_complex():
        if _is_capturing():
            msg = f"{name!r} cannot be logged while a CUDA graph is captured: do it afterwards"
            raise RuntimeError(msg)
        dtype = torch.float32 if value.is_mps else torch.float64  # Metal has no float64
        stream = torch.cuda.current_stream(value.device) if value.is_cuda else None
        return value.detach().reshape(value.shape if several else ()).to(dtype, copy=True), stream
    if several:
        return value.tolist()  # type: ignore[no-any-return]
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        return float(value.item() if hasattr(value, "item") else value)
    msg = f"value of {name!r}: expected one real number, got {value!r}"
    raise TypeError(msg)
