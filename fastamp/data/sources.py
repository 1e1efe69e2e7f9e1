"""Begins a pass: finds the source of its batches, gathered or fetched, and how they are copied."""

import math
import os
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, MapDataPipe

from fastamp.data.collate import BatchCollator
from fastamp.data.copied import CopiedBatches
from fastamp.data.fetch import FetchSource, make_inner
from fastamp.data.gather import Gatherable, GatherSource, find_device, find_path
from fastamp.data.indices import Indices, find_generator
from fastamp.data.passes import LoaderPass
from fastamp.data.position import Position
from fastamp.data.resident import move
from fastamp.data.sample_rng import SampleRng, current, draw_seed, generators_kept
from fastamp.data.slots import DEFAULT_MAX_BYTES, Slots, can_pin
from fastamp.data.states import as_of_pass_before, has_copies


def find_columns(loader: Any) -> Gatherable | None:
    """Return a dataset's columns if they are gathered; a resident one is moved first."""
    gatherable, way = find_path(loader)
    if not loader.resident:
        return gatherable
    if gatherable is None:
        msg = f"resident=True: expected a dataset that is gathered, this is read {way}"
        raise ValueError(msg)
    device = torch.device(loader.device)
    if device.type == "cpu" or find_device(gatherable.columns).type != "cpu":
        return gatherable
    if loader._moved is None:
        loader._moved = move(gatherable.columns, device)
    return gatherable._replace(columns=loader._moved)


def begin(loader: Any, position: Position, gatherable: Gatherable | None) -> LoaderPass:
    """Begin a pass of a loader at a position."""
    device = None if loader.device is None else torch.device(loader.device)
    to_device = device is not None and device.type != "cpu"
    if loader._slots is None or loader._slots.owner_pid != os.getpid():
        pinned = loader.pin_memory or (device is not None and device.type == "cuda")
        loader._slots = Slots(
            pinned=pinned and can_pin(),
            max_bytes=loader.max_bytes or DEFAULT_MAX_BYTES,
        )
    states: deque[Any] = deque()
    batches: Iterator[Any]
    if gatherable is None:
        batches = _fetched(loader, position, states)
    else:
        batches = _gathered(loader, gatherable, position)
        to_device = to_device and find_device(gatherable.columns).type == "cpu"
    if device is not None and to_device:
        batches = CopiedBatches(batches, device)
    return LoaderPass(batches, position, loader._stats, states, loader.__len__)


def _indices(loader: Any, position: Position) -> Indices:
    generator = find_generator(loader)
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
            seed = draw_seed(loader.generator)
            source.set_state(state)
        position.sample_seed = seed
    loader._sample_seed = position.sample_seed


def _warn_unpinned(loader: Any) -> None:
    """Warn as torch's iterators do."""
    if loader.pin_memory and not can_pin():
        why = "no accelerator is found, then"
        if torch.accelerator.is_available():
            why = "not supported on MPS now,"
        warnings.warn(
            f"'pin_memory' argument is set as true but {why} device pinned memory won't be used.",
            stacklevel=5,
        )


def _with_keys(indices: Indices, *, keyed: bool) -> Iterator[tuple[Any, Tensor | None]]:
    """Return the batches of indices with the keys that samples draw from."""
    if not keyed:
        return zip(indices.batches(), repeat(None))
    order = indices.order
    return ((batch, order.find_keys(places)) for batch, places in indices.placed_batches())


def _would_persist(loader: Any, position: Position) -> bool:
    """Say whether a new pass follows a loaded state of persistent workers, which draw no seed."""
    is_new = not (position.resumed or position.begun)
    return is_new and position.rng is not None and find_generator(loader) is None


def _is_unread(loader: Any, position: Position) -> bool:
    """Say whether a pass has begun whose sampler draws from the program's generator only later."""
    drawn = position.resumed or position.rng is not None or position.workers_rng is not None
    return position.begun and not drawn and not isinstance(loader.dataset, IterableDataset)


def _gathered(loader: Any, gatherable: Gatherable, position: Position) -> GatherSource:
    """Return the gathered batches, after the warning and draws of torch's iterators."""
    _warn_unpinned(loader)
    workers = loader.num_workers > 0
    again = workers and loader.persistent_workers and loader._began
    position.persist = loader.persistent_workers
    _seed_samples(loader, position, again=again)
    # A resumed pass leaves the program's own draws alone.
    alone = position.resumed or position.begun or _would_persist(loader, position)
    keyed = gatherable.find is not None or any(column.images for column in gatherable.columns)
    sampler = _indices(loader, position)
    indices = _with_keys(sampler, keyed=keyed)
    if not again and (loader.generator is not None or not alone):
        draw_seed(loader.generator)
        if workers:  # torch's begin their sampler once more
            indices = _with_keys(sampler, keyed=keyed)
    position.begun = loader._began = True
    if workers:  # torch's ask for indices before the consumer does
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

    slots, stats = loader._slots, loader._stats
    num_batches = math.inf if workers else sampler.num_left
    return GatherSource(gatherable, indices, slots, stats, loader.max_bytes, make, num_batches)


def _fetched(loader: Any, position: Position, states: deque[Any]) -> Any:
    """Return the batches that torch's iterators make; put the dataset's states into `states`."""
    if position.exhausted:
        if position.dataset is not None:
            loader.dataset.load_state_dict(position.dataset)
        if loader.generator is not None:
            draw_seed(loader.generator)  # as when the pass began
        return iter(())
    workers = loader.num_workers
    if loader._in_threads:
        _warn_unpinned(loader)
    if type(loader.collate_fn) is BatchCollator and (workers == 0 or loader._in_threads):
        loader.collate_fn.lease_from(loader._slots)
    turn, copies = position.turn, has_copies(loader)
    new = loader._inner is None or not loader.persistent_workers
    _seed_samples(loader, position, again=not new)
    if new:
        indices = _indices(loader, position)
        loader._inner = make_inner(loader, indices, position, loader._slots), indices
    elif copies and loader._left is not None:
        position.workers = as_of_pass_before(loader._left.workers)
    inner, indices = loader._inner
    indices.position, indices.skips, inner.generator = position, turn, loader.generator
    seeded = _would_persist(loader, position) or _is_unread(loader, position)
    if seeded and loader.generator is None:  # the program's generator gives no seed again
        inner.generator = torch.Generator()
        inner.generator.set_state(torch.get_rng_state())
    if copies and position.workers is None:
        position.workers = [None] * workers
    position.persist, loader._began = loader.persistent_workers, True
    source = _start(loader, position, inner, states)
    position.begun = True
    return source


def _start(loader: Any, position: Position, inner: Any, states: deque[Any]) -> FetchSource:
    """Return torch's iterator, with the states of dataset and workers at the position."""
    dataset, copies = loader.dataset, has_copies(loader)
    stream, own, default = isinstance(dataset, IterableDataset), position.dataset, None
    if copies and loader.generator is None:
        default = position.workers_rng
        position.workers_rng = torch.get_rng_state() if default is None else default
    alone = inner.generator is None and (position.resumed or position.begun)
    later = position.begun and not stream and loader.num_workers == 0
    order = loader._inner[1].order if stream and loader.num_workers == 0 else None
    before, current.sample = current.sample, None if order is None else (order, 0)
    with generators_kept() if alone else nullcontext():
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
    passed = (replace(position), position.turn) if position.late or not in_order else None
    source = FetchSource(
        iterator, loader._stats, dataset, states, copies, passed, in_order, _order=order
    )
    source.makes_fresh = type(loader.collate_fn) is BatchCollator
    if stream and loader.num_workers == 0:
        with generators_kept():
            source.forward(position)
    if copies and not stream:
        position.dataset = source.ask()["dataset"]
    vars(position).update(source.position)
    return source
