"""Batches that Python makes item by item, in the loop's thread or in a worker process."""

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils.data import Dataset, Subset
from torch.utils.data import get_worker_info as torch_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from fastamp.data.sample_rng import Batch, Order, Placed, current
from fastamp.data.stats import LoaderStats

Collate = Callable[[Any], Any]
Make = Callable[[Tensor, Tensor], Any]


class Failed(NamedTuple):
    """In place of a batch: an error on its way through torch's iterator."""

    error: Any
    """An exception, or torch's wrapper of one from a worker process."""


def find_together(dataset: Any) -> Callable[[list[Any]], Any] | None:
    """Return a dataset's `__getitems__`; not a Subset's that only calls `__getitem__` in a loop."""
    inner = dataset
    while type(inner) is Subset:
        inner = inner.dataset
    return getattr(inner, "__getitems__", None) and dataset.__getitems__


def note_index(
    error: BaseException, index: Any, reader: str = "fastamp.DataLoader"
) -> BaseException:
    """Add to an error which item has raised it."""
    if isinstance(error, Exception) and hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"{reader}: raised by dataset[{index}]")
    return error


def make_rows(make: Make, rows: list[int]) -> Any:
    """Return the batch that a source makes of rows, with the keys of their samples."""
    cell: Any = current.sample
    keys = cell.order.find_keys(cell.number, len(rows))
    return make(torch.tensor(rows, dtype=torch.int64, device="cpu"), keys)


class Items(Dataset[Any]):
    """A dataset whose batches are made at one go, and timed.

    For torch's iterators it takes the place of the dataset, and returns whole batches: their
    collate function has nothing to do.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Collate,
        make: Make | None,
        *,
        single: bool,
        worker_init_fn: Callable[[int], None] | None = None,
        times: Tensor | None = None,
    ) -> None:
        """Take a dataset; `times` are seconds of each worker, (num_workers, 2), shared."""
        self.dataset, self.collate_fn, self._make, self._single = dataset, collate_fn, make, single
        self._together = None if single else find_together(dataset)
        self._worker_init_fn, self._times = worker_init_fn, times
        self._tell: Any = np.zeros(2) if times is None else times[0].numpy()
        self.getitem_s = self.collate_s = 0.0

    def make(self, rows: Any, cell: Batch, number: int) -> Any:
        """Return the batch of some rows, whose first sample has a number in the pass.

        Random numbers come from `cell`. The error of an item names its index.
        """
        start_s, before = time.perf_counter(), current.sample
        current.sample, cell.number, index = cell, number, rows
        try:
            if self._make is not None:
                return make_rows(self._make, rows)
            if self._together is not None:
                samples = self._together(rows)
            elif self._single:
                samples = self.dataset[rows]
            else:
                samples, dataset = [], self.dataset
                for cell.number, index in enumerate(rows, number):
                    samples.append(dataset[index])
        except Exception as error:
            note_index(error, index)
            raise
        finally:
            end_s = time.perf_counter()
            self.getitem_s += end_s - start_s
            current.sample = before
        current.sample, cell.number = cell, ~number
        try:
            return self.collate_fn(samples)
        finally:
            self.collate_s += time.perf_counter() - end_s
            current.sample = before

    def __getitems__(self, placed: Placed) -> Any:
        """Return the batch that a sampler has placed, or its error, to torch's iterator."""
        (rows, order, number), info = placed, torch_worker_info()
        try:
            batch = self.make(rows, Batch(order), number)
        except StopIteration:
            raise
        except Exception as error:  # noqa: BLE001 - raised where the batch would come
            where = f"in DataLoader worker process {info and info.id}"
            batch = Failed(ExceptionWrapper(where=where) if info else error)  # type: ignore[no-untyped-call]
        self._tell += self.getitem_s, self.collate_s
        self.getitem_s = self.collate_s = 0.0
        return batch

    __getitem__ = __getitems__

    def init_worker(self, worker_id: int) -> None:
        """Let the user's code in a worker see the user's dataset."""
        begin_worker(self.dataset, worker_id, self._worker_init_fn)
        if self._times is not None:
            self._tell = self._times[worker_id].numpy()


def begin_worker(
    dataset: Any, worker_id: int, worker_init_fn: Callable[[int], None] | None
) -> None:
    """Prepare a worker process for the user's code."""
    # Without it a garbage collection of all that was made before the fork takes 100 ms, in every
    # worker.
    gc.freeze()
    object.__setattr__(torch_worker_info(), "dataset", dataset)  # a frozen dataclass
    if worker_init_fn is not None:
        worker_init_fn(worker_id)


def hand_on(batch: Any) -> Any:
    """Return a batch that is made already."""
    return batch


class CallerBatches(Iterator[Any]):
    """The batches of a pass, each made in the thread that asks for it."""

    def __init__(
        self,
        batches: Iterator[tuple[Any, int]],
        order: Order,
        items: Items,
        stats: LoaderStats,
        *,
        pins: bool,
    ) -> None:
        """`batches` are rows, with the number of the first sample."""
        self._batches, self._cell, self._items = batches, Batch(order), items
        self._stats, self._pins = stats, pins

    def __next__(self) -> Any:
        rows, number = next(self._batches)
        items, stats = self._items, self._stats
        try:
            batch = items.make(rows, self._cell, number)
        finally:
            stats.getitem_s += items.getitem_s
            stats.collate_s += items.collate_s
            items.getitem_s = items.collate_s = 0.0
        return pin_memory(batch) if self._pins else batch  # type: ignore[no-untyped-call]
