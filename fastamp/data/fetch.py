"""Batches of any dataset through torch's own iterators and workers, with the time they take."""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from traceback import walk_tb
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, MapDataPipe, get_worker_info

from fastamp.data.indices import Indices
from fastamp.data.position import Position
from fastamp.data.sample_rng import Batch, Order, Placed, current
from fastamp.data.slots import Slots
from fastamp.data.states import (
    Failed,
    Measured,
    Record,
    Skip,
    WorkerStream,
    find_both,
    find_save,
    find_together,
    has_copies,
    is_undelivered,
    mark_undelivered,
    note_index,
    portable,
    take,
)
from fastamp.data.stats import LoaderStats
from fastamp.data.structure import count_nbytes
from fastamp.data.threads import ThreadLoader


class _Watched(Dataset[Any]):
    """A loader's dataset and collate function, timed in each worker.

    The error of an item names its index.
    """

    def __init__(self, loader: Any, records: list[Record | None] | None) -> None:
        self.dataset: Any = loader.dataset
        self._records = records  # of a map-style dataset
        stream = isinstance(loader.dataset, IterableDataset)
        self._copied = has_copies(loader) and not stream
        self._save: Callable[[], Any] | None = None  # in a worker
        self._worker = 0
        self._collate_fn, self._worker_init_fn = loader.collate_fn, loader.worker_init_fn
        self._getitem_s = 0.0  # since the last batch
        self._batch_sample: Any = None  # whose random numbers the collate function draws

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        """Return one item."""
        if type(index) is Skip:
            return index
        items = self._get(index._replace(indices=[index[0]]))
        return items if type(items) is Measured else items[0]

    def __getitems__(self, indices: Any) -> Any:
        """Return the items of one batch."""
        if type(indices) is Skip:
            return indices
        return self._get(indices, find_together(self.dataset))

    def _get(self, placed: Placed, together: Callable[[Any], Any] | None = None) -> Any:
        start_s, before = time.perf_counter(), current.sample
        indices, order, number = placed
        self._batch_sample = order, ~number
        index: Any = indices
        try:
            if together:
                current.sample = order, number
                return together(indices)
            items, dataset = [], self.dataset
            batch = current.sample = Batch(order)
            for batch.number, index in enumerate(indices, number):
                items.append(dataset[index])
        except Exception as error:
            note_index(error, index)
            if self._save is None:
                raise
            return self._fail(error)
        finally:
            current.sample = before
            self._getitem_s += time.perf_counter() - start_s
        return items

    def _fail(self, error: Exception) -> Measured:
        return Measured(Failed(portable(error, self._worker)), note=self._note())

    def _note(self) -> tuple[int, Record] | None:
        """Return the state of a worker's copy of the dataset, if it has one."""
        if self._save is None:
            return None
        state = {"dataset": deepcopy(self._save()), "iterator": None}
        return self._worker, {**state, "samples": 0, "ended": False}

    def collate(self, samples: Any) -> Measured:
        """Return the batch of the dataset's samples."""
        if type(samples) is Skip:
            return Measured(None, is_batch=False)
        if type(samples) is Measured:  # an error in their place
            return samples
        getitem_s, self._getitem_s = self._getitem_s, 0.0
        start_s, before = time.perf_counter(), current.sample
        current.sample = self._batch_sample or before
        try:
            batch = self._collate_fn(samples)
        except Exception as error:
            if self._save is None:
                raise
            return self._fail(error)
        finally:
            current.sample = before
        return Measured(batch, getitem_s, time.perf_counter() - start_s, self._note())

    def init_worker(self, worker_id: int) -> None:
        """Let the user's code in a worker see the user's dataset; load the worker's state."""
        # Without it a garbage collection of all that was made before the fork takes 100 ms, in
        # every worker.
        gc.freeze()
        object.__setattr__(get_worker_info(), "dataset", self.dataset)  # a frozen dataclass
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)
        if self._copied:
            self._save, self._worker = find_save(self.dataset), worker_id
            record = self._records and self._records[worker_id]
            if record:
                self.dataset.load_state_dict(record["dataset"])


def make_inner(
    loader: Any, indices: Indices, position: Position, slots: Slots
) -> DataLoader[Measured] | ThreadLoader:
    """Return a loader of torch's, or of threads, that times the same batches from a position on."""
    if loader._in_threads:
        return ThreadLoader(loader, indices, slots)
    stream = isinstance(loader.dataset, IterableDataset)
    watched = _Watched(loader, None if stream else position.workers)
    collate: Callable[[Any], Measured] = watched.collate
    own: dict[str, Any] = {"dataset": watched, "batch_size": None, "sampler": indices}
    if loader.batch_sampler is not None:
        own = {"dataset": watched, "batch_sampler": indices}
    if stream:
        own = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if stream or isinstance(loader.dataset, MapDataPipe):
        own["dataset"] = loader.dataset
    counted: Any = loader._IterableDataset_len_called
    if stream and has_copies(loader):
        parts = WorkerStream(loader, position.workers, position.turn, position.epoch)
        own, collate = {"dataset": parts, "batch_size": None}, _hand_on
        if counted is not None:  # torch also counts skipped turns and the workers' last notes
            counted += position.turn + loader.num_workers
    inner: DataLoader[Measured] = DataLoader(
        **own,
        num_workers=loader.num_workers,
        collate_fn=collate,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=watched.init_worker,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
        in_order=loader.in_order,
    )
    # torch's iterator warns when more samples come than len(loader) said.
    inner._IterableDataset_len_called = counted
    return inner


def _hand_on(measured: Measured) -> Measured:
    return measured


def _bury(workers: Sequence[Any]) -> bool:
    """Wait for a worker that may be dying, so that torch's signal handler does not report it."""
    sentinels = {worker.sentinel: worker for worker in workers}
    dead = wait(sentinels, timeout=1.0) if sentinels else []
    for sentinel in dead:
        sentinels[sentinel].join()
    return bool(dead)


def _replaces_batch(error: Exception) -> bool:
    """Say whether an error of torch's iterator over workers comes in place of a batch."""
    names = {frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)}
    return not names.isdisjoint({"_process_data", "reraise"})  # where it has moved on


@dataclass(eq=False, repr=False)
class FetchSource(Iterator[Any]):
    """The batches of torch's iterator over the loader that `make_inner` makes."""

    _iterator: Iterator[Measured]
    _stats: LoaderStats
    _dataset: Any
    _states: deque[Any]
    """Receives each batch's note on its worker."""
    _copies: bool = False
    """Whether workers have copies of the dataset, and send notes of their states."""
    _passed: tuple[Position, int] | None = None
    """If batches come or came in any order: where the pass began, and how many turns it skips."""
    _in_order: bool = True
    _taken: int = 0
    _order: Order | None = None
    """The keys of the batches of an iterable dataset without workers."""
    _number: int = 0
    _notes: list[Any] = field(default_factory=list)
    _save: Callable[[], dict[str, Any]] | None = None
    makes_fresh: bool = False
    """Whether nothing writes into the memory of a batch after it is delivered."""

    def __post_init__(self) -> None:
        self._fetcher = getattr(self._iterator, "_dataset_fetcher", None)  # without workers
        self._inner: Any = getattr(self._fetcher, "dataset_iter", None)
        if find_save(self._dataset) or find_save(self._inner):
            self._save = find_both(self._dataset, self._inner)
        self._has_state = self._save is not None and not hasattr(self._iterator, "_workers")
        self._tells = self._copies or self._passed is not None

    @property
    def position(self) -> dict[str, Any]:
        """The fields of the loader's position to set before the first batch."""
        return {"dataset": self.ask} if self._has_state else {}

    def __next__(self) -> Any:
        try:
            batch, getitem_s, collate_s, note, is_batch = self._next()
            while not is_batch:
                self._notes.append(note)
                batch, getitem_s, collate_s, note, is_batch = self._next()
        except StopIteration:
            if self._notes:
                self._states.append(self._notes)
            raise
        except Exception as error:
            workers = getattr(self._iterator, "_workers", ())
            if workers and not _replaces_batch(error):
                mark_undelivered(error)
                # torch raises these for a worker that died after it had announced a batch.
                if isinstance(error, ConnectionError | EOFError) and _bury(workers):
                    msg = "DataLoader worker exited unexpectedly: its last batch is lost"
                    raise mark_undelivered(RuntimeError(msg)) from error
            if self._tells and not is_undelivered(error):
                self._tell(None)
            if workers:
                # The message has the worker's traceback. torch's frames, which refer to the error,
                # would keep the workers alive until the next garbage collection.
                raise error.with_traceback(None)  # noqa: B904 - the same error
            raise
        self._stats.getitem_s += getitem_s
        self._stats.collate_s += collate_s
        self._stats.nbytes += count_nbytes(batch)
        if self._tells:
            self._tell(note)
        return batch

    def _tell(self, note: Any) -> None:
        """Add what a batch, or the error in its place, has changed: one entry for each."""
        self._taken += 1
        notes, self._notes = [*self._notes, note], []
        if self._passed is not None:
            notes.append({"late": self.late})
        self._states.append(notes)

    def _next(self) -> Measured:
        if self._order is None:
            found = next(self._iterator)
            if type(found.batch) is Failed:
                self._notes.append(found.note)
                error = found.batch.error
                del found
                try:
                    if isinstance(error, Exception):
                        raise error
                    error.reraise()
                finally:
                    del error  # whose traceback refers to this frame
            return found
        before, current.sample = current.sample, (self._order, self._number)
        self._number += 1
        try:
            return next(self._iterator)
        finally:
            current.sample = before

    @property
    def late(self) -> list[int]:
        """The places of undelivered batches that later ones have overtaken."""
        if self._passed is None:
            return []
        begin, skips = self._passed
        if self._in_order:  # late batches come first
            return begin.late[self._taken :]
        iterator: Any = self._iterator
        sent, under_way = iterator._send_idx, iterator._task_info
        still = [
            place
            for number, place in enumerate(begin.late, skips)
            if number >= sent or number in under_way
        ]
        last = sent - 1
        while last in under_way:
            last -= 1
        new = range(skips + len(begin.late), last)
        return [*still, *(begin.batch + number - skips for number in new if number in under_way)]

    def ask(self) -> dict[str, Any]:
        """Return the states of the dataset and its iterator, and whether the iterator has ended."""
        states = self._save() if self._save else {}
        return {**states, "exhausted": bool(getattr(self._fetcher, "ended", False))}

    def forward(self, position: Position) -> None:
        """Move an iterator without workers to a position: load its state, or skip batches."""
        if position.iterator is not None:
            if not hasattr(self._inner, "load_state_dict"):
                msg = f"state: its iterator: {type(self._inner).__name__} has no load_state_dict"
                raise ValueError(msg)
            self._inner.load_state_dict(position.iterator)
        elif self._save is None:
            deque(take(iter(self._next, None), position.batch), maxlen=0)
        self._number = position.batch
