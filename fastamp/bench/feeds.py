"""The batches of a short epoch, from one order of samples: by a naive loop, torch, and fastamp."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, RandomSampler, TensorDataset, default_collate

import fastamp
from fastamp.bench.environment import count_cores
from fastamp.bench.loader import Batches, fastamp_batches, torch_batches
from fastamp.bench.tasks import Training, draw, make_loader
from fastamp.data.structure import map_tensors

MOST_PERMUTED = 100_000  # rows

Way: TypeAlias = tuple[str, dict[str, Any]]  # a key of LOADERS, and the options of its workers


class Data(NamedTuple):
    """What the feeds of one task read."""

    dataset: Any  # None where only batches are given
    batch_size: int
    collate_fn: Callable[[list[Any]], Any] | None  # None is default_collate

    def by_torch(self) -> Any:
        """Return the dataset for a loop without fastamp: its `by_torch`, if it has one."""
        return getattr(self.dataset, "by_torch", self.dataset)

    def columns(self) -> dict[Any, Tensor] | None:
        """Return the tensors whose rows the samples are, by name or place; None for other data."""
        data, found = self.dataset, None
        if type(data) is TensorDataset:
            found = dict(enumerate(data.tensors))
        elif type(data) is fastamp.ArrayDataset and not data.augment:
            found = data.arrays if isinstance(data.arrays, dict) else dict(enumerate(data.arrays))
        is_plain = found and all(isinstance(part, Tensor) for part in found.values())
        return found if is_plain and self.collate_fn is None else None

    def is_repeatable(self) -> bool:
        """Say whether all feeds have the same samples from one order."""
        if self.dataset is None or self.by_torch() is not self.dataset:
            return False
        try:
            torch.testing.assert_close(self.dataset[0], self.dataset[0], rtol=0, atol=0)
        except (AssertionError, TypeError):  # TypeError: samples that are no numbers
            return False
        return True


def find_data(training: Training) -> Data:
    """Return the dataset of a task; of a loader, the one that it reads."""
    data, batch_size, collate_fn = training.data, training.batch_size, None
    if training.has_loader:
        batch_size = getattr(data, "batch_size", None) or 0
        collate_fn = getattr(data, "collate_fn", None)
        data = getattr(data, "dataset", None)
    if data is None or isinstance(data, IterableDataset) or not batch_size:
        return Data(None, 0, None)
    return Data(data, batch_size, None if collate_fn is default_collate else collate_fn)


class Feed(NamedTuple):
    """A function that begins a short epoch, and what it reads."""

    begin: Batches
    data: Data
    sampler: Any = None  # None where only batches are given


NO_FEED = Feed(lambda: iter(()), Data(None, 0, None))


def make_feed(
    loader: str,
    training: Training,
    device: str,
    *,
    steps: int,
    seed: int,
    workers: dict[str, Any] | None = None,
) -> Feed:
    """Return a feed of so many batches on the device; `loader` is a key of LOADERS."""
    data = find_data(training)
    if data.dataset is None:
        endless = draw(make_loader(training, seed, device=device), device)
        return Feed(lambda: islice(endless, steps), data)
    sampler = _make_sampler(data, steps, seed)
    return Feed(LOADERS[loader](data, device, sampler, **workers or {}), data, sampler)


def _make_sampler(data: Data, steps: int, seed: int) -> RandomSampler:
    """Return a sampler of short epochs, which draws from the whole dataset."""
    n_rows, n_drawn = len(data.dataset), steps * data.batch_size
    # A permutation of very many rows would take most of a short epoch.
    again = n_rows > MOST_PERMUTED or n_rows < n_drawn
    order = torch.Generator().manual_seed(seed)
    return RandomSampler(data.dataset, replacement=again, num_samples=n_drawn, generator=order)


def list_ways(data: Data, loader: str) -> list[Way]:
    """Return the ways that a loop might get its batches: torch's also by hand, or with workers."""
    alone: list[Way] = [(loader, {})]
    if data.dataset is None or loader == "naive":
        return alone
    n = count_cores()
    processes: Way = (loader, {"num_workers": n, "persistent_workers": True})
    if loader == "stock":
        by_hand: list[Way] = [] if data.columns() is None else [("indexed", {})]
        return [*alone, *by_hand, processes]
    ours = fastamp.DataLoader[Any](data.dataset, data.batch_size, collate_fn=data.collate_fn)
    is_gathered = ours.stats().path.startswith("gathered")
    threads: Way = (loader, {"num_workers": n, "worker": "thread"})
    return alone if is_gathered else [*alone, threads, processes]


def _naive_batches(data: Data, device: str, sampler: RandomSampler) -> Batches:
    move = partial(map_tensors, partial(Tensor.to, device=device))
    join = data.collate_fn or default_collate
    dataset = data.by_torch()

    def begin() -> Iterator[Any]:
        rows = iter(sampler)
        for _ in range(sampler.num_samples // data.batch_size):
            yield move(join([dataset[row] for row in islice(rows, data.batch_size)]))

    return begin


def _indexed_batches(data: Data, device: str, sampler: RandomSampler) -> Batches:
    """Index tensors as an expert does by hand, with the rows that the sampler draws."""
    columns, n_rows, n_drawn = data.columns() or {}, len(data.dataset), sampler.num_samples
    move = partial(Tensor.to, device=device, non_blocking=True)
    in_dict = 0 not in columns

    def begin() -> Iterator[Any]:
        if sampler.replacement:
            rows = torch.randint(n_rows, (n_drawn,), generator=sampler.generator)
        else:
            rows = torch.randperm(n_rows, generator=sampler.generator)[:n_drawn]
        for start in range(0, n_drawn, data.batch_size):
            chosen = rows[start : start + data.batch_size]
            batch = {name: move(column[chosen]) for name, column in columns.items()}
            yield batch if in_dict else [*batch.values()]

    return begin


def _loader_batches(
    make: Callable[..., Batches], data: Data, device: str, sampler: RandomSampler, **options: Any
) -> Batches:
    """Return the batches of torch's loader or of fastamp's."""
    dataset = data.dataset if make is fastamp_batches else data.by_torch()
    # Without its own generator the loader would draw its seed from the one that dropout uses.
    options |= {"generator": torch.Generator(), "collate_fn": data.collate_fn, "sampler": sampler}
    return make(dataset, data.batch_size, device, **options)


LOADERS: dict[str, Callable[..., Batches]] = {
    "naive": _naive_batches,
    "stock": partial(_loader_batches, torch_batches),
    "indexed": _indexed_batches,
    "fastamp": partial(_loader_batches, fastamp_batches),
}
