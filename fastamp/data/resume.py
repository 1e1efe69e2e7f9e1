"""What a loader's state holds of the loader and its dataset, and whether it fits another loader."""

from inspect import isgeneratorfunction
from typing import Any

import torch
from torch.utils.data import IterableDataset

from fastamp.data.position import Position
from fastamp.data.shuffle import is_long
from fastamp.data.states import find_save, has_copies


def ask_dataset(loader: Any, position: Position) -> None:
    """Put the state of a dataset that waits for its next pass into its position."""
    if position.resumed or position.iterator is not None:
        return
    copies, save = has_copies(loader), find_save(loader.dataset)
    stream = isinstance(loader.dataset, IterableDataset)
    if position.dataset is None and save and (not stream or (loader._began and not copies)):
        position.dataset = save()
    if copies and loader.generator is None and position.workers_rng is None:
        position.workers_rng = torch.get_rng_state()
    if position.workers is not None and not position.begun and position.rng is None:
        # Workers that persist are not seeded anew: the sampler draws first.
        source = loader._sampler_generator() or torch.default_generator
        position.rng = source.get_state()


def identity(loader: Any) -> dict[str, Any]:
    """Return what two loaders have in common whose states are the same."""
    batches, shard, data = loader._batches, loader._shard, loader.dataset
    size, seed = getattr(batches, "batch_size", None), loader.seed
    source = "torch's default generator" if loader._sampler_generator() is None else "a generator"
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


def check_workers(loader: Any, position: Position) -> None:
    """Refuse a place in an epoch where other workers have their own states of the dataset."""
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
            f"state: it is of num_workers={count}, the loader's is {loader.num_workers}: each "
            f"worker has its own part of {type(dataset).__name__}"
        )
        raise ValueError(msg)
    position.workers = None
