"""Batches that Python makes item by item: in the loop's thread, or in torch's worker processes."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils.data import Dataset, IterableDataset, Subset
from torch.utils.data import get_worker_info as torch_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from fastamp.data.position import find_save, mark_undelivered
from fastamp.data.sample_rng import Batch, Order, Placed, current, find_pass_key
from fastamp.data.stats import LoaderStats
from fastamp.data.structure import count_nbytes

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
    numbers = torch.arange(cell.number, cell.number + len(rows), device="cpu")
    keys = cell.order.find_keys(cell.order.places(numbers))
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
        self.getitem_s: float
        self.collate_s: float
        self.getitem_s, self.collate_s = self._tell.tolist()  # of the passes before

    def __len__(self) -> int:
        return len(self.dataset)

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
        self._tell[:] = self.getitem_s, self.collate_s
        return batch

    __getitem__ = __getitems__

    def init_worker(self, worker_id: int) -> None:
        """Let the user's code in a worker see the user's dataset."""
        begin_worker(self.dataset, worker_id, self._worker_init_fn)
        if self._times is not None:
            self._tell = self._times[worker_id].numpy()
        self.getitem_s, self.collate_s = self._tell.tolist()  # of the passes before


class StatefulItems(Items):
    """Items of a dataset whose state torchdata saves and loads."""

    def state_dict(self) -> Any:
        """Return the dataset's state."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Load the dataset's state."""
        self.dataset.load_state_dict(state)


class Stream(IterableDataset[Any]):
    """An iterable dataset whose batches are numbered, for the random numbers of `sample_rng`."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Collate,
        seed: int,
        num_workers: int,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        self.dataset, self._collate_fn, self._seed = dataset, collate_fn, seed
        self._num_workers, self._worker_init_fn = num_workers, worker_init_fn
        self._epoch = self._first = 0
        self.cell = Batch(Order(0))

    def __repr__(self) -> str:
        return repr(self.dataset)  # in torch's warnings

    def begin(self, epoch: int, batch: int) -> None:
        """Let the next pass be that of an epoch, after so many batches of all workers."""
        self._epoch, self._first = epoch, batch

    def __iter__(self) -> Iterator[Any]:
        info, key = torch_worker_info(), find_pass_key(self._seed, self._epoch)
        self.cell = Batch(Order(key))
        self.cell.number = self._first
        if info is not None:
            # Workers make their batches in turn. They begin their later epochs by themselves.
            self.cell.order = Order(key, info.id, self._num_workers - 1)
            self.cell.number = (self._first - info.id - 1) // self._num_workers + 1
            self.begin(self._epoch + 1, 0)
        current.sample = self.cell
        return iter(self.dataset)

    def collate(self, samples: Any) -> Any:
        """Return the batch of some samples."""
        batch = self._collate_fn(samples)
        self.cell.number += 1
        return batch

    def init_worker(self, worker_id: int) -> None:
        """Let the user's code in a worker see the user's dataset."""
        begin_worker(self.dataset, worker_id, self._worker_init_fn)


class StatefulStream(Stream):
    """A stream of a dataset whose state torchdata saves and loads."""

    _iterator: Any = None
    _loaded: Any = None
    """The state of the iterator that begins next."""
    _ended = _had_ended = False

    def __iter__(self) -> Iterator[Any]:
        iterator: Any = super().__iter__()
        loaded, self._loaded, self._ended = self._loaded, None, self._had_ended
        if loaded is not None and (iterator is self.dataset or not self._had_ended):
            iterator.load_state_dict(loaded)
        self._iterator = iterator
        if self._had_ended:  # when the state was saved; the dataset may be at its start again
            self._had_ended = False
            return iter(())
        return _Reading(self, iterator)

    def end(self) -> None:
        """Note that the iterator has ended."""
        self._ended = True

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the dataset and its iterator, and whether that has ended."""
        # A dataset that is its own iterator may begin anew in `__iter__`: it is loaded after that.
        is_own, save = self._iterator is self.dataset, find_save(self._iterator)
        dataset, iterator = None if is_own else self.dataset.state_dict(), save and save()
        return {"dataset": dataset, "iterator": iterator, "ended": self._ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load them."""
        if state["dataset"] is not None:
            self.dataset.load_state_dict(state["dataset"])
        self._loaded, self._had_ended = state["iterator"], state["ended"]


class _Reading(Iterator[Any]):
    """An iterator whose end is noted. It continues after an error if the user's iterator does."""

    def __init__(self, stream: StatefulStream, iterator: Iterator[Any]) -> None:
        self._stream, self._iterator = stream, iterator

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._stream.end()
            raise


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


def read_again(iterator: Iterator[Any], count: int, *, goes_on: bool) -> None:
    """Skip the batches of a stream that were delivered; errors among them are old, if it goes on.

    The error of a worker process is raised: it may have died.
    """
    done = 0
    while done < count:
        try:
            next(iterator)
        except StopIteration:  # noqa: PERF203 - an error in its place
            return
        except Exception:
            if not goes_on:
                raise
        else:
            done += 1


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
        stats.nbytes += count_nbytes(batch)
        return pin_memory(batch) if self._pins else batch  # type: ignore[no-untyped-call]


class TorchBatches(Iterator[Any]):
    """The batches of torch's iterator, over worker processes, or over a stream without them."""

    def __init__(self, iterator: Iterator[Any], stats: LoaderStats, cell: Batch | None) -> None:
        """`cell` has the random numbers of a stream that the caller's thread reads."""
        self._iterator, self._stats, self._cell = iterator, stats, cell

    def __next__(self) -> Any:
        before = current.sample
        if self._cell is not None:
            current.sample, start_s = self._cell, time.perf_counter()
        try:
            batch = next(self._iterator)
        except StopIteration:
            raise
        except Exception as error:  # noqa: BLE001 - explained
            raise self._explain(error)  # noqa: B904 - the same error
        finally:
            if self._cell is not None:
                current.sample = before
                self._stats.getitem_s += time.perf_counter() - start_s
        if type(batch) is Failed:
            failed = batch.error
            del batch
            try:
                if isinstance(failed, Exception):
                    raise failed  # noqa: TRY301 - below
                failed.reraise()
            except Exception as error:  # noqa: BLE001 - any of the user's
                # Tracebacks refer to frames that refer to the error, and so to the workers.
                raise error.with_traceback(None)  # noqa: B904 - the same error
            finally:
                del failed
        self._stats.nbytes += count_nbytes(batch)
        return batch

    def _explain(self, error: Exception) -> Exception:
        """Return an error of torch's iterator. It comes in place of no batch."""
        workers = getattr(self._iterator, "_workers", ())
        # torch raises these for a worker that died after it had announced a batch.
        if isinstance(error, ConnectionError | EOFError) and _bury(workers):
            died = RuntimeError("DataLoader worker exited unexpectedly: its last batch is lost")
            died.__cause__ = error
            error = died
        mark_undelivered(error)
        # The message has the worker's traceback. torch's frames, which refer to the error, would
        # keep the workers alive until the next garbage collection.
        return error.with_traceback(None) if workers else error


def _bury(workers: Sequence[Any]) -> bool:
    """Wait for a worker that may be dying, so that torch's signal handler does not report it."""
    sentinels = {worker.sentinel: worker for worker in workers}
    dead = wait(sentinels, timeout=1.0) if sentinels else []
    for sentinel in dead:
        sentinels[sentinel].join()
    return bool(dead)
