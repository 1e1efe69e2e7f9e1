"""The user's code runs where torch runs it, and a state is that of the loop, not of a thread."""

from __future__ import annotations

import importlib
import json
import random
import threading

import numpy as np
import pytest
import torch
from support.loading import assert_same, ends
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset

import fastamp

prefetching = importlib.import_module("fastamp.data.prefetch")


class Draws(Dataset):
    """Draws from the program's generators, and notes its thread."""

    def __init__(self, length=12):
        self.length, self.threads = length, set()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.threads.add(threading.get_ident())
        return index, torch.rand(1), np.random.rand(), random.random()  # noqa: NPY002


class DrawsStream(IterableDataset):
    def __init__(self, length=12):
        self.items = Draws(length)

    def __iter__(self):
        return (self.items[i] for i in range(len(self.items)))


def run(loader):
    """Return what a loop gets that draws, too, between its batches."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    draw = np.random.rand
    return [(batch, torch.rand(1), draw(), random.random()) for batch in loader]


@pytest.mark.parametrize("kind", [Draws, DrawsStream])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_draws_of_loop_and_dataset_are_torchs_on_another_device(kind, num_workers):
    dataset = kind()
    options = {"batch_size": 2, "num_workers": num_workers}
    if kind is Draws:
        options["shuffle"] = True
    with_device = run(fastamp.DataLoader(dataset, device="meta", **options))
    plain = run(fastamp.DataLoader(dataset, **options))
    for ours, theirs in zip(plain, run(TorchDataLoader(dataset, **options)), strict=True):
        assert_same(ours[1:], theirs[1:])
        if num_workers == 0:  # else processes are seeded by what torch draws for them
            assert_same(ours[0], theirs[0])
    for ours, theirs in zip(with_device, plain, strict=True):
        assert_same(ours[1:], theirs[1:])
    made_by = getattr(dataset, "items", dataset).threads
    assert made_by <= {threading.get_ident()}


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("kind", ["rows", "gathered", "stream"])
def test_a_state_behind_prefetch_is_that_of_the_last_batch_delivered(kind, depth):
    def make():
        dataset = {"rows": Draws(20), "gathered": torch.arange(20.0), "stream": DrawsStream(20)}
        options = {} if kind == "stream" else {"shuffle": True, "seed": 1}
        return fastamp.DataLoader(dataset[kind], 2, **options)

    def numbers(batches):
        return [(batch if kind == "gathered" else batch[0]).tolist() for batch in batches]

    whole = numbers(make())
    loader = make()
    for taken, _ in enumerate(fastamp.prefetch(loader, depth=depth), 1):
        assert ends(lambda: loader._stats.batches == min(10, taken + depth))  # noqa: B023
        state = json.loads(json.dumps(loader.state_dict()))
        again = make()
        again.load_state_dict(state)
        assert numbers(again) == whole[taken:]
    assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize("persistent", [False, True])
def test_a_pass_that_is_left_shares_nothing_with_the_next_one(persistent):
    options = {"num_workers": 2, "persistent_workers": persistent, "device": "meta"}
    loader = fastamp.DataLoader(Draws(40), 2, **options)
    before = threading.active_count()
    for _ in range(4):
        for x, *_ in loader:
            assert x.device.type == "meta"
            break
    loader.device = None
    assert [x.tolist() for x, *_ in loader] == [[i, i + 1] for i in range(0, 40, 2)]
    assert threading.active_count() <= before + 2  # torch's, of its queues


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_copy_that_fails_is_raised_in_its_batchs_place(in_thread, monkeypatch):
    start = prefetching.Moves.start

    def fail(copies, batch):
        if 2 in batch:
            msg = "out of memory"
            raise RuntimeError(msg)
        return start(copies, batch)

    monkeypatch.setattr(prefetching.Moves, "start", fail)
    loader = fastamp.DataLoader(range(6), 1, device=None if in_thread else "meta")
    batches = iter(fastamp.prefetch(loader, "meta") if in_thread else loader)
    for number in range(6):
        if number == 2:
            with pytest.raises(RuntimeError, match="out of memory"):
                next(batches)
        else:
            next(batches)
        assert loader.state_dict()["batch"] == number + 1


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "worker": "thread"}])
@pytest.mark.parametrize("gathered", [False, True])
def test_nothing_is_pinned_on_apples_gpus_as_by_torch(options, gathered, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    dataset = torch.arange(6) if gathered else range(6)
    loader = fastamp.DataLoader(dataset, 3, pin_memory=True, **options)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]


def test_an_init_function_that_asks_torch_in_a_thread_is_told_whom_to_ask():
    def init(_worker):
        return torch.utils.data.get_worker_info().dataset

    loader = fastamp.DataLoader(range(6), num_workers=1, worker="thread", worker_init_fn=init)
    with pytest.raises(AttributeError, match=r"call fastamp\.get_worker_info\(\), which knows"):
        next(iter(loader))
