"""A loader's state: small, at any batch, resumed to the bit in a new process, refused elsewhere."""

from __future__ import annotations

import functools
import json
import pickle
from itertools import islice

import pytest
import torch
from support.loading import Squares, assert_same, generator, make_array
from support.resumable import EPOCHS, VARIANTS, make_loader, run
from support.thread_workers import fail
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.datapipes.iter import IterableWrapper

import fastamp
from fastamp.data.making import Making

X = make_array(torch.float32, 40, 3)


@functools.cache
def whole_run(variant):
    torch.manual_seed(1)
    return [*run(make_loader(variant))]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_that_is_stopped_anywhere_goes_on_as_if_it_were_not(variant, backend):
    whole = whole_run(variant)
    epoch = len(whole) // EPOCHS
    assert epoch >= 20
    for stop, before, after in ((0, 0, 1), (1, 0, 0), (5, 2, 0), (epoch, 0, 2), (epoch + 3, 1, 0)):
        torch.manual_seed(1)
        loader = make_loader(variant, num_workers=before)
        batches = run(loader)  # whose end would end the epoch
        taken = [*islice(batches, stop)]
        state = pickle.dumps(loader.state_dict())
        assert len(state) < 20_000
        torch.manual_seed(1000 + stop)  # nothing depends on what else the program has drawn
        resumed = make_loader(variant, num_workers=after)
        resumed.load_state_dict(pickle.loads(state))
        rest = run(resumed, resumed.state_dict()["epoch"])
        assert_same([*taken, *rest], whole)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_end_of_an_epoch_is_a_state(variant, backend):
    """Both after the last batch and after the loop."""
    torch.manual_seed(1)
    whole = list(run(make_loader(variant)))
    per_epoch = len(whole) // EPOCHS
    torch.manual_seed(1)
    loader = make_loader(variant)
    loader.set_epoch(0)
    iterator = iter(loader)
    assert len([*islice(iterator, per_epoch)]) == per_epoch
    last = loader.state_dict()
    assert (last["epoch"], last["batch"]) == (0, per_epoch)
    assert list(iterator) == []
    ended = loader.state_dict()
    assert (ended["epoch"], ended["batch"]) == (1, 0)
    for state in (last, ended):
        loader = make_loader(variant)
        loader.load_state_dict(pickle.loads(pickle.dumps(state)))
        assert_same(list(run(loader, state["epoch"])), whole[per_epoch:])


def test_a_state_can_be_loaded_in_the_middle_and_twice(backend):
    loader = fastamp.DataLoader(X, 4, shuffle=True, seed=1)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    state = loader.state_dict()
    rest = list(iterator)
    for _ in range(2):
        loader.load_state_dict(state)
        assert_same(loader.state_dict(), state)
        assert_same(list(loader), rest)
        list(loader)


@pytest.mark.parametrize(
    "options",
    [
        lambda: {"shuffle": True},
        lambda: {"sampler": RandomSampler(X), "generator": generator(3)},
        lambda: {"sampler": WeightedRandomSampler(torch.ones(40), 40), "generator": generator(3)},
    ],
    ids=["shuffle", "a sampler without the loader's generator", "weights"],
)
def test_resuming_leaves_the_programs_own_draws_alone(options, backend):
    """A loader that shuffles with torch's default generator draws a seed as it would anew."""
    torch.manual_seed(5)
    loader = fastamp.DataLoader(X, 4, **options())
    iterator = iter(loader)
    taken = [next(iterator) for _ in range(3)]
    state = loader.state_dict()
    whole = [*taken, *iterator]
    for seed in (1, 2):
        torch.manual_seed(seed)
        resumed = fastamp.DataLoader(X, 4, **options())
        resumed.load_state_dict(state)
        assert_same(taken + list(resumed), whole)
        torch.manual_seed(seed)
        expected = torch.rand(3)
        torch.manual_seed(seed)
        resumed.load_state_dict(state)
        list(resumed)
        assert torch.equal(torch.rand(3), expected)


def test_set_epoch_chooses_the_epoch(backend):
    def loader():
        return fastamp.DataLoader(X, 4, shuffle=True, seed=1)

    counted = loader()
    epochs = [list(counted) for _ in range(4)]
    assert not torch.equal(epochs[0][0], epochs[1][0])
    jumped = loader()
    for epoch in (2, 0, 3):
        jumped.set_epoch(epoch)
        assert_same(list(jumped), epochs[epoch])
    assert_same(list(fastamp.DataLoader(X, 4, shuffle=True, seed=3)), epochs[2])


def test_a_pass_that_cannot_begin_leaves_the_loaded_position(monkeypatch):
    loader = fastamp.DataLoader(X, 4, shuffle=True, seed=1)
    batches = iter(loader)
    next(batches)
    state, rest = loader.state_dict(), [*batches]
    loader.load_state_dict(state)
    with monkeypatch.context() as patch:
        patch.setattr(Making, "begin", lambda _: fail(OSError, "refused"))
        with pytest.raises(OSError, match="refused"):
            iter(loader)
    assert_same([*loader], rest)


def test_set_epoch_of_the_loaded_epoch_keeps_the_position(backend):
    loader = fastamp.DataLoader(X, 4, shuffle=True, seed=1)
    loader.set_epoch(1)
    iterator = iter(loader)
    assert len([*islice(iterator, 3)]) == 3
    state, rest = loader.state_dict(), list(iterator)
    resumed = fastamp.DataLoader(X, 4, shuffle=True, seed=1)
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    assert_same(list(resumed), rest)
    resumed.load_state_dict(state)
    resumed.set_epoch(2)
    assert len(list(resumed)) == 10


@pytest.mark.parametrize("dataset", [X, Squares(40)], ids=["arrays", "python"])
def test_a_pass_that_has_begun_without_a_batch_draws_no_seed_again(dataset, backend):
    loader = fastamp.DataLoader(dataset, 16, shuffle=True)
    begun = iter(loader)
    state, rng = loader.state_dict(), torch.get_rng_state()
    expected = [*begun, *loader]
    for num_workers in (0, 2):
        options = {"num_workers": num_workers, "worker": "thread"}
        loader = fastamp.DataLoader(dataset, 16, shuffle=True, **options)
        loader.load_state_dict(state)
        torch.set_rng_state(rng)
        assert_same([*loader, *loader], expected)


def test_a_state_after_an_epoch_of_fixed_steps_begins_the_next_one():
    loader = fastamp.DataLoader(X, 4, shuffle=True, seed=1)
    for _ in loader:
        inside = loader.state_dict()
        break
    state = loader.state_dict()
    assert (inside["epoch"], inside["batch"], state["epoch"], state["batch"]) == (0, 1, 1, 0)
    resumed = fastamp.DataLoader(X, 4, shuffle=True, seed=1)
    resumed.load_state_dict(state)
    assert_same([*islice(resumed, 3)], [*islice(loader, 3)])
    resumed.load_state_dict(inside)
    assert len([*resumed]) == 9


class NoLength(Dataset):
    def __getitem__(self, index):
        return torch.tensor(index)


def test_a_dataset_without_a_length_is_saved():
    loader = fastamp.DataLoader(NoLength(), 2, sampler=range(8))
    batches = iter(loader)
    next(batches)
    resumed = fastamp.DataLoader(NoLength(), 2, sampler=range(8))
    resumed.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in resumed] == [[2, 3], [4, 5], [6, 7]]


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


@pytest.mark.parametrize(("size", "count"), [(2, 1), (2, 3), (4, 2), (5, 1)])
def test_a_stream_that_restores_generators_in_its_own_state_draws_on(size, count):
    """Also after the last batch, for which a shorter one has read the stream to its end."""
    loader = fastamp.DataLoader(Keeps(), size)
    batches = iter(loader)
    assert len([*islice(batches, count)]) == count
    state = loader.state_dict()
    expected = [*batches, *loader]
    torch.manual_seed(99)
    resumed = fastamp.DataLoader(Keeps(), size)
    resumed.load_state_dict(state)
    assert_same([*resumed, *resumed], expected)


def test_foreign_states_are_refused_and_change_nothing(backend):
    loader = fastamp.DataLoader(X, 4, shuffle=True, seed=1)
    expected = loader.state_dict()
    other = fastamp.DataLoader(X, 5, shuffle=True, seed=1)
    with pytest.raises(ValueError, match="its batch_size is 5, the loader's 4"):
        loader.load_state_dict(other.state_dict())
    for options, message in (
        ({"drop_last": True}, "its drop_last is False, the loader's True"),
        ({"shuffle": False}, "its sampler is 'SeededSampler', the loader's 'SequentialSampler'"),
        ({"seed": None}, "its sampler is 'SeededSampler', the loader's 'RandomSampler'"),
    ):
        other = fastamp.DataLoader(X, 4, **{"shuffle": True, "seed": 1, **options})
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(expected)
    own = fastamp.DataLoader(X, 4, shuffle=True, generator=torch.Generator())
    with pytest.raises(ValueError, match="its source of randomness is 'a generator'"):
        fastamp.DataLoader(X, 4, shuffle=True).load_state_dict(own.state_dict())
    other = fastamp.DataLoader(X, batch_sampler=BatchSampler(RandomSampler(X), 5, drop_last=False))
    with pytest.raises(ValueError, match="its batch_size is 5, the loader's 4"):
        fastamp.DataLoader(X, 4, shuffle=True).load_state_dict(other.state_dict())
    for state in ({}, {"version": 5}, {"epoch": 1, "batch": 2}):
        with pytest.raises(ValueError, match=r"expected what DataLoader\.state_dict returns"):
            loader.load_state_dict(state)
    for name, value in (("version", 99), ("epoch", -1), ("batch", None), ("sample_seed", "7")):
        with pytest.raises(ValueError, match=f"^state: its {name}.* {value!r}"):
            loader.load_state_dict({**expected, name: value})
    assert_same(loader.state_dict(), expected)


def test_batches_that_come_in_any_order_and_pipes_have_no_state():
    options = {"shard": True, "rank": 0, "world_size": 2}
    loader = fastamp.DataLoader(Squares(40), 2, num_workers=1, in_order=False, **options)
    with pytest.raises(TypeError, match="in_order=False"):
        loader.state_dict()
    with pytest.raises(TypeError, match="dataset: the position of a pipe"):
        fastamp.DataLoader(IterableWrapper([1, 2]), 2).state_dict()


class StatefulSampler(RandomSampler):
    state_dict = load_state_dict = dict


def test_a_sampler_with_a_state_of_its_own_is_refused_by_its_name():
    sampler = StatefulSampler(X)
    batches = BatchSampler(sampler, 4, drop_last=False)
    for options in ({"sampler": sampler}, {"batch_sampler": batches}):
        loader = fastamp.DataLoader(X, **options)
        assert len([*loader]) == len(loader)
        with pytest.raises(TypeError, match="sampler: StatefulSampler has a state of its own"):
            loader.state_dict()
