"""Passes over a loader, side by side and broken off; copies of a loader; and its memory."""

from __future__ import annotations

import copy
import inspect
import pickle
import random

import numpy as np
import pytest
import torch
from support.loading import Squares, assert_same, make_array
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import fastamp
from fastamp.data.sample_rng import generators_kept
from fastamp.data.structure import map_tensors

N = 600
BATCH = 2  # 300 batches
X = make_array(torch.float32, N, 5)
Y = torch.arange(N)


def test_a_loader_can_be_made_anew_from_its_attributes(backend):
    """As Lightning and Accelerate do it: read, replace the sampler, make another."""
    nested = {"x": X, "y": (Y, X[:, 0])}
    loader = fastamp.DataLoader(nested, 6, shuffle=True, seed=3, device="cpu", max_bytes=10**6)
    assert isinstance(loader, TorchDataLoader)
    names = inspect.signature(type(loader).__init__).parameters
    attributes = {k: v for k, v in vars(loader).items() if not k.startswith("_")}
    kwargs = {name: value for name, value in attributes.items() if name in names}
    missing = set(names) - {"self"} - set(kwargs)
    ours = {"device", "seed", "max_bytes", "worker", "shard", "rank", "world_size"}
    assert missing <= {"shuffle", "multiprocessing_context", *ours}
    assert_same([*type(loader)(**{**kwargs, "batch_sampler": None})], [*loader])
    sampler = DistributedSampler(loader.dataset, num_replicas=2, rank=0, shuffle=False)
    again = type(loader)(**{**kwargs, "sampler": sampler, "batch_sampler": None})
    assert torch.equal(torch.cat([batch["y"][0] for batch in again]), Y[::2])
    assert len(again) == 50
    with pytest.raises(ValueError, match="attribute should not be set"):
        loader.batch_size = 4


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
@pytest.mark.parametrize("dataset", [TensorDataset(X, Y), Squares(50)], ids=["arrays", "python"])
def test_a_loader_can_be_copied_and_pickled(dataset, duplicate, backend):
    loader = fastamp.DataLoader(dataset, 8, shuffle=True, seed=2)
    next(iter(loader))  # an epoch
    other = duplicate(loader)
    counted = loader.stats().batches
    assert_same(list(other), list(loader))
    assert loader.stats().batches == counted + len(loader)


@pytest.mark.pairwise
@pytest.mark.parametrize("dataset", [TensorDataset(X, Y), Squares(N)], ids=["arrays", "python"])
def test_two_iterators_over_one_loader_are_apart(dataset, backend):
    def pairs(loader_class):
        torch.manual_seed(1)
        loader = loader_class(dataset, 100, shuffle=True, num_workers=2)
        first, second = iter(loader), iter(loader)
        mixed = [next(first), next(second), next(second), next(first)]
        nested = [(a, b) for a, _ in zip(loader, range(2), strict=False) for b in loader]
        return [*mixed, *nested, *first]

    assert_same(pairs(fastamp.DataLoader), pairs(TorchDataLoader))


def test_an_iterator_has_the_loaders_length(backend):
    for dataset in (TensorDataset(X, Y), Squares(30)):
        assert len(iter(fastamp.DataLoader(dataset, 7))) == len(iter(TorchDataLoader(dataset, 7)))


def test_an_iterator_stays_exhausted_and_counts_its_epoch_once(backend):
    loader = fastamp.DataLoader(X, 100, seed=0, shuffle=True)
    iterator = iter(loader)
    assert len(list(iterator)) == 6
    assert [next(iterator, None) for _ in range(3)] == [None] * 3
    assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize("seed", [1.5, "a", True, -1, 2**64])
def test_a_bad_seed_is_refused(seed):
    with pytest.raises(ValueError, match="seed: expected an integer of at least 0"):
        fastamp.DataLoader(X, seed=seed)


class Permuted:
    """A batch sampler whose `__iter__` draws when it is called, not at the first batch."""

    def __len__(self):
        return 6

    def __iter__(self):
        return iter(torch.randperm(12).view(6, 2).tolist())


@pytest.mark.parametrize("dataset", [Squares(12), TensorDataset(torch.arange(12))])
def test_a_sampler_that_draws_when_it_begins_gives_torchs_order(dataset, backend):
    epochs = []
    for make in (TorchDataLoader, fastamp.DataLoader):
        torch.manual_seed(0)
        loader = make(dataset, batch_sampler=Permuted())
        epochs.append([*loader, *loader])
    assert_same(*epochs)


@pytest.mark.parametrize("dataset", [Squares(12), TensorDataset(torch.arange(12))])
def test_the_draws_of_a_sampler_that_has_begun_are_repeated_after_a_resume(dataset, backend):
    for workers in (0, 1):
        loader = fastamp.DataLoader(dataset, batch_sampler=Permuted(), num_workers=workers)
        first = iter(loader)
        next(first)
        state, rest = loader.state_dict(), [*first]
        resumed = fastamp.DataLoader(dataset, batch_sampler=Permuted())
        resumed.load_state_dict(state)
        assert_same([*resumed], rest)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("make_generator", [np.random.default_rng, random.Random])
def test_a_sampler_may_have_a_generator_that_is_not_torchs(make_generator, workers, backend):
    class Own(Sampler):
        def __init__(self):
            self.generator = make_generator(0)

        def __iter__(self):
            rows = [*range(12)]
            self.generator.shuffle(rows)
            return iter(rows)

    for dataset in (Squares(12), TensorDataset(torch.arange(12))):
        expected = TorchDataLoader(dataset, 4, sampler=Own(), num_workers=workers)
        loader = fastamp.DataLoader(dataset, 4, sampler=Own(), num_workers=workers)
        for _ in range(2):
            assert_same([*loader], [*expected])
        assert loader.state_dict()["generator"] is None


SAMPLERS = {
    "weights": lambda: WeightedRandomSampler(torch.ones(40), 30),
    "subset": lambda: SubsetRandomSampler(range(30)),
    "replacement": lambda: RandomSampler(Y, replacement=True),
    "permutation": lambda: RandomSampler(Y),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("dataset", [TensorDataset(Y), Squares(40)], ids=["arrays", "python"])
def test_a_seed_repeats_torchs_samplers(name, dataset):
    def read():
        loader = fastamp.DataLoader(dataset, 4, sampler=SAMPLERS[name](), seed=3)
        return [[*loader], [*loader]]

    first, again = read(), read()
    assert_same(again, first)
    assert str(first[0]) != str(first[1])


@pytest.mark.parametrize("dataset", [TensorDataset(X), Squares(40)], ids=["arrays", "python"])
@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "worker": "thread"}], ids=str)
def test_a_pass_begun_in_inference_mode_goes_on_with_plain_tensors(dataset, options, backend):
    batches = iter(fastamp.DataLoader(dataset, 4, **options))
    with torch.inference_mode():
        next(batches)
    for batch in batches:
        tensors = []
        map_tensors(lambda t, tensors=tensors: tensors.append(t) or t, batch)
        assert not any(tensor.is_inference() for tensor in tensors)


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
