"""Datasets that in_memory reads, and what ranks do with them, importable in their processes."""

from __future__ import annotations

from collections import Counter

import torch
from support.loading import assert_same, generator
from torch.utils.data import DataLoader, Dataset

import fastamp

LENGTH = 37


class Counted(Dataset):
    """A dataset of the items of a function, which counts how often each is read."""

    def __init__(self, get, length=LENGTH):
        self.get, self.length, self.reads = get, length, Counter()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.reads[index] += 1
        return self.get(index)


def batches(kind, dataset, **options):
    """Return a shuffled epoch, in an order that each call repeats."""
    return list(kind(dataset, 8, shuffle=True, generator=generator(3), **options))


def assert_loads_as(made, original):
    """Compare batches with those of torch's loader over the original."""
    loader = fastamp.DataLoader(made, 8, shuffle=True, generator=generator(3))
    assert loader.stats().path.startswith("gathered")
    assert_same(list(loader), batches(DataLoader, original))
    assert_same(batches(DataLoader, made), batches(DataLoader, original))


def keep_over_ranks(path, bad):
    """Keep a dataset in a folder; return how often this rank has read item 2."""
    dataset = Counted(lambda i: i if i != bad else 1 / 0)
    made = fastamp.in_memory(dataset, path)
    assert_loads_as(made, dataset)
    return dataset.reads[2]


def fail_on(rank, path):
    """Fail on one rank; return what is raised here."""
    mine = torch.distributed.get_rank() == rank
    dataset = Counted(lambda i: {}[i] if mine and i == 2 - 2 * rank else i)
    try:
        fastamp.in_memory(dataset, path)
    except Exception as error:  # noqa: BLE001
        return repr(error)
    return None
