"""A sample's random numbers: of its place in the epoch, whoever makes it."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from support.loading import assert_same
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Subset

import fastamp
from fastamp.data.sample_rng import Order, mix

MASK = 2**64 - 1
N = 41


def key_of(seed, epoch, place):
    """Return a sample's key as the documentation has it."""
    key = 0
    for part in (seed, epoch, place):
        key = (key ^ part) + 0x9E3779B97F4A7C15 & MASK
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & MASK
        key = (key ^ key >> 27) * 0x94D049BB133111EB & MASK
        key ^= key >> 31
    return key


def draw(key):
    return random.Random(key).getrandbits(40)


class Drawn(Dataset):
    """Items that draw."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        return index, fastamp.sample_rng().python.getrandbits(40)


class DrawnTogether(Drawn):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def pairs(batches):
    return [
        pair
        for indices, drawn in batches
        for pair in zip(np.atleast_1d(indices).tolist(), np.atleast_1d(drawn).tolist(), strict=True)
    ]


def test_keys_are_those_of_splitmix64():
    assert mix(0) == 0xE220A8397B1DCDAF  # the first number of Vigna's splitmix64 from 0
    order = Order(mix(mix(7) ^ 2), first=1, others=6)
    keys = [order.find_key(number) for number in range(2**15)]
    assert keys[:4] == [key_of(7, 2, place) for place in (1, 8, 15, 22)]
    assert order.find_keys(0, 2**15).tolist() == keys
    assert order.find_keys(7, 3).tolist() == keys[7:10]
    assert order.find_key(~3) == key_of(7, 2, ~22 & MASK)  # of a batch
    assert len({*keys}) == len(keys)
    extremes = [0, MASK, 2**63 - 1, 2**63]
    assert mix(np.array(extremes, np.uint64)).tolist() == [*map(mix, extremes)]


WAYS = {
    "": {"batch_size": 4, "shuffle": True},
    "drop_last": {"batch_size": 4, "shuffle": True, "drop_last": True},
    "batch_sampler": {"batch_sampler": [[3, 1], [2], [40, 3, 3], (9,), [1, 2, 3, 4]]},
    "no batches": {"batch_size": None, "shuffle": True},
    "sampler": {"sampler": DistributedSampler(Drawn(), 3, 2, seed=2), "batch_size": 4},
    "shard": {"rank": 2, "world_size": 3, "shuffle": True, "batch_size": 4},
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_sample_draws_by_seed_epoch_and_place(way, num_workers):
    def make():
        return fastamp.DataLoader(Drawn(), num_workers=num_workers, seed=5, **WAYS[way])

    loader, epochs = make(), []
    ranks = way in ("sampler", "shard")
    for epoch in range(2):
        drawn = pairs(loader)
        places = range(2, N + 1, 3) if ranks else range(len(drawn))
        assert [value for _, value in drawn] == [draw(key_of(5, epoch, place)) for place in places]
        epochs.append(drawn)
    loader = make()
    iterator = iter(loader)
    taken = [next(iterator) for _ in range(3)]
    state = json.loads(json.dumps(loader.state_dict()))
    assert pairs([*taken, *iterator]) == epochs[0]
    resumed = make()
    resumed.load_state_dict(state)
    assert pairs([*taken, *resumed]) == epochs[0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_without_a_seed_samples_draw_from_that_of_torchs_iterators(num_workers):
    """It is in the state; torch's own draws stay what they are."""
    options = {"shuffle": True, "num_workers": num_workers, "persistent_workers": num_workers > 0}
    torch.manual_seed(1)
    base = int(torch.empty((), dtype=torch.int64).random_())
    torch.manual_seed(1)
    loader = fastamp.DataLoader(Drawn(), 4, **options)
    iterator = iter(loader)
    taken = [next(iterator) for _ in range(3)]
    state = json.loads(json.dumps(loader.state_dict()))
    whole = pairs([*taken, *iterator])
    assert [value for _, value in whole] == [draw(key_of(base, 0, n)) for n in range(N)]
    second = pairs(loader)
    if num_workers:  # they persist, and torch draws no other seed
        assert [value for _, value in second] == [draw(key_of(base, 1, n)) for n in range(N)]
    torch.manual_seed(2)
    resumed = fastamp.DataLoader(Drawn(), 4, **options)
    resumed.load_state_dict(state)
    assert pairs([*taken, *resumed]) == whole


def test_a_batch_draws_for_itself():
    """In `__getitems__`, and in a collate function something else."""

    def collate(samples):
        return (*zip(*samples, strict=True), fastamp.sample_rng().python.getrandbits(40))

    for num_workers in (0, 2):
        loader = fastamp.DataLoader(
            DrawnTogether(), 4, num_workers=num_workers, seed=5, collate_fn=collate
        )
        drawn = []
        for number, (_, together, mixed) in enumerate(loader):
            rng = random.Random(key_of(5, 0, 4 * number))
            assert list(together) == [rng.getrandbits(40) for _ in together]
            drawn += [*together, mixed]
        assert len({*drawn}) == len(drawn)
        assert drawn[4] == draw(mix(mix(mix(5) ^ 0) ^ MASK))


@pytest.mark.parametrize("worker", ["process", "thread"])
def test_a_subsets_samples_draw_each_for_itself(worker):
    """Its `__getitems__` only asks for one after the other."""
    subset = Subset(Drawn(), range(5, 30))
    loader = fastamp.DataLoader(subset, 4, num_workers=1, seed=5, worker=worker)
    assert pairs(loader) == [(5 + n, draw(key_of(5, 0, n))) for n in range(25)]


class DrawnStream(IterableDataset):
    """A stream that draws when it begins, and for each sample."""

    def __iter__(self):
        first = fastamp.sample_rng().python.getrandbits(40)
        for i in range(11):
            yield first + i, fastamp.sample_rng().python.getrandbits(40)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_draws_for_each_batch(num_workers):
    def make():
        return fastamp.DataLoader(DrawnStream(), 4, num_workers=num_workers, seed=5)

    loader = make()
    epochs = [list(loader), list(loader)]
    assert not torch.equal(epochs[0][0][1], epochs[1][0][1])
    assert len({int(batch[1][0]) for batch in epochs[0]}) == len(epochs[0])
    loader = make()
    if num_workers:  # has no state
        assert_same([[*loader], [*loader]], epochs)
        return
    iterator = iter(loader)
    taken = [next(iterator) for _ in range(2)]
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert_same([*taken, *resumed], epochs[0])
    assert_same(list(resumed), epochs[1])


class Placed(IterableDataset):
    """A stream that draws, and has a state: what was delivered is not read again."""

    place = 0

    def __iter__(self):
        for place in range(self.place + 1, 12):
            self.place = place
            yield fastamp.sample_rng().python.getrandbits(40)

    def state_dict(self):
        return self.place

    def load_state_dict(self, state):
        self.place = state


def test_a_stream_with_a_state_draws_by_the_place_of_its_batch():
    whole = [*fastamp.DataLoader(Placed(), 3, seed=5)]
    loader = fastamp.DataLoader(Placed(), 3, seed=5)
    begun = iter(loader)
    taken = [next(begun), next(begun)]
    resumed = fastamp.DataLoader(Placed(), 3, seed=5)
    resumed.load_state_dict(loader.state_dict())
    assert_same([*taken, *resumed], whole)


def test_outside_a_pass_torchs_own_seed_counts():
    def values():
        torch.manual_seed(3)
        rngs = [fastamp.sample_rng() for _ in range(2)]
        return [
            (rng.torch.initial_seed(), rng.numpy.integers(1 << 40), rng.python.getrandbits(40))
            for rng in rngs
        ]

    first, second = values()
    assert values() == [first, second]
    assert first != second
    rng = fastamp.sample_rng()
    assert rng.torch is rng.torch
    assert torch.rand(3, generator=rng.torch).ne(torch.rand(3, generator=rng.torch)).all()
    assert Drawn()[3][0] == 3
