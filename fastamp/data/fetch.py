"""Batches of any dataset through torch's own iterators and workers, with the time they take."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, IterableDataset, MapDataPipe, get_worker_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastamp.data.position import Indices

__all__ = ["Measured", "make_iterator"]


class Measured(NamedTuple):
    """A batch with the seconds that the dataset and the collate function took for it."""

    batch: Any
    getitem_s: float
    collate_s: float


@dataclass(eq=False)
class _Clock:
    """Seconds in the dataset since the last batch; one for each worker."""

    getitem_s: float = 0.0


class _WatchedDataset(Dataset[Any]):
    """A map-style dataset that takes its own time, and names the index of an item that fails."""

    def __init__(self, dataset: Any, clock: _Clock) -> None:
        self.dataset = dataset
        self._clock = clock

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._get([index], None)[0]

    def __getitems__(self, indices: list[Any]) -> Any:
        """Return the items of one batch."""
        return self._get(indices, getattr(self.dataset, "__getitems__", None))

    def _get(self, indices: list[Any], together: Callable[[list[Any]], Any] | None) -> Any:
        start_s = time.perf_counter()
        index: Any = indices
        try:
            if together:
                return together(indices)
            items = []
            for index in indices:
                items.append(self.dataset[index])
        except Exception as error:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"fastamp.DataLoader: raised by dataset[{index}]")
            raise
        finally:
            self._clock.getitem_s += time.perf_counter() - start_s
        return items


@dataclass(eq=False)
class _MeasuredCollate:
    """A collate function that takes its own time."""

    _collate_fn: Callable[[Any], Any]
    _clock: _Clock

    def __call__(self, samples: Any) -> Measured:
        getitem_s, self._clock.getitem_s = self._clock.getitem_s, 0.0
        start_s = time.perf_counter()
        batch = self._collate_fn(samples)
        return Measured(batch, getitem_s, time.perf_counter() - start_s)


@dataclass(eq=False)
class _WorkerInit:
    """Shows the user's code in a worker the user's dataset."""

    _dataset: Any
    _worker_init_fn: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        object.__setattr__(get_worker_info(), "dataset", self._dataset)  # it is frozen
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)


class _Source(DataLoader[Any]):
    """The loader as torch's iterators see it: its own arguments, watched."""

    @property
    def _index_sampler(self) -> Indices:
        indices: Indices = vars(self)["_indices"]
        return indices


def make_iterator(loader: DataLoader[Any], indices: Indices) -> Iterator[Measured]:
    """Return torch's iterator over a loader's dataset, which yields measured batches."""
    clock = _Clock()
    source = _Source.__new__(_Source)
    dataset = loader.dataset
    if not isinstance(dataset, IterableDataset | MapDataPipe):
        dataset = _WatchedDataset(dataset, clock)
    vars(source).update(
        vars(loader),
        dataset=dataset,
        collate_fn=_MeasuredCollate(loader.collate_fn, clock),
        worker_init_fn=_WorkerInit(loader.dataset, loader.worker_init_fn),
        _indices=indices,
    )
    iterator: Iterator[Measured] = source._get_iterator()
    return iterator
