"""What ranks do with loaders that Accelerate has prepared: functions for their processes."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import accelerate
import torch
import torch.distributed as dist
from support.loading import generator
from support.streams import Stream
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, TensorDataset
from torch.utils.data import DataLoader as TorchDataLoader

import fastamp
from fastamp.integrations.accelerate import prepare

if TYPE_CHECKING:
    from collections.abc import Iterator


def make(**options: Any) -> accelerate.Accelerator:
    """Return an Accelerator with fastamp in it, `accumulate` steps and the loaders' options."""
    steps = options.pop("accumulate", 1)
    config = accelerate.utils.DataLoaderConfiguration(**options)
    made = accelerate.Accelerator(
        cpu=True, dataloader_config=config, gradient_accumulation_steps=steps
    )
    prepare(made)
    return made


def forget() -> None:
    """Forget the Accelerators that were made, whose state is shared."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@contextlib.contextmanager
def accelerator(**options: Any) -> Iterator[accelerate.Accelerator]:
    """Yield an Accelerator over the ranks, with `accumulate` steps and the loaders' options."""
    rank, count = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    try:
        yield make(**options)
    finally:
        forget()
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]


def rows(length):
    return TensorDataset(torch.arange(length))


# A dataset and a loader's arguments.
LOADERS = {
    "in order": lambda n: {"dataset": rows(n), "batch_size": 4},
    "drop_last": lambda n: {"dataset": rows(n), "batch_size": 4, "drop_last": True},
    "shuffled by the program": lambda n: {"dataset": rows(n), "batch_size": 4, "shuffle": True},
    "a generator": lambda n: {
        "dataset": rows(n),
        "batch_size": 4,
        "shuffle": True,
        "generator": generator(8 + dist.get_rank()),  # the first rank's is used
    },
    "a sampler": lambda n: {
        "dataset": rows(n),
        "batch_size": 4,
        "sampler": RandomSampler(rows(n), generator=generator(7)),
    },
    "a sampler that is told the epoch": lambda n: {
        "dataset": rows(n),
        "batch_size": 4,
        "sampler": DistributedSampler(range(n), 1, 0),
    },
    "a batch sampler": lambda n: {
        "dataset": rows(n),
        "batch_sampler": BatchSampler(range(n - 1, -1, -1), 4, drop_last=False),
    },
    "indices of whole batches": lambda n: {
        "dataset": rows(n),
        "batch_size": None,
        "sampler": BatchSampler(range(n - 1, -1, -1), 4, drop_last=False),
    },
    "a stream": lambda n: {"dataset": Stream([(i,) for i in range(n)]), "batch_size": 4},
}


def both(name, length, options):
    """Return what a rank gets through fastamp's loader, and through torch's."""
    return [watch(kind, name, length, options) for kind in (fastamp.DataLoader, TorchDataLoader)]


def watch(kind, name, length, options):
    """Return each batch of two epochs, with Accelerate's state and what it gathers for metrics."""
    torch.manual_seed(3)
    found = []
    with accelerator(accumulate=2, **options) as own:
        model = torch.nn.Linear(1, 1)
        loader = own.prepare(kind(**LOADERS[name](length)))
        if name != "a stream":
            found.append((len(loader), loader.total_batch_size, loader.total_dataset_length))
        for _ in range(2):
            for (batch,) in loader:
                state = own.gradient_state
                with own.accumulate(model):
                    synced = own.sync_gradients
                gathered = None
                if options.get("even_batches", True):
                    gathered = own.gather_for_metrics(batch).tolist()
                end = state.end_of_dataloader, state.remainder
                found.append((batch.tolist(), synced, *end, gathered))
        return found


def train(shard):
    """Return the samples of two epochs, where steps were due, and whether the loader is ours."""
    with accelerator(accumulate=3) as own:
        model = torch.nn.Linear(1, 1)
        loader = own.prepare(fastamp.DataLoader(rows(64), 4, shuffle=True, seed=5, shard=shard))
        assert own.prepare(loader) is loader
        epochs = []
        for _ in range(2):
            seen, synced = [], []
            for (batch,) in loader:
                with own.accumulate(model):
                    synced.append(own.sync_gradients)
                seen += batch.tolist()
            epochs.append((seen, synced))
        return epochs, isinstance(loader, fastamp.DataLoader) and loader.stats().path


def resume(state, count, seed):
    """Take batches, from a state on if there is one; return them and the state then."""
    torch.manual_seed(1 if state is None else 2)
    with accelerator() as own:
        loader = own.prepare(fastamp.DataLoader(rows(64), 4, shuffle=True, seed=seed, shard=True))
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)  # whose end would end the epoch
        seen = [row for _, (batch,) in zip(range(count), batches, strict=False) for row in batch]
        return [int(row) for row in seen], loader.state_dict()


def expected_sizes(name: str, length: int) -> tuple[int, int, int]:
    """Return the batches of one of two ranks, and the samples of a batch and of all."""
    count = length // 2 // 4 if name == "drop_last" else -(-length // 8)
    return count, 8, length


def expected_rows(name: str, length: int, rank: int) -> list[int]:
    """Return the rows of one of two ranks, in order: DistributedSampler's."""
    drops = name == "drop_last"
    rows = [*DistributedSampler(range(length), 2, rank, shuffle=False, drop_last=drops)]
    return rows[: len(rows) // 4 * 4] if drops else rows
