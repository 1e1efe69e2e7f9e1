"""Threads that do a loader's tasks, and what each of them knows of itself."""

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch
from torch.utils.data import get_worker_info as torch_worker_info

from fastamp.data.prefetch import JOIN_S, live

Task: TypeAlias = Callable[[BaseException | None], bool]


@dataclass(frozen=True)
class WorkerInfo:
    """What `get_worker_info` returns in a thread; in a process it is torch's, with the same."""

    id: int
    """From 0 to `num_workers - 1`."""
    num_workers: int
    seed: int
    """The pass's base seed and the id, as in torch's workers; nothing is seeded with it."""
    dataset: Any
    """The loader's dataset; an iterable one is copied for each worker."""


class _Own(threading.local):
    info: WorkerInfo | None = None


_own = _Own()


def get_worker_info() -> Any:
    """Return the id, num_workers, seed and dataset of the worker that runs this; None elsewhere.

    As torch's function, which knows processes only, and returns None in threads.
    """
    return torch_worker_info() if _own.info is None else _own.info


def become_worker(info: WorkerInfo, init_fn: Callable[[int], None] | None) -> None:
    """Make the current thread a worker, in which torch computes on one thread, as in processes."""
    _own.info = info
    torch.get_num_threads()  # torch sets OpenMP up for this thread now
    with contextlib.suppress(AttributeError, OSError):  # where torch computes without OpenMP
        ctypes.CDLL(None).omp_set_num_threads(1)  # for this thread alone
    if init_fn is not None:
        init_fn(info.id)


class Team:
    """A number of threads that do tasks in the order in which they were put in.

    A task is called with the error that `init_fn` has raised in the thread, or None, and returns
    whether it handed that on. The threads end when the team is closed or forgotten.
    """

    def __init__(self, infos: list[WorkerInfo], init_fn: Callable[[int], None] | None) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._owner_pid = os.getpid()
        self._threads: list[threading.Thread] = []
        live.add(self)
        for info in infos:
            arguments = (self._tasks, info, init_fn)  # and no reference to the team
            name = f"fastamp worker {info.id}"
            thread = threading.Thread(target=_serve, args=arguments, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    @property
    def is_here(self) -> bool:
        """Whether the threads are those of this process, which may be a child."""
        return self._owner_pid == os.getpid()

    def submit(self, task: Task, count: int) -> None:
        """Let so many threads call the task, as soon as they have called what came before."""
        for _ in range(count):
            self._tasks.put(task)

    def close(self) -> None:
        """End the threads when they have called all tasks."""
        if not self.is_here:
            return
        self._tasks.put(None)
        # While the interpreter ends, no other thread runs.
        if threading.current_thread() in self._threads or sys.is_finalizing():
            return
        for thread in self._threads:
            thread.join(JOIN_S)

    __del__ = close


def _serve(
    tasks: SimpleQueue[Task | None],
    info: WorkerInfo,
    init_fn: Callable[[int], None] | None,
) -> None:
    failed: BaseException | None = None
    try:
        become_worker(info, init_fn)
    except BaseException as error:  # noqa: BLE001 - raised where the consumer is
        failed = error
    while (task := tasks.get()) is not None:
        if task(failed):  # whose traceback leads to the consumer from now on
            failed = RuntimeError(f"worker_init_fn has failed in thread worker {info.id}")
        del task  # held no longer than the consumer holds it
    tasks.put(None)  # for the next thread
