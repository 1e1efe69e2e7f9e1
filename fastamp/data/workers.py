"""Threads that do a loader's tasks, and `get_worker_info`, which says which one runs."""

import contextlib
import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch
from torch.utils.data import get_worker_info as torch_worker_info

from fastamp.data.own_threads import join, live, start

Task: TypeAlias = Callable[[BaseException | None], bool]


@dataclass(frozen=True)
class WorkerInfo:
    """What `get_worker_info` returns in a thread; in a process torch's own, with the same fields.

    Example:
        >>> def fetch(index):
        ...     info = fastamp.get_worker_info()
        ...     return "the main thread" if info is None else f"worker {info.id}"
        >>> fetch(0)
        'the main thread'
    """

    id: int
    """From 0 to `num_workers - 1`."""
    num_workers: int
    seed: int
    """The pass's base seed plus the id, as in torch's workers; nothing is seeded with it."""
    dataset: Any
    """The loader's dataset."""
    rng: None = None
    """As in torch's workers; `fastamp.sample_rng()` has generators."""
    worker_method: str = "thread"
    """As in torch 2.13, where it is "multiprocessing"."""


class _Own(threading.local):
    info: WorkerInfo | None = None


_own = _Own()


def get_worker_info() -> Any:
    """Return the id, num_workers, seed and dataset of the worker that runs this; None elsewhere.

    As torch's function, which knows processes only, and returns None in threads.

    Example:
        >>> class Worker(torch.utils.data.Dataset):
        ...     def __len__(self):
        ...         return 4
        ...
        ...     def __getitem__(self, index):
        ...         return fastamp.get_worker_info().num_workers
        >>> next(iter(fastamp.DataLoader(Worker(), 4, num_workers=2, worker="thread")))
        tensor([2, 2, 2, 2])
        >>> print(fastamp.get_worker_info())  # outside of workers
        None
    """
    return torch_worker_info() if _own.info is None else _own.info


def become_worker(info: WorkerInfo, init_fn: Callable[[int], None] | None) -> None:
    """Make the current thread a worker, in which torch computes on one thread, as in processes."""
    _own.info = info
    torch.get_num_threads()  # torch sets OpenMP up for this thread now
    with contextlib.suppress(AttributeError, OSError):  # where torch computes without OpenMP
        ctypes.CDLL(None).omp_set_num_threads(1)  # for this thread alone
    if init_fn is None:
        return
    try:
        init_fn(info.id)
    except AttributeError as error:
        if "NoneType" not in str(error):
            raise
        msg = f"worker_init_fn: {error}; in a thread torch's get_worker_info() is None: "
        raise AttributeError(msg + "call fastamp.get_worker_info(), which knows both") from error


class Team:
    """Threads that do tasks in the order in which they were submitted.

    A task is called with the error that `init_fn` has raised in the thread, or None, and returns
    whether it handed the error on. The threads end when the team is closed or dropped.
    """

    def __init__(self, infos: list[WorkerInfo], init_fn: Callable[[int], None] | None) -> None:
        self._tasks: SimpleQueue[Any] = SimpleQueue()
        # Put into the queue when the team dies, by no Python code, which Ctrl-C could interrupt.
        self._ended = weakref.ref(self, self._tasks.put)
        self.infos, self._owner_pid = infos, os.getpid()
        # The threads hold no reference to the team.
        self._threads = [
            threading.Thread(
                target=_serve,
                args=(self._tasks, info, init_fn, self._ended),
                name=f"fastamp worker {info.id}",
                daemon=True,
            )
            for info in infos
        ]
        live.add(self)
        start(*self._threads)

    @property
    def is_here(self) -> bool:
        """Whether the threads are those of this process, which may be a child."""
        return self._owner_pid == os.getpid()

    def submit(self, task: Task, count: int) -> None:
        """Let `count` threads call the task, after all tasks submitted before it."""
        for _ in range(count):
            self._tasks.put(task)

    def close(self) -> None:
        """End the threads when they have called all tasks."""
        threads, self._threads = self._threads, []  # a second call does nothing
        if not threads or not self.is_here:
            return
        self._tasks.put(self._ended)
        # While the interpreter ends, no other thread runs.
        if threading.current_thread() in threads or sys.is_finalizing():
            return
        for thread in threads:
            join(thread)
        # Python's threads have ended, but the system's may still clean up. A process forked now, as
        # torch's workers are, would wait forever for a lock that such a thread holds: MKL has one.
        own = [Path(f"/proc/self/task/{thread.native_id}") for thread in threads]
        deadline_s = time.monotonic() + 1.0
        while any(path.exists() for path in own) and time.monotonic() < deadline_s:
            time.sleep(1e-4)

    __del__ = close


def _serve(
    tasks: SimpleQueue[Any],
    info: WorkerInfo,
    init_fn: Callable[[int], None] | None,
    ended: "weakref.ref[Team]",
) -> None:
    failed: BaseException | None = None
    try:
        become_worker(info, init_fn)
    except BaseException as error:  # noqa: BLE001 - raised where the consumer is
        failed = error
    while (task := tasks.get()) is not ended:
        if task(failed):  # whose traceback leads to the consumer from now on
            failed = RuntimeError(f"worker_init_fn has failed in thread worker {info.id}")
        del task  # held no longer than the consumer holds it
    tasks.put(ended)  # for the next thread
