"""A function's result from a fresh process, whose memory is as no build before it has left it."""

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from fastamp.bench.tasks import BrokenTask

T = TypeVar("T")


def run_apart(work: Callable[..., T], *args: Any) -> T:
    """Call a function in a fresh process, and return what it returns.

    Raises:
        BrokenTask: the task is broken, or the process was killed, or has printed its traceback.
    """
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,))
    process.start()
    theirs.close()  # so that the end of the process ends the wait
    try:
        # Not by the start, which would wait for ever for a process that dies before it reads.
        ours.send((work, args))
        found: Any = ours.recv()
    except (EOFError, ConnectionError):
        process.join()
        ended = f"a process of the bench has ended with status {process.exitcode}"
        msg = f"{ended}: its traceback is above, or a step does not fit into memory, or crashes"
        raise BrokenTask(msg) from None
    except BaseException:  # such as an interrupt
        process.terminate()
        raise
    finally:
        process.join()
    if isinstance(found, BrokenTask):
        raise found
    return found  # type: ignore[no-any-return]


def _serve(pipe: "Connection[Any, Any]") -> None:
    """Send the result, or what is wrong with the task; fails, and ends, if the bench is gone."""
    work, args = pipe.recv()
    try:
        pipe.send(work(*args))
    except BrokenTask as error:
        pipe.send(error)
