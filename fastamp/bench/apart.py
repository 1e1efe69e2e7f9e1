"""A function's result from a fresh process, whose memory is as no build before it has left it."""

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, TypeVar

from fastamp.bench.tasks import BrokenTask

P = ParamSpec("P")
T = TypeVar("T")


def run_apart(work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Call a function in a fresh process, and return what it returns.

    Raises:
        BrokenTask: the task is broken, or the process was killed.
        ChildProcessError: another error ended the process, which has printed its traceback.
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, work, args, options))
    process.start()
    sender.close()  # so that the end of the process ends the wait
    try:
        found: Any = receiver.recv()
    except EOFError:
        process.join()
        if process.exitcode == 1:
            msg = "a process of the bench has failed: its traceback is above"
            raise ChildProcessError(msg) from None
        killed = f"a process of the bench was killed, with status {process.exitcode}"
        msg = f"batch_size: a step does not fit into memory, or the model crashes: {killed}"
        raise BrokenTask(msg) from None
    except BaseException:  # such as an interrupt
        process.terminate()
        raise
    finally:
        process.join()
    if isinstance(found, BrokenTask):
        raise found
    return found  # type: ignore[no-any-return]


def _send(
    sender: "Connection[Any, Any]", work: Callable[..., Any], args: Any, options: Any
) -> None:
    """Send the result, or what is wrong with the task; fails, and ends, if the bench is gone."""
    try:
        sender.send(work(*args, **options))
    except BrokenTask as error:
        sender.send(error)
