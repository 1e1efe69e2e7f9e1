"""States that are not this loader's: refused by name, before anything is changed."""

from __future__ import annotations

import pytest
import torch
from support.loading import Squares, assert_same, make_array
from torch.utils.data import BatchSampler, RandomSampler
from torch.utils.data.datapipes.iter import IterableWrapper

import fastamp

X = make_array(torch.float32, 40, 3)


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
    batches = BatchSampler(RandomSampler(X), 5, drop_last=False)
    with pytest.raises(ValueError, match="its batch_size is 5, the loader's 4"):
        fastamp.DataLoader(X, 4, shuffle=True).load_state_dict(
            fastamp.DataLoader(X, batch_sampler=batches).state_dict()
        )
    for state in (
        {},
        {"version": 99},
        {"version": "3"},
        {"epoch": 1},
        {"version": expected["version"]},
    ):
        with pytest.raises(ValueError, match=r"expected what DataLoader\.state_dict returns"):
            loader.load_state_dict(state)
    assert_same(loader.state_dict(), expected)


def test_a_sharded_loader_whose_batches_come_in_any_order_has_no_state():
    options = {"shard": True, "rank": 0, "world_size": 2}
    loader = fastamp.DataLoader(Squares(40), 2, num_workers=1, in_order=False, **options)
    with pytest.raises(TypeError, match="in_order=False"):
        loader.state_dict()


def test_a_pipe_of_torchs_has_no_state():
    loader = fastamp.DataLoader(IterableWrapper([1, 2]), 2)
    with pytest.raises(TypeError, match="dataset: the position of a pipe"):
        loader.state_dict()


class StatefulSampler(RandomSampler):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_a_sampler_with_a_state_of_its_own_is_refused_by_its_name():
    sampler = StatefulSampler(X)
    batches = BatchSampler(sampler, 4, drop_last=False)
    for options in ({"sampler": sampler}, {"batch_sampler": batches}):
        loader = fastamp.DataLoader(X, **options)
        assert len([*loader]) == len(loader)
        with pytest.raises(TypeError, match="sampler: StatefulSampler has a state of its own"):
            loader.state_dict()
