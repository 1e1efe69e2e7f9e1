"""Passes through torch's own loader, over processes or a stream; torchdata's for a state.

A dataset with a state of its own (`state_dict`) is saved and loaded by torchdata.
"""

import importlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from multiprocessing.connection import wait
from typing import Any
from weakref import WeakMethod

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, IterDataPipe
from torch.utils.data import get_worker_info as torch_worker_info

from fastamp.data.items import Collate, Failed, Items, begin_worker, hand_on
from fastamp.data.plan import Plan
from fastamp.data.position import Position, find_save, mark_undelivered
from fastamp.data.sample_rng import (
    Batch,
    Order,
    current,
    draw_seed,
    find_pass_key,
    generators_kept,
)
from fastamp.data.stats import LoaderStats

OPTIONS = (
    "batch_size",
    "collate_fn",
    "drop_last",
    "in_order",
    "multiprocessing_context",
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "pin_memory_device",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)
"""The arguments of torch's loader that are handed on."""


class TorchLoader:
    """torch's loader, or torchdata's, over what stands in the dataset's place."""

    def __init__(
        self,
        dataset: Any,
        find_items: Callable[[type[Items]], Items] | None,
        plan: Plan,
        options: dict[str, Any],
    ) -> None:
        """`find_items` makes the items of a map-style dataset; `options` are those of `OPTIONS`."""
        self.plan, self._count = plan, options["num_workers"]
        self._is_stateful = find_save(dataset) is not None
        own: dict[str, Any] = {}
        self._items: Any = dataset
        if find_items is not None:
            self._items = find_items(StatefulItems if self._is_stateful else Items)
            own = {"collate_fn": hand_on, "worker_init_fn": self._items.init_worker}
            own |= {"batch_size": None, "sampler": plan, "drop_last": False}
            if not plan.single:
                own |= {"batch_size": 1, "sampler": None, "batch_sampler": plan}
        elif not isinstance(dataset, IterDataPipe):
            kind = StatefulStream if self._is_stateful else Stream
            seed, collate_fn = plan.position.sample_seed or 0, options["collate_fn"]
            self._items = kind(dataset, collate_fn, seed, self._count, options["worker_init_fn"])
            own = {"collate_fn": self._items.collate, "worker_init_fn": self._items.init_worker}
        if not self._count:
            own["prefetch_factor"] = None
        make = stateful_loader() if self._is_stateful else None
        with warnings.catch_warnings():
            # torchdata 0.11 calls a function that torch 2.13 deprecates.
            warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
            self._inner: Any = (make or TorchDataLoader)(self._items, **{**options, **own})

    def begin(
        self, position: Position, source: torch.Generator, length: int | None, stats: LoaderStats
    ) -> "TorchBatches":
        """Begin a pass at a position; `source` gives the seed of workers.

        torch's iterator warns when more samples of a stream come than its `length` said.
        """
        self.plan.move_to(position)
        inner, items, count = self._inner, self._items, self._count
        inner.generator = None if source is torch.default_generator else source
        if isinstance(items, Stream):
            items.begin(position.epoch, position.batch if self._is_stateful else 0)
        # At the start of an epoch, workers that do not persist have the dataset as it is here.
        is_kept = position.batch > 0 or not count or inner.persistent_workers
        if position.dataset_state is not None and is_kept:
            inner.load_state_dict(position.dataset_state)
            if not position.batch:  # torchdata ends the pass before, and draws a seed for it
                inner.generator = torch.Generator()
                inner.generator.set_state(source.get_state())
                draw_seed(source)
        inner._IterableDataset_len_called = length
        before = current.sample
        try:
            iterator = iter(inner)
            is_stream = isinstance(items, IterableDataset)
            if is_stream and not self._is_stateful and position.batch:
                with generators_kept():
                    read_again(iterator, position.batch, goes_on=not count)
        finally:
            current.sample = before
        if self._is_stateful and hasattr(inner, "state_dict"):
            position.ask = partial(_ask, WeakMethod(inner.state_dict))
        cell = items.cell if isinstance(items, Stream) and not count else None
        return TorchBatches(iterator, stats, cell)


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


def _ask(state_dict: WeakMethod[Callable[[], Any]]) -> Any:
    """Return the state of torchdata's loader; None once that is gone, and so is its pass.

    The loader refers to the position that asks it. In a cycle its workers would be left to the
    garbage collector, which closes their queues first: torch then waits 5 s for each.
    """
    save = state_dict()
    return save and save()


@cache
def stateful_loader() -> Any:
    """Return torchdata's loader where it is installed, else None."""
    try:
        return importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    except ImportError:
        return None
