"""SIGTERM, Ctrl-C and the like, deferred until training has written a checkpoint."""

import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from typing_extensions import Self

DEFERRED = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Defers signals until `deliver` or the end; a second one acts at once.

    Only in the main thread, and only signals that are not ignored.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        self._numbers = [*numbers] if in_main else []
        self._previous: dict[int, Any] = {}
        self.received: int | None = None
        """The latest signal that was deferred."""

    def __enter__(self) -> Self:
        for number in self._numbers:
            previous = signal.getsignal(number)
            if previous not in (signal.SIG_IGN, None):
                self._previous[number] = previous
                signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        if self.received is None:
            self._put_back()
        else:  # received during the last checkpoint, or before an error
            self._act(self.received)

    def deliver(self, number: int) -> None:
        """Do what a signal, received here or on another rank, does without this object."""
        self._act(number)
        self.__enter__()  # unless the program's own handler has ended training

    def _act(self, number: int) -> None:
        self.received = None
        previous = self._previous.get(number, signal.SIG_DFL)
        self._put_back()
        if previous is signal.SIG_DFL:
            raise SystemExit(128 + number)  # so that `finally` blocks and exit handlers run
        signal.raise_signal(number)

    def _put_back(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received = number
        signal.signal(number, self._previous[number])
