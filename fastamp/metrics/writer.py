"""A thread for each sink, so that a sink that blocks does not block whoever logs."""

import logging
import threading
from collections import deque
from functools import partial

from fastamp.data.own_threads import start
from fastamp.metrics.sinks import Scalar, Sink

WAIT_S = 30.0  # for one batch
WAITING = 64  # batches, most of 4,096 scalars


class Writer:
    """Passes batches to a sink in order; its thread starts with the first one."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.dropped = 0
        self._has_failed = False
        self.begin()

    def begin(self) -> None:
        """Begin without a thread; in a forked child again: the parent writes its own batches."""
        self._changed = threading.Condition()
        self._batches: deque[list[Scalar]] = deque()  # the first one is being written
        self._n_written = 0
        self._is_stuck = self._is_closed = False
        self._thread: threading.Thread | None = None

    def put(self, batch: list[Scalar]) -> None:
        """Queue a batch for the thread; if too many are waiting, count it as dropped."""
        with self._changed:
            if self._is_closed:
                return
            if len(self._batches) == WAITING:
                self.dropped += len(batch)
                return
            self._batches.append(batch)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="fastamp-sink", daemon=True)
                try:
                    start(thread)
                except RuntimeError:  # no more threads; Python 3.12 starts none at its exit
                    self._write_first()
                    return
                self._thread = thread
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all is written, for one batch at most WAIT_S; do not wait for a stuck sink."""
        with self._changed:
            end = self._n_written + len(self._batches)  # other threads may add more
            while self._n_written < end and not self._is_stuck:
                waited_for = self._batches[0]
                has_moved = self._changed.wait_for(partial(self._is_past, waited_for), WAIT_S)
                if not (has_moved or self._is_stuck):
                    self._is_stuck = True
                    msg = "sink %r has blocked for %g s: training goes on without waiting for it"
                    logging.getLogger(__name__).warning(msg, self._sink, WAIT_S)

    def _is_past(self, batch: list[Scalar]) -> bool:
        return not self._batches or self._batches[0] is not batch

    def is_current(self) -> bool:
        """Say whether the caller runs in this thread."""
        return self._thread is threading.current_thread()

    def close(self) -> None:
        """Wait once more, and end the thread; that of a stuck sink ends when the sink returns."""
        self._is_stuck = False
        self.wait()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._batches or self._is_closed)
                if not self._batches:
                    return
            self._write_first()

    def _write_first(self) -> None:
        try:
            self._sink([*self._batches[0]])
        except BaseException as error:  # noqa: BLE001 - a sink must not end the training
            if not self._has_failed:
                self._has_failed = True
                logging.getLogger(__name__).warning("sink %r failed: %r", self._sink, error)
        with self._changed:
            self._batches.popleft()
            self._n_written += 1
            self._is_stuck = False
            self._changed.notify_all()
