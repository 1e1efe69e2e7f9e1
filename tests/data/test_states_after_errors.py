"""States after an error: what came in place of a batch counts, and what came in place of none."""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress

import pytest
import torch
from support.loading import Rows
from torch.utils.data import Dataset, IterableDataset

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

    def __iter__(self):
        return map(self.rows.find, range(12))


def count_rest(loader, dataset, **options):
    """Return how many batches another loader gives from this one's state on."""
    dataset.event.set()
    again = fastamp.DataLoader(dataset, 2, num_workers=1, **options)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    return len([*again])


def wait_for(batches):
    """Take the next batch, however often the wait for it times out on a busy system."""
    while True:
        with suppress(RuntimeError):
            return next(batches)


@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize(
    ("make", "worker"), [(Late, "thread"), (Late, "process"), (LateStream, "process")]
)
def test_a_timeout_is_not_counted_as_a_batch(make, worker, device):
    dataset = make()
    options = {"worker": worker, "device": device}
    loader = fastamp.DataLoader(dataset, 2, num_workers=1, timeout=0.2, **options)
    batches = iter(loader)
    wait_for(batches)
    wait_for(batches)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.2 seconds"):
            next(batches)
    assert loader.state_dict()["batch"] == 2
    dataset.event.set()
    wait_for(batches)
    assert loader.state_dict()["batch"] == 3
    assert count_rest(loader, dataset, **options) == 3


@dies
@pytest.mark.parametrize(("make", "device"), [(Late, "meta"), (LateStream, None)])
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


class Counted(Dataset):
    """Numbers with the worker and how many it has made; a few raise."""

    def __init__(self):
        self.made = 0

    def __len__(self):
        return 18

    def __getitem__(self, index):
        info = fastamp.get_worker_info()
        self.made += 1
        if index in (3, 4, 11):
            msg = f"number {index}"
            raise LookupError(msg)
        return index, 0 if info is None else info.id, self.made

    def state_dict(self):
        return {"made": self.made}

    def load_state_dict(self, state):
        self.made = state["made"]


class Broken(Counted):
    """Has batches that cannot be collated."""

    def __getitem__(self, index):
        self.made += 1
        return "text" if index in (3, 5, 11) else index


def take(batches, most=100):
    """Return batches, and errors in their places."""
    taken = []
    while len(taken) < most:
        with suppress(LookupError, TypeError):
            batch = next(batches, None)
            if batch is None:
                break
            taken.append([part.tolist() for part in batch])
            continue
        taken.append("error")
    return taken


@pytest.mark.pairwise
@pytest.mark.parametrize("make", [Counted, Broken])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("prefetched", [False, True])
def test_a_dataset_with_a_state_resumes_after_errors(make, num_workers, prefetched):
    def make_loader():
        return fastamp.DataLoader(make(), 2, num_workers=num_workers)

    def begin(loader):
        return iter(fastamp.prefetch(loader) if prefetched else loader)

    whole = take(begin(make_loader()))
    assert len(whole) > 8
    assert len({str(each) for each in whole}) > 6
    batches = begin(loader := make_loader())
    seen, states = [], []
    for _ in whole:
        seen += take(batches, 1)
        states.append(json.dumps(loader.state_dict()))
    for stop in (1, 2, 3, 5, 6, 7):
        loader = make_loader()
        loader.load_state_dict(json.loads(states[stop - 1]))
        rest = take(begin(loader))
        assert seen[:stop] + rest == whole


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
