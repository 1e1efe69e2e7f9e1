"""Loaders that a test and the process that resumes them both make."""

from __future__ import annotations

import numpy as np
import torch
from support.loading import Squares, generator
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, TensorDataset

import fastamp

EPOCHS = 2
BATCH = 4
N = 83  # 21 batches
DATASET = TensorDataset(torch.arange(N), torch.arange(N * 3).reshape(N, 3))
TOKENS = fastamp.TokenDataset(np.split(np.arange(N * 5 + 1), [100, 101]), 5, random_offsets=True)


def own_generator():
    return RandomSampler(DATASET, generator=generator(9))


def persistent():
    """Return options by which the seed of workers and orders are drawn from one generator."""
    one = generator(8)
    sampler = RandomSampler(DATASET, replacement=True, generator=one)
    return {"sampler": sampler, "generator": one, "num_workers": 1, "persistent_workers": True}


VARIANTS = {
    "sequential": dict,
    "seed": lambda: {"shuffle": True, "seed": 11},
    "generator": lambda: {"shuffle": True, "generator": generator(12)},
    "drop_last": lambda: {"shuffle": True, "seed": 1, "drop_last": True},
    "DistributedSampler": lambda: {
        "sampler": DistributedSampler(DATASET, num_replicas=2, rank=1, seed=3),
        "batch_size": 2,
    },
    "a sampler's own generator": lambda: {"sampler": own_generator()},
    "a batch sampler's own generator": lambda: {
        "batch_size": 1,
        "batch_sampler": BatchSampler(own_generator(), BATCH, drop_last=False),
    },
    "replacement": lambda: {
        "sampler": RandomSampler(DATASET, replacement=True, generator=generator(4)),
    },
    "a dataset of Python": lambda: {"dataset": Squares(N), "shuffle": True, "seed": 5},
    "Python and a generator": lambda: {
        "dataset": Squares(N),
        "shuffle": True,
        "generator": generator(6),
    },
    "random offsets": lambda: {"dataset": TOKENS, "shuffle": True, "seed": 2},
    "workers that persist": persistent,
    "no batches": lambda: {"dataset": Squares(30), "batch_size": None, "shuffle": True, "seed": 7},
}


def make_loader(variant, num_workers=0):
    options = {"dataset": DATASET, "batch_size": BATCH, "num_workers": num_workers}
    return fastamp.DataLoader(**{**options, **VARIANTS[variant]()})


def run(loader, start=0):
    """Yield the batches of the epochs that are left."""
    for epoch in range(start, EPOCHS):
        loader.set_epoch(epoch)
        yield from loader
