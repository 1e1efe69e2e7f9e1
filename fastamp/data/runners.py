"""Who makes the batches of a pass: the loop's thread, other threads, or torch's processes."""

import contextlib
import copy
import ctypes
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from queue import Empty, SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils.data import Dataset
from torch.utils.data import get_worker_info as torch_worker_info

from fastamp.data.items import Failed, Items, Made, Make, attempt, is_end, reraise
from fastamp.data.sample_rng import Order


class _Own(threading.local):
    info: SimpleNamespace | None = None
    items: Items | None = None


_own = _Own()


def get_worker_info() -> Any:
    """Return the id, num_workers, seed and dataset of the worker that runs this; None elsewhere.

    As torch's function, which knows processes only, and returns None in threads. There the dataset
    is the thread's shallow copy, and nothing is seeded with the seed.

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


def here(make: Make, jobs: Iterator[Any]) -> Iterator[Made | Failed]:
    """Make each batch when it is asked for."""
    for job in jobs:
        yield attempt(make, job)


class Threads:
    """Threads that make batches in turn, and end with this object.

    Ctrl-C interrupts the loop's thread anywhere. Between taking a lock of Python's `threading` and
    the block that gives it back, the lock stays taken, and the threads of `concurrent.futures` wait
    for it forever. So a pass that goes on only uses queues, which are written in C.
    """

    def __init__(self, count: int, name: str, begin: Callable[[int], object] = int) -> None:
        """Start the threads. Each calls `begin` with its number, one after the other."""
        queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(count)]
        threads = [
            threading.Thread(
                target=_serve,
                args=(queue, weakref.ref(self, queue.put)),
                name=f"{name}_{n}",
                daemon=True,
            )
            for n, queue in enumerate(queues)
        ]
        self._turns = cycle(queues)
        weakref.finalize(self, _end, queues, threads)
        for number, thread in enumerate(threads):
            thread.start()
            begun = [self.submit(begin, (number,)).get()]
            if type(begun[0]) is Failed:
                reraise(begun.pop().error)  # which no frame holds

    def submit(self, make: Any, job: Any) -> "SimpleQueue[Any]":
        """Let the next thread make a batch; return the queue that it will be in."""
        reply: SimpleQueue[Any] = SimpleQueue()
        next(self._turns).put((reply, make, job))
        return reply


def _serve(queue: "SimpleQueue[Any]", _owner: Any) -> None:
    """Make batches until `_end` puts None; if Ctrl-C interrupts it, until the dead reference."""
    while type(job := queue.get()) is tuple:
        reply, make, arguments = job
        try:
            reply.put(make(*arguments))
        except BaseException as error:  # noqa: BLE001 - raised in the loop: also SystemExit
            reply.put(Failed(error))
        del job, reply, make, arguments


def _end(queues: "list[SimpleQueue[Any]]", threads: list[threading.Thread]) -> None:
    """Drop the jobs that no thread has begun, and end the threads."""
    for queue in queues:
        with contextlib.suppress(Empty):
            while True:
                queue.get_nowait()
        queue.put(None)
    for thread in threads:
        with contextlib.suppress(RuntimeError):  # Ctrl-C has kept it from starting
            thread.join()


def in_threads(
    threads: Threads, make: Callable[..., Any], jobs: Iterator[Any], *, ahead: int
) -> Iterator[Made | Failed]:
    """Let threads make batches, in order, so many ahead of the loop; they end with the pass.

    The first ones are under way when this returns.
    """
    under_way = deque(threads.submit(make, job) for job in islice(jobs, ahead))
    return _in_order(threads, under_way, make, jobs)


def _in_order(
    threads: Threads, under_way: deque[Any], make: Any, jobs: Iterator[Any]
) -> Iterator[Made | Failed]:
    while under_way:
        made = [under_way.popleft().get()]
        if is_end(made[0]):
            return
        under_way.extend(threads.submit(make, job) for job in islice(jobs, 1))
        yield made.pop()  # which no frame holds


def become_worker(
    info: SimpleNamespace, items: Items, worker_init_fn: Callable[[int], None] | None
) -> None:
    """Make the current thread a worker, in which torch computes on one thread, as in processes."""
    _own.info, _own.items = info, items
    torch.get_num_threads()  # torch sets OpenMP up for this thread now
    with contextlib.suppress(AttributeError, OSError):  # where torch computes without OpenMP
        ctypes.CDLL(None).omp_set_num_threads(1)  # for this thread alone
    if worker_init_fn is not None:
        worker_init_fn(info.id)


def make_in_worker(grad: bool, rows: Any, order: Order, number: int) -> Made:  # noqa: FBT001
    """Return the batch that this thread's items make; `grad` is the loop's mode."""
    torch.set_grad_enabled(grad)
    start_s, items = time.thread_time(), _own.items
    assert items is not None  # noqa: S101 - see become_worker
    made = items.make(rows, order, number)
    return made._replace(cpu_s=time.thread_time() - start_s)


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
