"""Saves and loads the state of a loader and its dataset, and checks that it fits the loader."""

from dataclasses import replace
from inspect import isgeneratorfunction
from typing import Any

import torch
from torch.utils.data import IterableDataset

from fastamp.data.indices import find_generator
from fastamp.data.position import Position, encode, read_position
from fastamp.data.shuffle import is_long
from fastamp.data.states import find_save, has_copies

_STATE_VERSION = 1


def _check_resumable(loader: Any) -> None:
    """Raise an error for a dataset whose position the loader cannot know."""
    dataset, num_workers = loader.dataset, loader.num_workers
    name = type(dataset).__name__
    if not isinstance(dataset, IterableDataset):
        if loader._in_threads and find_save(dataset) is not None:
            msg = (
                f"worker={loader.worker!r}: {name} has a state_dict, and threads read ahead of it "
                "in any order; use worker='process' to save and load it"
            )
            raise TypeError(msg)
        return
    if hasattr(dataset, "state_dict") and find_save(dataset) is None:
        msg = (
            f"dataset: the state_dict of {name} takes arguments, so its position is unknown; save "
            "and load the dataset's own state beside the loader"
        )
        raise TypeError(msg)
    if num_workers > 0 and not has_copies(loader):
        msg = (
            f"num_workers={num_workers}: {name} is a data pipe, and its position is known to "
            "its workers only; use num_workers=0 to save and load it"
        )
        raise TypeError(msg)


def save(loader: Any) -> dict[str, Any]:
    """Return the state of a loader: see `DataLoader.state_dict`."""
    _check_resumable(loader)
    if loader._shard is not None and loader.num_workers > 0 and not loader.in_order:
        msg = "in_order=False: how far all ranks have come is unknown where batches are late"
        raise TypeError(msg)
    position = (loader._last or loader._next).now()
    generator, own = loader.generator, find_generator(loader)
    if generator is None or loader.seed is not None or loader._shard is not None:
        position.generator = None
    elif position.generator is None:
        position.generator = generator.get_state()
    if position.rng is None and own is not None and own is not generator:
        position.rng = own.get_state()
    _ask_dataset(loader, position)
    if loader._shard is not None:
        at_once = getattr(loader._batches, "batch_size", 1) * loader._shard.num_replicas
        had = position.consumed + position.batch * at_once
        position.batch, position.consumed = 0, min(had, len(loader.dataset))
    return {
        "version": _STATE_VERSION,
        **_identity(loader),
        "told_epoch": loader._told_epoch,
        **encode(position),
    }


def load(loader: Any, state: Any) -> None:
    """Let a loader resume from a state: see `DataLoader.load_state_dict`."""
    version = state.get("version") if isinstance(state, dict) else None
    if type(version) is not int or version != _STATE_VERSION:
        msg = f"state: expected what DataLoader.state_dict returns, version {_STATE_VERSION}"
        raise ValueError(msg)
    _check_resumable(loader)
    for name, ours in _identity(loader).items():
        value = state.get(name)
        if type(value) is not type(ours) or value != ours:
            msg = f"state: its {name} is {value!r}, the loader's {ours!r}"
            raise ValueError(msg)
    position, told_epoch = read_position(state)
    if position.dataset is not None and not hasattr(loader.dataset, "load_state_dict"):
        kind = type(loader.dataset).__name__
        msg = f"state: it has the state of a dataset, and {kind} has no load_state_dict"
        raise ValueError(msg)
    _check_workers(loader, position)
    if told_epoch is not None:
        loader.set_epoch(told_epoch)
    if position.generator is not None and loader.generator is not None:
        loader.generator.set_state(position.generator)
    loader._begin_at(replace(position, generator=None))
    loader._last = loader._inner = None  # workers have moved on


def _ask_dataset(loader: Any, position: Position) -> None:
    """Add the dataset's state to a position at which no batch is delivered yet."""
    has_drawn = position.resumed or position.begun or position.rng is not None
    if loader.persistent_workers and loader._began and not has_drawn:
        # Workers that persist are not seeded anew: the sampler draws first.
        position.rng = (find_generator(loader) or torch.default_generator).get_state()
    if position.resumed or position.iterator is not None:
        return
    copies, save = has_copies(loader), find_save(loader.dataset)
    stream = isinstance(loader.dataset, IterableDataset)
    if position.dataset is None and save and (not stream or (loader._began and not copies)):
        position.dataset = save()
    if copies and loader.generator is None and position.workers_rng is None:
        position.workers_rng = torch.get_rng_state()


def _identity(loader: Any) -> dict[str, Any]:
    """Return what two loaders must have in common for one to load the other's state."""
    batches, shard, data = loader._batches, loader._shard, loader.dataset
    size, seed = getattr(batches, "batch_size", None), loader.seed
    source = "torch's default generator" if find_generator(loader) is None else "a generator"
    if shard is not None:
        size, seed, source = None, shard.seed, "the seed" if shard.shuffle else "nothing"
        if shard.shuffle and is_long(data):
            source = "the seed, by a Feistel network"
    return {
        "sampler": type(getattr(batches, "sampler", batches)).__name__,
        "batch_size": size,
        "drop_last": getattr(batches, "drop_last", False),
        "length": None if isinstance(data, IterableDataset) else len(data),
        "seed": seed,
        "source of randomness": source,
    }


def _check_workers(loader: Any, position: Position) -> None:
    """Raise an error if, in the middle of an epoch, another number of workers has own states."""
    count, dataset = len(position.workers or ()), loader.dataset
    begin = getattr(type(dataset), "__iter__", None)
    if position.iterator is not None and (begin is None or isgeneratorfunction(begin)):
        msg = f"state: its iterator: that of {type(dataset).__name__} has no load_state_dict"
        raise ValueError(msg)
    has_state = isinstance(dataset, IterableDataset) or find_save(dataset) is not None
    if count == loader.num_workers or not has_state:
        return
    if position.resumed:
        msg = (
            f"state: it was saved with num_workers={count}, the loader's is {loader.num_workers}: "
            f"each worker has its own part of {type(dataset).__name__}"
        )
        raise ValueError(msg)
    position.workers = None
