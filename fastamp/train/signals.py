"""SIGTERM, Ctrl-C and the like, deferred until training has written a checkpoint."""

import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from typing_extensions import Self

DEFERRED = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Defers signals, in the main thread, until `deliver` or the end of a `with` block."""

    def __init__(self, numbers: Iterable[int]) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        handlers = {number: signal.getsignal(number) for number in numbers if in_main}
        self._handlers = {n: h for n, h in handlers.items() if h not in (signal.SIG_IGN, None)}
        self.received: int | None = None  # the latest one
        self._set(self._receive)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._set(None)
        if self.received is not None:  # during the last save, or before an error
            self._act(self.received)

    def deliver(self, number: int) -> None:
        """Do what a signal, received here or on another rank, does without this object."""
        self._act(number)
        self._set(self._receive)  # unless the program's own handler has ended training

    def _act(self, number: int) -> None:
        self._set(None)
        self.received = None
        if self._handlers.get(number, signal.SIG_DFL) is signal.SIG_DFL:
            raise SystemExit(128 + number)  # so that `finally` blocks and exit handlers run
        signal.raise_signal(number)

    def _set(self, handler: Any) -> None:
        """Install a handler for all signals, or with None those from before."""
        for number, previous in self._handlers.items():
            signal.signal(number, handler or previous)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received = number
        signal.signal(number, self._handlers[number])  # a second one acts at once
