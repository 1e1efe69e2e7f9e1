"""Who makes the batches of a pass: the loop's thread, other threads, or torch's processes."""

import _thread
import contextlib
import copy
import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from queue import Empty, SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils.data import Dataset
from torch.utils.data import get_worker_info as torch_worker_info

from fastamp.data.items import Made, Make, attempt, is_end, reraise


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


class InThreads(Iterator[Made]):
    """Batches that threads make in turn, delivered in order. The threads end with this object.

    Ctrl-C may interrupt the loop's thread between taking a lock of `threading` and giving it back,
    and the threads of `concurrent.futures` then wait forever. So it only uses queues, written in C.
    """

    def __init__(
        self, count: int, name: str, begin: Callable[[int], Any], jobs: Iterator[Any], *, ahead: int
    ) -> None:
        """Start the threads, one after the other, and let them begin so many batches.

        Each calls `begin` with its number, which returns what makes the batch of a job there.
        """
        queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(count)]
        threads: list[threading.Thread] = []
        begun: SimpleQueue[Any] = SimpleQueue()
        self._jobs, self._turns = jobs, cycle(queues)
        self._under_way: deque[SimpleQueue[Any]] = deque()
        self._end = weakref.finalize(self, _end, queues, threads)
        for number, queue in enumerate(queues):
            arguments = (queue, weakref.ref(self, queue.put), partial(begin, number), begun)
            threads.append(
                threading.Thread(
                    target=_serve, args=arguments, name=f"{name}_{number}", daemon=True
                )
            )
            start_apart(threads[-1], begun)
            found = [begun.get()]
            if found[0] is not None:
                reraise(found.pop().error)  # which no frame holds
        self._submit(ahead)

    def _submit(self, count: int) -> None:
        for job in islice(self._jobs, count):
            self._under_way.append(SimpleQueue())
            next(self._turns).put((self._under_way[-1], job))

    def __next__(self) -> Made:
        self._submit(1)
        made = [self._under_way.popleft().get()] if self._under_way else []
        if not made or is_end(made[0]):
            self._under_way.clear()
            self._end()
            raise StopIteration
        batch: Made = made.pop()
        return batch


def start_apart(thread: threading.Thread, begun: Any) -> None:
    """Start a thread in another one: `Thread.start` takes locks. If it does not start, say so."""

    def start() -> None:
        try:
            thread.start()
        except RuntimeError as error:
            begun.put(Made(error=error))

    _thread.start_new_thread(start, ())


def _serve(queue: Any, _owner: Any, begin: Callable[[], Any], begun: Any) -> None:
    """Make batches until `_end` puts None; if Ctrl-C interrupts it, until the dead reference."""
    try:
        make = begin()
        begun.put(None)
    except BaseException as error:  # noqa: BLE001 - raised in the loop: also SystemExit
        begun.put(Made(error=error))
        return
    del begin, begun
    while type(job := queue.get()) is tuple:
        reply, arguments = job
        try:
            reply.put(make(*arguments))
        except BaseException as error:  # noqa: BLE001
            reply.put(Made(error=error))
        del job, reply, arguments


def _end(queues: "list[SimpleQueue[Any]]", threads: list[threading.Thread]) -> None:
    """Drop the jobs that no thread has begun, and end the threads."""
    for queue in queues:
        try:
            with contextlib.suppress(Empty):
                while True:
                    queue.get_nowait()
        finally:  # Ctrl-C may interrupt this: the dead reference may be among what was dropped
            queue.put(None)
    for thread in threads:
        with contextlib.suppress(RuntimeError):  # Ctrl-C has kept it from starting
            thread.join()


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
