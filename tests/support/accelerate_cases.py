"""Accelerators on a CPU, and what ranks do with loaders that these have prepared."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from support.loading import generator
from support.streams import Stream
from torch.utils.data import BatchSampler, DistributedSampler, TensorDataset

import fastamp
from fastamp.integrations.accelerate import prepare

if TYPE_CHECKING:
    from collections.abc import Iterator

accelerate = pytest.importorskip("accelerate")


def make(**options: Any) -> Any:
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


@pytest.fixture
def fresh_state() -> Iterator[None]:
    """Forget the Accelerators of a test."""
    yield
    forget()


def use_fp16(accelerator: Any) -> Any:
    """Give an Accelerator on a CPU the scaler that it has only on a GPU."""
    accelerator.state._mixed_precision = "fp16"
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    return accelerator


@contextlib.contextmanager
def over_ranks(**options: Any) -> Iterator[Any]:
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
    "a generator": lambda n: {
        "dataset": rows(n),
        "batch_size": 4,
        "shuffle": True,
        "generator": generator(8 + dist.get_rank()),  # the first rank's is used
    },
    "a batch sampler": lambda n: {
        "dataset": rows(n),
        "batch_sampler": BatchSampler(range(n - 1, -1, -1), 4, drop_last=False),
    },
    "a stream": lambda n: {"dataset": Stream([(i,) for i in range(n)]), "batch_size": 4},
}


def watch(kind, name, length, options):
    """Return each batch of two epochs, with Accelerate's state and what it gathers for metrics."""
    torch.manual_seed(3)
    seen = []
    with over_ranks(accumulate=2, **options) as accelerator:
        model = torch.nn.Linear(1, 1)
        loader = accelerator.prepare(kind(**LOADERS[name](length)))
        if name != "a stream":
            seen.append((len(loader), loader.total_batch_size))
        for _ in range(2):
            for (batch,) in loader:
                state = accelerator.gradient_state
                with accelerator.accumulate(model):
                    synced = accelerator.sync_gradients
                gathered = None
                if options.get("even_batches", True):
                    gathered = accelerator.gather_for_metrics(batch).tolist()
                end = state.end_of_dataloader, state.remainder
                seen.append((batch.tolist(), synced, *end, gathered))
        return seen


def train(shard):
    """Return the samples of two epochs, where steps were due, and whether the loader is ours."""
    with over_ranks(accumulate=3) as accelerator:
        model = torch.nn.Linear(1, 1)
        loader = fastamp.DataLoader(rows(64), 4, shuffle=True, seed=5, shard=shard)
        loader = accelerator.prepare(loader)
        assert accelerator.prepare(loader) is loader
        epochs = []
        for _ in range(2):
            seen, synced = [], []
            for (batch,) in loader:
                with accelerator.accumulate(model):
                    synced.append(accelerator.sync_gradients)
                seen += batch.tolist()
            epochs.append((seen, synced))
        return epochs, isinstance(loader, fastamp.DataLoader) and loader.stats().path


def resume(state, count):
    """Take batches, from a state on if there is one; return them and the state then."""
    torch.manual_seed(1 if state is None else 2)
    with over_ranks() as accelerator:
        loader = fastamp.DataLoader(rows(64), 4, shuffle=True, seed=5, shard=True)
        loader = accelerator.prepare(loader)
        if state is not None:
            loader.load_state_dict(state)
        batches = iter(loader)  # whose end would end the epoch
        seen = [row for _, (batch,) in zip(range(count), batches, strict=False) for row in batch]
        return [int(row) for row in seen], loader.state_dict()


def expected_sizes(name: str, length: int) -> tuple[int, int]:
    """Return how many batches one of two ranks has, and the samples of a batch of both."""
    count = length // 2 // 4 if name == "drop_last" else -(-length // 8)
    return count, 8


def expected_rows(name: str, length: int, rank: int) -> list[int]:
    """Return the rows of one of two ranks, in order: DistributedSampler's."""
    drops = name == "drop_last"
    rows = [*DistributedSampler(range(length), 2, rank, shuffle=False, drop_last=drops)]
    return rows[: len(rows) // 4 * 4] if drops else rows
