"""Batches of any dataset through torch's own iterators and workers, with the time they take."""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, MapDataPipe, get_worker_info

from fastamp.data.position import Indices
from fastamp.data.stats import LoaderStats
from fastamp.data.structure import count_nbytes

Measured = tuple[Any, float, float]
"""A batch with the seconds that the dataset and the collate function took for it."""


class _Watched(Dataset[Any]):
    """A loader's dataset and functions, which take their own time in each worker.

    An item that fails is named by its index.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.dataset: Any = loader.dataset
        self._collate_fn, self._worker_init_fn = loader.collate_fn, loader.worker_init_fn
        self._getitem_s = 0.0  # since the last batch

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
            self._getitem_s += time.perf_counter() - start_s
        return items

    def collate(self, samples: Any) -> Measured:
        """Return the batch of what the dataset gave."""
        getitem_s, self._getitem_s = self._getitem_s, 0.0
        start_s = time.perf_counter()
        batch = self._collate_fn(samples)
        return batch, getitem_s, time.perf_counter() - start_s

    def init_worker(self, worker_id: int) -> None:
        """Show the user's code in a worker the user's dataset."""
        # A collection over all that was there before the fork takes 100 ms, in every worker.
        gc.freeze()
        object.__setattr__(get_worker_info(), "dataset", self.dataset)  # it is frozen
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)


def make_inner(loader: DataLoader[Any], indices: Indices) -> DataLoader[Measured]:
    """Return torch's loader of the same batches, at these indices, measured."""
    watched = _Watched(loader)
    own: dict[str, Any] = {"dataset": watched, "batch_size": None, "sampler": indices}
    if loader.batch_sampler is not None:
        own = {"dataset": watched, "batch_sampler": indices}
    if isinstance(loader.dataset, IterableDataset):
        own = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if isinstance(loader.dataset, IterableDataset | MapDataPipe):
        own["dataset"] = loader.dataset
    inner: DataLoader[Measured] = DataLoader(
        **own,
        num_workers=loader.num_workers,
        collate_fn=watched.collate,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=watched.init_worker,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
        in_order=loader.in_order,
    )
    # What len(loader) said, about which torch's iterator warns when more samples come.
    inner._IterableDataset_len_called = loader._IterableDataset_len_called
    return inner


@dataclass(eq=False, repr=False)
class FetchSource(Iterator[Any]):
    """The batches of torch's iterator over the loader that `make_inner` makes."""

    _iterator: Iterator[Measured]
    _stats: LoaderStats
    _save: Callable[[], Any] | None
    """Returns the state of an iterable dataset."""
    _states: deque[Any]
    """Gets that state and whether the dataset ended after each batch, or how to ask for both."""
    _ahead: bool
    """Whether batches are made before they are delivered, so that states are taken at once."""

    def __next__(self) -> Any:
        workers = getattr(self._iterator, "_workers", ())
        try:
            batch, getitem_s, collate_s = next(self._iterator)
        except (ConnectionError, EOFError) as error:
            # So torch tells of a worker that died after it had announced a batch; it may be dying.
            if workers and wait([worker.sentinel for worker in workers], timeout=1.0):
                msg = "DataLoader worker exited unexpectedly: its last batch is lost"
                raise RuntimeError(msg) from error
            raise
        except Exception as error:
            if workers:
                # The message has the worker's traceback. torch's frames refer to the error, and
                # would keep the workers until the garbage collector finds them.
                raise error.with_traceback(None)  # noqa: B904 - the same error
            raise
        self._stats.getitem_s += getitem_s
        self._stats.collate_s += collate_s
        self._stats.nbytes += count_nbytes(batch)
        if self._save is not None:
            self._states.append(self._ask() if self._ahead else (self._ask, False))
        return batch

    def _ask(self) -> tuple[Any, bool]:
        """Return the state of the dataset, and whether it has ended."""
        fetcher = getattr(self._iterator, "_dataset_fetcher", None)
        return self._save() if self._save else None, bool(getattr(fetcher, "ended", False))
