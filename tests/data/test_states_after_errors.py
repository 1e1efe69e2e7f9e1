"""States after an error: what came in place of a batch counts, and what came in place of none."""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress

import pytest
import torch
from support.loading import Rows
from torch.utils.data import IterableDataset

import fastamp

# torch's handler may interrupt torch's own look at its files, and leave one to the collector.
dies = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Late(Rows):
    """Numbers; what `act` does for number 4 comes once `event` is set."""

    def __init__(self, act=int):
        super().__init__(12, self.find)
        self.act, self.event = act, torch.multiprocessing.Event()

    def find(self, index):
        if index == 4:
            assert self.event.wait(60)
            self.act(1)
        return index


class LateStream(IterableDataset):
    def __init__(self, act=int):
        self.rows = Late(act)
        self.event = self.rows.event

    def __deepcopy__(self, _):
        return self

    def __iter__(self):
        return map(self.rows.find, range(12))


def count_rest(loader, dataset, **options):
    """Return how many batches another loader gives from this one's state on."""
    dataset.event.set()
    again = fastamp.DataLoader(dataset, 2, num_workers=1, **options)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    return len([*again])


@pytest.mark.pairwise
@pytest.mark.parametrize("make", [Late, LateStream])
@pytest.mark.parametrize("worker", ["thread", "process"])
@pytest.mark.parametrize("device", [None, "meta"])
def test_a_timeout_is_not_counted_as_a_batch(make, worker, device):
    dataset = make()
    options = {"worker": worker, "device": device}
    loader = fastamp.DataLoader(dataset, 2, num_workers=1, timeout=0.2, **options)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.2 seconds"):
            next(batches)
    assert loader.state_dict()["batch"] == 2
    dataset.event.set()

    took = []
    while not took:
        with suppress(RuntimeError):  # as before, if the system is busy
            took.append(next(batches))
    assert loader.state_dict()["batch"] == 3
    assert count_rest(loader, dataset, **options) == 3


@dies
@pytest.mark.parametrize("make", [Late, LateStream])
@pytest.mark.parametrize("device", [None, "meta"])
def test_the_batch_of_a_worker_that_dies_comes_after_resuming(make, device):
    dataset = make(os._exit)
    loader = fastamp.DataLoader(dataset, 2, num_workers=1, device=device)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    threading.Timer(0.2, dataset.event.set).start()
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        next(batches)
    del batches
    assert loader.state_dict()["batch"] == 2
    assert count_rest(loader, make(), device=device) == 4


def test_a_timeout_of_a_loader_that_a_dataset_reads_counts_as_its_item():
    dataset = Late()

    def read(_):
        inner = fastamp.DataLoader(dataset, 12, num_workers=1, worker="thread", timeout=0.1)
        return next(iter(inner))

    loader = fastamp.DataLoader(Rows(3, read))
    with pytest.raises(RuntimeError, match="timed out"):
        next(iter(loader))
    assert loader.state_dict()["batch"] == 1
    dataset.event.set()
