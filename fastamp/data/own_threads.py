"""Starts and ends the library's threads, also when Ctrl-C comes in between."""

import _thread
import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

live: "weakref.WeakSet[Any]" = weakref.WeakSet()  # owners of threads; each has `close`
_JOIN_S = 2.0  # a thread that hangs in the user's code is left behind, as a daemon


def start(*threads: threading.Thread) -> None:
    """Start threads from a helper thread, which Ctrl-C never interrupts.

    `Thread.start` waits for the new thread on a condition. Ctrl-C may interrupt the wait with the
    condition's lock held; the new thread would wait for the lock forever, and keep its memory.

    Raises:
        RuntimeError: the system has no more threads.
    """
    began: SimpleQueue[Exception | None] = SimpleQueue()
    _thread.start_new_thread(_start, (threads, began.put))
    error = began.get()
    if error is not None:
        raise error


def _start(threads: tuple[threading.Thread, ...], tell: Callable[[Exception | None], None]) -> None:
    try:
        for thread in threads:
            thread.start()
    except Exception as error:  # noqa: BLE001 - raised where threads are asked for
        tell(error)
    else:
        tell(None)


def join(thread: threading.Thread) -> None:
    """Wait for a thread's end; return at once if Ctrl-C kept it from starting."""
    with contextlib.suppress(RuntimeError):
        thread.join(_JOIN_S)


@atexit.register
def _close_live() -> None:
    """End all passes before the interpreter does, which aborts if a thread still computes."""
    for owner in list(live):
        owner.close()
