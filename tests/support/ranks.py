"""Processes as the ranks of a job: they are started once and run function after function."""

from __future__ import annotations

import contextlib
import gc
import pickle
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from support.processes import CONTEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

COLLECTIVE_S = 120.0  # after which a rank gives up waiting for the others
CALL_S = 300.0  # after which the ranks are killed


def _serve(connection: Connection) -> None:
    """Run each function that comes in a process group of its own, until the connection closes."""
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            function, args, rank, count, path = connection.recv()
            # Training collects garbage, which takes 0.1 s where it looks through all modules.
            gc.collect()
            gc.freeze()
            try:
                with joined(rank, count, path):
                    answer = (True, function(*args))
            except Exception:  # noqa: BLE001 - the test raises it
                answer = (False, traceback.format_exc())
            connection.send_bytes(pickle.dumps(answer))  # send() would share each tensor's memory


@contextlib.contextmanager
def joined(rank: int, count: int, path: str) -> Iterator[None]:
    """Join a new process group as a rank, for a while."""
    timeout = timedelta(seconds=COLLECTIVE_S)
    store = dist.FileStore(path, count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timeout)
    try:
        # A rank that is done must not close its sockets while another one still connects.
        dist.barrier()
        yield
    finally:
        if torch.__version__ < (2, 10):
            # There a group waits for its threads with the GIL held, which they need once more when
            # a collective has just ended: give them time.
            time.sleep(0.02)
        dist.destroy_process_group()


class Ranks:
    """Ranks in processes of their own, which end when nobody is connected any more."""

    def __init__(self, count: int) -> None:
        pipes = [CONTEXT.Pipe() for _ in range(count)]
        self._connections, theirs = ([*ends] for ends in zip(*pipes, strict=True))
        self._processes = [
            CONTEXT.Process(target=_serve, args=(each,), daemon=True) for each in theirs
        ]
        for process in self._processes:
            process.start()
        for each in theirs:
            each.close()

    def run(self, count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call the function on the first `count` ranks and return what each returned."""
        chosen = self._connections[:count]
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "store"))
            for rank, connection in enumerate(chosen):
                connection.send((function, args, rank, count, path))
            end_s = time.monotonic() + CALL_S
            answers = []
            for connection in chosen:
                if not connection.poll(max(0.0, end_s - time.monotonic())):
                    self.kill()
                    message = f"{function.__name__} did not end on rank {len(answers)}"
                    raise TimeoutError(message)
                answers.append(pickle.loads(connection.recv_bytes()))
        failures = [f"rank {i}: {text}" for i, (ok, text) in enumerate(answers) if not ok]
        if failures:
            raise AssertionError("\n".join(failures))
        return [result for _, result in answers]

    def kill(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()


@contextlib.contextmanager
def start(count: int) -> Iterator[Ranks]:
    """Start ranks, and leave no process behind."""
    ranks = Ranks(count)
    try:
        yield ranks
    finally:
        ranks.kill()
