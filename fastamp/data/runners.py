"""Who makes the batches of a pass: the loop's thread, other threads, or torch's processes."""

import contextlib
import copy
import ctypes
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle, islice
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils.data import Dataset
from torch.utils.data import get_worker_info as torch_worker_info

from fastamp.data.items import Made, Make, attempt


class _Own(threading.local):
    info: SimpleNamespace | None = None


_own = _Own()


def get_worker_info() -> Any:
    """Return the id, num_workers, seed and dataset of the worker that runs this; None elsewhere.

    In threads, which torch's function does not know, nothing is seeded with the seed.

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


def here(make: Make, jobs: Iterator[Any]) -> Iterator[Made]:
    """Make each batch when it is asked for."""
    for job in jobs:
        yield attempt(make, job)


def in_threads(
    count: int, name: str, begin: Callable[[int], Make], jobs: Iterator[Any], *, ahead: int
) -> Iterator[Made]:
    """Yield the batches that threads make in turn, in order, so many of them ahead.

    Each thread first calls `begin` with its number, which returns what makes its batches: one
    thread after the other, while the loop waits. The threads end with this generator.
    """
    pools = [ThreadPoolExecutor(1, f"{name}_{number}") for number in range(count)]
    is_finalizing = sys.is_finalizing  # modules may be gone before this generator
    try:
        makes = [pool.submit(begin, number).result() for number, pool in enumerate(pools)]
        turns = cycle(zip(pools, makes, strict=True))

        def submit(job: Any) -> Future[Made]:
            pool, make = next(turns)
            return pool.submit(make, *job)

        under_way = deque(map(submit, islice(jobs, ahead)))
        while under_way:
            under_way.extend(map(submit, islice(jobs, 1)))
            yield _wait(under_way.popleft())
    finally:
        if not is_finalizing():  # else the threads have ended
            for pool in pools:
                pool.shutdown(wait=False, cancel_futures=True)
            for pool in pools:
                with contextlib.suppress(RuntimeError):  # collected as garbage in this very thread
                    pool.shutdown()


def _wait(future: Future[Made]) -> Made:
    error = future.exception()  # `result` would raise it, and its traceback keep the threads alive
    return future.result() if error is None else Made(error=error)


def become_worker(info: SimpleNamespace, worker_init_fn: Callable[[int], None] | None) -> None:
    """Make the current thread a worker, in which torch computes on one thread, as in processes."""
    _own.info = info
    torch.get_num_threads()  # torch sets OpenMP up for this thread now
    with contextlib.suppress(AttributeError, OSError):  # where torch computes without OpenMP
        ctypes.CDLL(None).omp_set_num_threads(1)  # for this thread alone
    if worker_init_fn is not None:
        worker_init_fn(info.id)


def own_copy(dataset: Any, known: dict[int, Any] | None = None) -> Any:
    """Return a thread's copy of a dataset: what it opens later is its own, what it holds is shared.

    Datasets in its attributes, as in Subset and ConcatDataset, are copied in the same way.
    """
    known = {} if known is None else known
    is_plain = not hasattr(dataset, "__dict__") or isinstance(dataset, torch.Tensor | ModuleType)
    if id(dataset) in known or is_plain or isinstance(dataset, type):
        return known.get(id(dataset), dataset)
    try:
        made = known[id(dataset)] = copy.copy(dataset)
    except TypeError:  # it cannot be copied
        return dataset
    for name, value in vars(made).items():
        if isinstance(value, Dataset):
            vars(made)[name] = own_copy(value, known)
        elif type(value) in (list, tuple) and isinstance(next(iter(value), None), Dataset):
            vars(made)[name] = type(value)(own_copy(each, known) for each in value)
    return made
