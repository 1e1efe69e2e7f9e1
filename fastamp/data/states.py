"""The state of a dataset: its own, that of its iterator, and that of its copies in workers."""

import inspect
import time
from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, NamedTuple

from torch._utils import ExceptionWrapper
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe, Subset
from torch.utils.data import get_worker_info as torch_worker_info

from fastamp.data.sample_rng import Order, current, find_pass_key
from fastamp.data.workers import get_worker_info

_MARK = "_fastamp_undelivered"
Record = dict[str, Any]
"""The state of a worker's copy of a dataset after its last batch delivered: "dataset" and
"iterator", their states or None; "samples", how many an iterator without a state has had; "ended",
whether it has ended, or None if the record is of the pass before."""


class Measured(NamedTuple):
    """A batch with the seconds that the dataset and the collate function took for it."""

    batch: Any
    getitem_s: float = 0.0
    collate_s: float = 0.0
    note: tuple[int, Record] | None = None
    """The worker that made it, and its record."""
    is_batch: bool = True
    """False: it brings the note only, or fills a worker's turn."""


class Failed(NamedTuple):
    """In place of a batch: an error of a stream, which may continue after it."""

    error: Any
    """An exception, or torch's wrapper of one that comes from another process."""


class Skip(list[Any]):
    """In place of a batch's indices, for a worker whose turn is skipped."""


def mark_undelivered(error: Exception) -> Exception:
    """Mark an error that comes in place of no batch, as a timeout, and return it."""
    vars(error)[_MARK] = True
    return error


def is_undelivered(error: Exception) -> bool:
    """Say whether an error has this mark."""
    return _MARK in vars(error)


def unmark(error: Exception) -> bool:
    """Take the mark away, which says nothing to a loader whose dataset reads this one."""
    return bool(vars(error).pop(_MARK, False))


def find_save(dataset: Any) -> Callable[[], Any] | None:
    """Return the `state_dict` of a dataset or iterator if it needs no arguments."""
    save: Callable[[], Any] | None = getattr(dataset, "state_dict", None)
    try:
        inspect.signature(save).bind()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return save if hasattr(dataset, "load_state_dict") else None


def has_copies(loader: Any) -> bool:
    """Say whether each worker's copy of a dataset has a state of its own."""
    dataset = loader.dataset
    if loader.num_workers == 0 or isinstance(dataset, IterDataPipe | MapDataPipe):
        return False
    if isinstance(dataset, IterableDataset):
        return True
    return not loader._in_threads and find_save(dataset) is not None


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


def read_records(state: Any) -> list[Record | None] | None:
    """Return the records of workers in a loader's state, or raise a ValueError."""
    names = {"dataset", "iterator", "samples", "ended"}
    if state is not None and not (
        isinstance(state, list)
        and all(one is None or (isinstance(one, dict) and one.keys() == names) for one in state)
    ):
        msg = f"state: its workers: expected None, or a list with the state of each, got {state!r}"
        raise ValueError(msg)
    return state


class WorkerStream(IterableDataset[Measured]):
    """The batches of an iterable dataset, made in workers, each with the state after it.

    Samples are taken and collated as by torch's workers.
    """

    def __init__(
        self, loader: Any, records: list[Record | None] | None, turn: int, epoch: int
    ) -> None:
        self.dataset = loader.dataset
        self._seed, self._epoch = loader._sample_seed, epoch
        self._size, self._drop_last = loader.batch_size, loader.drop_last
        self._collate_fn = loader.collate_fn
        self._records, self._turn = records, turn

    def __repr__(self) -> str:
        return repr(self.dataset)  # in torch's warnings

    def __iter__(self) -> Iterator[Measured]:
        info: Any = get_worker_info()
        worker: int = info.id
        key, self._epoch = find_pass_key(self._seed, self._epoch), self._epoch + 1
        order = Order(key, worker, info.num_workers - 1)
        current.sample = order, 0
        records, self._records = self._records, None  # of the first pass
        record = records[worker] if records else None
        ended = record is not None and record["ended"]
        if records and worker < self._turn and not ended:
            yield Measured(None, is_batch=False)
        iterator = begin(self.dataset, record)
        if not ended:
            yield from self._batches(order, iterator, record)

    def _batches(
        self, order: Order, iterator: Iterator[Any], record: Record | None
    ) -> Iterator[Measured]:
        worker, save = order.first, find_both(self.dataset, iterator)
        record = None if record and record["ended"] is None else record
        count = record["samples"] if record else 0
        size, ended = self._size or 1, False
        if is_skipped(record):
            for number in range(0, count, size):
                current.sample = order, number // size
                deque(take(iterator, size), maxlen=0)
        while not ended:
            start_s = time.perf_counter()
            current.sample = order, count // size
            try:
                samples = list(take(iterator, size))
                collate_s = time.perf_counter()
                count, ended = count + len(samples), len(samples) < size
                if not samples or (ended and self._drop_last):
                    break
                batch = self._collate_fn(samples if self._size else samples[0])
            except Exception as error:  # noqa: BLE001 - raised where the batch would come
                note = worker, {**save(), "samples": count, "ended": False}
                # What has no state is read again, with its error: the turn stays the worker's.
                known = None if is_skipped(note[1]) else note
                failed = [Measured(Failed(portable(error, worker)), note=known)]
            else:
                failed = []
            if failed:
                # Not kept in this frame: its traceback would keep the consumer, and so this, alive.
                yield failed.pop()
                continue
            end_s = time.perf_counter()
            note = worker, {**save(), "samples": count, "ended": ended}
            yield Measured(batch, collate_s - start_s, end_s - collate_s, note)
            if ended:
                return
        note = worker, {**save(), "samples": count, "ended": True}
        yield Measured(None, note=note, is_batch=False)


def portable(error: Exception, worker: int) -> Any:
    """Return an error as the consumer can get it: from a process in torch's wrapper."""
    if torch_worker_info() is None:
        return error
    where = f"in DataLoader worker process {worker}"
    return ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]


def as_of_pass_before(records: list[Record | None] | None) -> list[Record | None] | None:
    """Return the records of workers, marked as those of the pass before."""
    return records and [record and {**record, "ended": None} for record in records]


def begin(dataset: Any, record: Record | None) -> Iterator[Any]:
    """Return the iterator of a dataset as of a record, or of the pass after it.

    If there is no state to load, the caller has to skip the record's samples.
    """
    if record is None:
        return iter(dataset)
    if record["dataset"] is not None:
        dataset.load_state_dict(record["dataset"])
    iterator: Any = iter(dataset)
    if record["iterator"] is not None:
        iterator.load_state_dict(record["iterator"])
        return iter(dataset) if record["ended"] is None else iterator
    return iterator  # type: ignore[no-any-return]


def is_skipped(record: Record | None) -> bool:
    """Say whether a record has no state, so that its samples have to be skipped."""
    return record is not None and record["dataset"] is None and record["iterator"] is None


def take(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    """Yield at most `count` items. `islice` would call `iter` again, which may begin anew."""
    end = object()
    for _ in range(count):
        item = next(iterator, end)
        if item is end:
            return
        yield item


def find_both(dataset: Any, iterator: Any) -> Callable[[], dict[str, Any]]:
    """Return a function that returns the states of a dataset and its iterator, if they have one."""
    own = None if iterator is dataset else find_save(dataset)
    its = find_save(iterator)
    # Copies, since the dataset goes on before a worker's queue is read.
    return lambda: deepcopy({"dataset": own and own(), "iterator": its and its()})
