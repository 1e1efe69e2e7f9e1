"""What begins a pass: the source of its batches, gathered or fetched, at the pass's position."""

import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, MapDataPipe

from fastamp.data.collate import BatchCollator
from fastamp.data.fetch import FetchSource, make_inner
from fastamp.data.gather import Gatherable, GatherSource
from fastamp.data.position import Indices, Position
from fastamp.data.sample_rng import SampleRng, current
from fastamp.data.slots import Slots
from fastamp.data.states import has_copies
from fastamp.data.threads import ThreadLoader


def _indices(loader: Any, position: Position) -> Indices:
    generator = loader._sampler_generator()
    seed = None if generator is None or generator is not loader.generator else loader.seed
    single, plain = loader.batch_sampler is None, isinstance(loader.dataset, MapDataPipe)
    return Indices(loader._batches, generator, seed, position, 0, single, plain)


def _seed_samples(loader: Any, position: Position, *, again: bool) -> None:
    """Give samples the loader's seed, or the one that torch's iterators draw when they begin."""
    if position.sample_seed is None:
        seed = loader.seed if loader._shard is None else loader._shard.seed
        if seed is None and again:
            seed = loader._sample_seed
        if seed is None:
            source = loader.generator or torch.default_generator
            state = source.get_state()
            empty = torch.empty((), dtype=torch.int64, device="cpu")
            seed = int(empty.random_(generator=loader.generator))
            source.set_state(state)
        position.sample_seed = seed
    loader._sample_seed = position.sample_seed


def _with_keys(indices: Indices, *, keyed: bool) -> Iterator[tuple[Any, Tensor | None]]:
    """Return the batches of indices with the keys that samples draw from."""
    if not keyed:
        return zip(indices.batches(), repeat(None))
    order = indices.order
    return ((batch, order.find_keys(places)) for batch, places in indices.placed_batches())


def gathered(
    loader: Any, gatherable: Gatherable, position: Position, slots: Slots
) -> Iterator[Any]:
    """Warn and draw as torch's iterators do at first, and return the gathered batches."""
    if loader.pin_memory and not torch.accelerator.is_available():
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, "
            "then device pinned memory won't be used.",
            stacklevel=3,
        )
    workers = loader.num_workers > 0
    again = workers and loader.persistent_workers and loader._began
    position.persist = loader.persistent_workers
    _seed_samples(loader, position, again=again)
    # A resumed pass leaves the program's own draws alone.
    if not again and (loader.generator is not None or not position.resumed):
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    loader._began = True
    keyed = gatherable.find is not None or any(column.images for column in gatherable.columns)
    indices = _with_keys(_indices(loader, position), keyed=keyed)
    if workers:  # which ask for indices before the consumer does
        indices = chain(list(islice(indices, 1)), indices)

    def make(rows: list[Any], keys: Tensor | None) -> Any:
        before, samples = current.sample, []
        try:
            for place, row in enumerate(rows):
                if keys is not None:
                    current.sample = SampleRng(int(keys[place]) % 2**64)
                samples.append(loader.dataset[row])
        finally:
            current.sample = before
        return loader.collate_fn(samples)

    return GatherSource(gatherable, indices, slots, loader._stats, loader.max_bytes, make)


def fetched(
    loader: Any, position: Position, slots: Slots, states: deque[Any], *, ahead: bool
) -> Iterator[Any]:
    """Return the batches that torch's iterators make, and put the dataset's states aside."""
    if position.exhausted:
        return iter(())
    workers = loader.num_workers
    if type(loader.collate_fn) is BatchCollator and (workers == 0 or loader._in_threads):
        loader.collate_fn.lease_from(slots)
    turn, copies = position.turn, has_copies(loader)
    new = loader._inner is None or not loader.persistent_workers
    _seed_samples(loader, position, again=not new)
    if new:
        indices = _indices(loader, position)
        loader._inner = make_inner(loader, indices, position, slots), indices
    elif copies and loader._left is not None:
        position.workers = loader._left.workers
    inner, indices = loader._inner
    indices.position, indices.skips, inner.generator = position, turn, loader.generator
    if copies and position.workers is None:
        position.workers = [None] * workers
    position.persist, loader._began = loader.persistent_workers, True
    source = _start(loader, position, inner, states, copies=copies, ahead=ahead)
    position.begun = True
    return source


def _start(
    loader: Any,
    position: Position,
    inner: TorchDataLoader[Any] | ThreadLoader,
    states: deque[Any],
    *,
    copies: bool,
    ahead: bool,
) -> FetchSource:
    """Return torch's iterator, with the states of dataset and workers at the position."""
    dataset: Any = loader.dataset
    stream, own, default = isinstance(dataset, IterableDataset), position.dataset, None
    if copies and loader.generator is None:
        default = position.workers_rng
        position.workers_rng = torch.get_rng_state() if default is None else default
    # The program's draws go on.
    alone = loader.generator is None and (position.resumed or position.begun)
    later = position.begun and not stream and loader.num_workers == 0
    order = loader._inner[1].order if stream and loader.num_workers == 0 else None
    before, current.sample = current.sample, None if order is None else (order, 0)
    with torch.random.fork_rng(devices=[], enabled=alone):
        if own is not None and not later:
            dataset.load_state_dict(own)
        if default is not None:
            torch.set_rng_state(default)
        try:
            iterator = iter(inner)
        finally:
            current.sample = before
    if own is not None and later:
        dataset.load_state_dict(own)
    in_order = loader.in_order or stream or loader.num_workers == 0
    passed = None if in_order else (replace(position), position.turn)
    source = FetchSource(iterator, loader._stats, dataset, states, ahead, passed, order)
    source.makes_fresh = type(loader.collate_fn) is BatchCollator
    if stream and loader.num_workers == 0:
        source.forward(position)
    if copies and not stream:
        position.dataset = source.ask()["dataset"]
    vars(position).update(source.position)
    return source
