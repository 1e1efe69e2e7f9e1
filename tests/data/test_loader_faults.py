"""Faults that the loader had, each with its whole kind: states, draws, and what others rely on."""

from __future__ import annotations

import importlib
import json
import random
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from support.loading import Squares, assert_same
from support.stream_model import Model
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, Sampler

import fastamp
from fastamp.data.copies import CudaCopies
from fastamp.data.sample_rng import generators_kept


class Box(torch.Tensor):
    """A subclass, as torchvision's boxes and masks."""


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_subclass_of_tensor_stays_what_it_is_on_a_device(device):
    batches = [{"box": torch.ones(3).as_subclass(Box), "x": torch.ones(2)}]
    for batch in fastamp.prefetch(batches, device):
        assert type(batch["box"]) is Box
        assert type(batch["x"]) is torch.Tensor


def test_a_subclass_of_tensor_is_moved_by_its_own_method_to_cuda():
    model = Model(0)
    with model.installed(importlib.import_module("fastamp.data.copies")):
        copies = CudaCopies(torch.device("cuda", 0))
        box, plain = torch.ones(3).as_subclass(Box), torch.ones(3)
        _, copied = copies.start([box, plain])
        assert [type(tensor) for tensor in copied.others] == [Box]
        assert [type(tensor) for tensor in copied.tensors] == [torch.Tensor]


def test_a_stream_without_a_state_may_be_resumed_again_and_again():
    class Shared(IterableDataset):
        def __iter__(self):
            info = torch.utils.data.get_worker_info()
            return iter(range(24) if info is None else range(info.id, 24, info.num_workers))

    def make():
        return fastamp.DataLoader(Shared(), 2)

    whole, taken, state = [*make()], [], make().state_dict()
    for count in (3, 1, 4):
        loader = make()
        loader.load_state_dict(json.loads(json.dumps(state)))
        batches = iter(loader)
        taken += [next(batches) for _ in range(count)]
        state = loader.state_dict()
    loader = make()
    loader.load_state_dict(state)
    assert_same([*taken, *loader], whole)


def draw_all():
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002


class Drawing(Sampler):
    """Draws from all generators of the program as it goes."""

    def __len__(self):
        return 12

    def __iter__(self):
        for row in range(12):
            draw_all()
            yield row


@pytest.mark.parametrize("dataset", [torch.arange(12), Squares(12)], ids=["arrays", "python"])
def test_a_sampler_that_draws_as_it_goes_leaves_the_loops_own_draws_alone(dataset):
    def seed():
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)

    def loop(loader):
        return [draw_all() for _ in loader], draw_all()

    seed()
    expected = loop(TorchDataLoader(dataset, 2, sampler=Drawing()))
    seed()
    assert loop(fastamp.DataLoader(dataset, 2, sampler=Drawing())) == expected
    seed()
    loader = fastamp.DataLoader(dataset, 2, sampler=Drawing())
    batches, drawn = iter(loader), []
    for _ in range(3):
        next(batches)
        drawn.append(draw_all())
    state = loader.state_dict()
    with generators_kept():
        rest = loop(batches)
    assert (drawn + rest[0], rest[1]) == expected
    resumed = fastamp.DataLoader(dataset, 2, sampler=Drawing())
    resumed.load_state_dict(state)
    assert loop(resumed) == rest


@pytest.mark.parametrize("dataset", [torch.arange(8), Squares(8)], ids=["arrays", "python"])
def test_a_subclass_wraps_the_pass_as_with_torchs_loader(dataset):
    class Wrapped(fastamp.DataLoader):
        def _get_iterator(self):
            return (("wrapped", batch) for batch in super()._get_iterator())

    assert [word for word, _ in Wrapped(dataset, 4)] == ["wrapped"] * 2


class Keeps(IterableDataset):
    """A stream that draws from torch's generator, and has its state in its own."""

    place = 0

    def __iter__(self):
        while self.place < 6:
            self.place += 1
            yield torch.rand(())
        self.place = 0

    def state_dict(self):
        return {"place": self.place, "rng": torch.get_rng_state()}

    def load_state_dict(self, state):
        self.place = state["place"]
        torch.set_rng_state(state["rng"])


def test_a_stream_that_restores_generators_in_its_own_state_draws_on():
    loader = fastamp.DataLoader(Keeps(), 2)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    expected = [*batches]
    torch.manual_seed(99)
    resumed = fastamp.DataLoader(Keeps(), 2)
    resumed.load_state_dict(state)
    assert_same([*resumed], expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_that_is_longer_than_it_says_is_told_when_torch_tells_it(num_workers):
    class Told(IterableDataset):
        def __len__(self):
            return 3

        def __iter__(self):
            return iter(range(4))

    def warned_at(make):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = make(Told(), None, num_workers=num_workers)
            assert len(loader) == 3
            return [len([w for w in caught if "IterableDataset" in str(w.message)]) for _ in loader]

    expected = warned_at(TorchDataLoader)
    assert warned_at(fastamp.DataLoader) == expected
    assert warned_at(partial(fastamp.DataLoader, seed=1)) == expected
    assert expected[-1] > 0
