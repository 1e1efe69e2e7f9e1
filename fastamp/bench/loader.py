"""The loader alone: torch's DataLoader against fastamp's, on datasets that lie in memory."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import fastamp
from fastamp.bench.cases import race_cases
from fastamp.bench.command import add_command
from fastamp.bench.compare import AGAIN, Plan
from fastamp.bench.record import Task
from fastamp.train.text import load_corpus

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from fastamp.bench.cases import Arms
    from fastamp.bench.command import Subparsers

    Batches = Callable[[], Iterator[list[torch.Tensor]]]

BATCH_SIZE = 32
BATCHES = 64  # of a visit
BLOCK_SIZE = 128
FEATURES = 256
PLAN = Plan(rounds=4000, window=3, warmup=12, half_width=0.01, limit_s=8.0)


def add_parser(subparsers: Subparsers) -> None:
    """Add the command `loader` and its options."""
    add_command(subparsers, "loader", _prepare, __doc__, metrics="speedup/tokens, speedup/tensors")


def make_sampler(dataset: Any, samples: int, seed: int) -> RandomSampler:
    """Return a sampler of a short pass; with replacement, or it would permute the whole dataset."""
    generator = torch.Generator().manual_seed(seed)
    return RandomSampler(dataset, replacement=True, num_samples=samples, generator=generator)


def stock_batches(dataset: Any, sampler: RandomSampler, batch_size: int, device: str) -> Batches:
    """Return what begins a pass of torch's loader, pinned and copied without a wait on a GPU."""
    loader = DataLoader(dataset, batch_size, sampler=sampler, pin_memory=device == "cuda")

    def batches() -> Iterator[list[torch.Tensor]]:
        for batch in loader:
            yield [part.to(device, non_blocking=True) for part in batch]

    return batches


def fastamp_batches(dataset: Any, sampler: RandomSampler, batch_size: int, device: str) -> Batches:
    """Return what begins a pass of fastamp's loader."""
    loader: fastamp.DataLoader[Any] = fastamp.DataLoader(
        dataset, batch_size, sampler=sampler, device=device
    )
    return lambda: iter(loader)


def _drain(batches: Batches) -> None:
    deque(batches(), maxlen=0)  # which keeps none


def check(stock: Batches, ours: Batches) -> None:
    """Compare all batches of a pass, before anything is timed.

    Raises:
        AssertionError: they differ.
    """
    for theirs, mine in zip(stock(), ours(), strict=True):
        torch.testing.assert_close(list(mine), theirs, rtol=0, atol=0)


def _prepare(args: argparse.Namespace) -> Task:
    corpus = load_corpus(None, block_size=BLOCK_SIZE)
    samples = BATCHES * BATCH_SIZE

    def make(name: str) -> Arms:
        if name == "tokens":
            dataset: Any = fastamp.TokenDataset(corpus.train, BLOCK_SIZE)
        else:
            generator = torch.Generator().manual_seed(args.seed)
            rows = torch.randn(samples, FEATURES, generator=generator)
            dataset = TensorDataset(rows, torch.arange(samples))
        kinds = {"stock": stock_batches, AGAIN: stock_batches, "fastamp": fastamp_batches}
        sides = {
            arm: load(dataset, make_sampler(dataset, samples, args.seed), BATCH_SIZE, args.device)
            for arm, load in kinds.items()
        }
        check(sides["stock"], sides["fastamp"])
        return {arm: partial(_drain, batches) for arm, batches in sides.items()}

    rows = f"windows of {BLOCK_SIZE} bytes, and rows of {FEATURES} floats"
    notes = [f"{BATCHES} batches of {BATCH_SIZE} in a visit: {rows}; no workers"]
    return Task(
        job={"data": corpus.sha256, "seed": args.seed},
        run=lambda: race_cases(args, PLAN, ("tokens", "tensors"), make, notes=notes),
    )
