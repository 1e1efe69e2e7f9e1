"""Batches that Python makes item by item, here, in a thread or in a worker process."""

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import islice, repeat
from typing import Any, NamedTuple

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import Dataset, Subset
from torch.utils.data import get_worker_info as torch_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from fastamp.data.position import Position
from fastamp.data.sample_rng import Batch, Order

Collate = Callable[[Any], Any]


class Made(NamedTuple):
    """A batch, and the seconds that it took; or its error."""

    batch: Any = None
    getitem_s: float = 0.0
    collate_s: float = 0.0
    copy_s: float = 0.0
    error: Any = None
    """Raised where the batch is taken: an exception, or torch's wrapper of one from a worker."""


Make = Callable[..., Made]
"""Makes the batch of some rows, with the keys of its samples and the number of the first one."""


def attempt(make: Make, job: tuple[Any, ...]) -> Made:
    """Make a batch; return its error if it has one."""
    try:
        return make(*job)
    except Exception as error:  # noqa: BLE001 - raised where the batch would be taken
        return Made(error=error)


def reraise(error: Any) -> None:
    """Raise the error of a batch."""
    if not isinstance(error, BaseException):
        try:
            error.reraise()  # torch's wrapper: its frame refers to the error, and to the workers
        except Exception as raised:  # noqa: BLE001 - raised below
            error = raised.with_traceback(None)
    try:
        raise error
    finally:
        del error  # whose traceback refers to this frame


def is_batch(made: Made) -> bool:
    """Say whether this is a batch, or its error, and not the end of what makes them."""
    return not isinstance(made.error, StopIteration)


def change(function: Callable[[Any], Any], made: Made) -> Made:
    """Return a batch as a function returns it, or its error; an error stays what it is."""
    if made.error is not None:
        return made
    return attempt(lambda: made._replace(batch=function(made.batch)), ())


def find_together(dataset: Any) -> Callable[[list[Any]], Any] | None:
    """Return a dataset's `__getitems__`; not a Subset's that only calls `__getitem__` in a loop."""
    inner = dataset
    while type(inner) is Subset:
        inner = inner.dataset
    return getattr(inner, "__getitems__", None) and dataset.__getitems__


class Items:
    """Makes batches of a map-style dataset: items, and a collate function."""

    def __init__(
        self, dataset: Any, collate_fn: Collate, *, single: bool, pins: bool = False
    ) -> None:
        self.dataset, self.collate_fn, self._single, self._pins = dataset, collate_fn, single, pins
        self._together = None if single else find_together(dataset)

    def make(self, rows: Any, order: Order, number: int) -> Made:
        """Return the batch of some rows. The error of an item names its index."""
        start_s, index = time.perf_counter(), rows
        with Batch(order, number) as cell:
            try:
                if self._single:
                    samples = self.dataset[rows]
                elif self._together is not None:
                    samples = self._together(index := as_list(rows))
                else:
                    samples = cell.samples = []
                    dataset, append = self.dataset, samples.append
                    for index in as_list(rows):
                        append(dataset[index])
            except Exception as error:
                if rows is not None and hasattr(error, "add_note"):  # Python 3.11
                    error.add_note(f"fastamp.DataLoader: raised by dataset[{index}]")
                raise
            made_s = time.perf_counter()
            cell.number, cell.samples = ~number, ()
            batch = self.collate_fn(samples)
            end_s = time.perf_counter()
        if self._pins:
            batch = pin_memory(batch)  # type: ignore[no-untyped-call]
        return Made(batch, made_s - start_s, end_s - made_s)


def as_list(rows: Any) -> Any:
    """Return the indices of a computed order as integers; a sampler's as they are."""
    if type(rows) is torch.Tensor:
        return rows.tolist()
    return [*rows] if type(rows) is range else rows


class WorkerJobs:
    """What stands in the sampler's place in torch's loader: batches with their places."""

    def __init__(self, jobs: Iterator[Any]) -> None:
        self.jobs = jobs

    def __iter__(self) -> Iterator[Any]:
        return ((as_list(rows), order, number) for rows, order, number in self.jobs)


class WorkerItems(Dataset[Any]):
    """What stands in the dataset's place in torch's worker processes: it returns whole batches."""

    def __init__(self, items: Items, worker_init_fn: Callable[[int], None] | None) -> None:
        self._items, self._worker_init_fn = items, worker_init_fn

    def __getitem__(self, job: tuple[Any, Order, int]) -> Made:
        try:
            return self._items.make(*job)
        except Exception:  # noqa: BLE001 - raised where the batch would be taken
            info = torch_worker_info()
            where = f"in DataLoader worker process {info and info.id}"
            return Made(error=ExceptionWrapper(where=where))  # type: ignore[no-untyped-call]

    def init_worker(self, worker_id: int) -> None:
        """Prepare a worker process for the user's code, which sees the user's dataset."""
        # Without it a garbage collection of all that was made before the fork takes 100 ms, in
        # every worker.
        gc.freeze()
        info = torch_worker_info()
        object.__setattr__(info, "dataset", self._items.dataset)  # a frozen dataclass
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)


class StreamItems:
    """What stands in an iterable dataset's place: the next samples, whatever the rows."""

    def __init__(self, loader: Any, iterator: Iterator[Any], position: Position) -> None:
        self._loader, self._position, self._batches = loader, position, 0
        self._samples = map(next, repeat(iterator))  # islice would call the iterator's `__iter__`
        self._length = loader._IterableDataset_len_called

    def __getitem__(self, _row: object) -> Any:
        sample = next(self._samples)
        self._count()
        return sample

    def __getitems__(self, _rows: object) -> list[Any]:
        size = self._loader.batch_size
        samples = [*islice(self._samples, size)]
        if len(samples) < size:
            self._samples, self._position.is_read_out = map(next, ()), True
            if self._loader.drop_last or not samples:
                raise StopIteration
        self._count()
        return samples

    def _count(self) -> None:
        """Count a batch; warn as torch where the dataset is longer than its length."""
        self._batches += 1
        if self._length is not None and self._batches > self._length:
            name, ending = self._loader.dataset, "(when accessing len(dataloader)), but "
            msg = f"Length of IterableDataset {name} was reported to be {self._length}{ending}"
            warnings.warn(f"{msg}{self._batches} samples have been fetched. ", stacklevel=2)
