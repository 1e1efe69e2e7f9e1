"""A loader's state: small, at any batch, and in a new process the batches that would have come."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from support.loading import Rows, Squares, assert_same, check, make_array
from support.resumable import EPOCHS, VARIANTS, make_loader, run
from support.thread_workers import fail
from torch.utils.data import RandomSampler, TensorDataset

import fastamp
from fastamp.data.making import Making

X = make_array(torch.float32, 40, 3)

# Another process goes on from all states, some of them with another number of workers.
RESUME = """
import pickle, sys
import torch
from support.resumable import make_loader, run

with open(sys.argv[1], "rb") as file:
    saved = pickle.load(file)
resumed = {}
for variant, states in saved.items():
    resumed[variant] = []
    for place, state in enumerate(states):
        torch.manual_seed(1000 + place)  # nothing depends on what else the program has drawn
        torch.set_num_threads(1 + place % 3)
        loader = make_loader(variant, num_workers=(1, 0, 2)[place] if place < 3 else 0)
        loader.load_state_dict(state)
        resumed[variant].append(list(run(loader, state["epoch"])))
with open(sys.argv[1], "wb") as file:
    pickle.dump(resumed, file)
"""


def choose_stops(total):
    """Return 9 numbers of batches after which to stop: the ends of the epochs, and any others."""
    per_epoch = total // EPOCHS
    always = {0, 1, per_epoch - 1, per_epoch, per_epoch + 1, total - 1, total}
    others = sorted(set(range(total)) - always)
    rng = random.Random(0)
    return rng.sample([*always, *rng.sample(others, 9 - len(always))], 9)


def state_after(variant, stop, whole, num_workers):
    torch.manual_seed(1)
    loader = make_loader(variant, num_workers)
    batches = run(loader)  # which ends when it is dropped
    before = [batch for _, batch in zip(range(stop), batches, strict=False)]
    assert_same(before, whole[:stop])
    return loader.state_dict()


@functools.cache
def runs(backend):
    """Return whole run, stops, states and what came in another process, for all variants."""
    wholes, stops, states = {}, {}, {}
    for variant in VARIANTS:
        torch.manual_seed(1)
        wholes[variant] = list(run(make_loader(variant)))
        stops[variant] = choose_stops(len(wholes[variant]))
        states[variant] = [
            state_after(variant, stop, wholes[variant], num_workers=2 if place == 3 else 0)
            for place, stop in enumerate(stops[variant])
        ]
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(pickle.dumps(states))
        check(RESUME, file.name, backend=backend)
        resumed = pickle.loads(Path(file.name).read_bytes())
    return {name: (wholes[name], stops[name], states[name], resumed[name]) for name in VARIANTS}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_new_process_goes_on_where_the_old_one_stopped(variant, backend):
    whole, stops, states, resumed = runs(backend)[variant]
    assert len(whole) >= 40
    for stop, state, after in zip(stops, states, resumed, strict=True):
        assert len(pickle.dumps(state)) < 20_000
        assert_same(whole[:stop] + after, whole)


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
    for _ in range(per_epoch):
        next(iterator)
    last = loader.state_dict()
    assert (last["epoch"], last["batch"]) == (0, per_epoch)
    assert list(iterator) == []
    ended = loader.state_dict()
    assert (ended["epoch"], ended["batch"]) == (1, 0)
    for state in (last, ended):
        loader = make_loader(variant)
        loader.load_state_dict(pickle.loads(pickle.dumps(state)))
        assert_same(list(run(loader, state["epoch"])), whole[per_epoch:])


@pytest.mark.parametrize("dataset", [TensorDataset(X), Squares(40)], ids=["arrays", "python"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_made_ahead_are_not_lost(dataset, num_workers, backend):
    def loader():
        return fastamp.DataLoader(dataset, 2, shuffle=True, seed=3, num_workers=num_workers)

    whole = list(loader())
    first = loader()
    for _ in zip(range(5), first, strict=False):
        pass
    iterator = iter(first)  # of the second epoch, and given up
    next(iterator)
    first.load_state_dict(first.state_dict() | {"epoch": 0, "batch": 5})
    assert_same(list(first), whole[5:])


def test_a_state_is_a_copy(backend):
    loader = fastamp.DataLoader(X, 4, shuffle=True, generator=torch.Generator())
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    kept = copy.deepcopy(state)
    list(iterator)
    list(loader)
    assert state.keys() == kept.keys()
    assert all(
        torch.equal(state[key], kept[key])
        if torch.is_tensor(kept[key])
        else state[key] == kept[key]
        for key in kept
    )


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


def test_resuming_leaves_the_programs_own_draws_alone(backend):
    """A loader that shuffles with torch's default generator draws a seed as it would anew."""
    torch.manual_seed(5)
    loader = fastamp.DataLoader(X, 4, shuffle=True)
    iterator = iter(loader)
    taken = [next(iterator) for _ in range(3)]
    state = loader.state_dict()
    whole = [*taken, *iterator]
    for seed in (1, 2):
        torch.manual_seed(seed)
        resumed = fastamp.DataLoader(X, 4, shuffle=True)
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


def test_a_state_after_set_epoch_is_the_start_of_that_epoch(backend):
    def loader():
        return fastamp.DataLoader(X, 4, shuffle=True, seed=1)

    ours = loader()
    next(iter(ours))
    ours.set_epoch(3)
    state = ours.state_dict()
    expected = list(ours)
    assert (state["epoch"], state["batch"]) == (3, 0)
    resumed = loader()
    resumed.load_state_dict(state)
    assert_same(list(resumed), expected)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_pass_that_cannot_begin_leaves_the_loaded_position(error, monkeypatch):
    def make():
        return fastamp.DataLoader(X, 4, shuffle=True, seed=1)

    whole = list(make())
    loader = make()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    for resumed in (loader, make()):
        resumed.load_state_dict(state)
        with monkeypatch.context() as patch:
            patch.setattr(Making, "begin", lambda _: fail(error, "refused"))
            with pytest.raises(error, match="refused"):
                iter(resumed)
        assert_same(resumed.state_dict(), state)
        assert_same(list(resumed), whole[3:])
        assert resumed.state_dict()["epoch"] == 1


def test_numbers_of_numpy_are_taken_as_epochs_and_ranks():
    def make(integer):
        dataset = Rows(8, lambda index: index + fastamp.sample_rng().python.random())
        ranks = {"rank": integer(0), "world_size": integer(2)}
        loader = fastamp.DataLoader(dataset, 2, shuffle=True, seed=integer(1), **ranks)
        loader.set_epoch(integer(3))
        return loader, next(iter(loader))

    (loader, batch), (expected_loader, expected) = make(np.int64), make(int)
    assert_same(batch, expected)
    assert json.dumps(loader.state_dict()) == json.dumps(expected_loader.state_dict())


def test_set_epoch_of_the_loaded_epoch_keeps_the_position(backend):
    loader = fastamp.DataLoader(X, 4, shuffle=True, seed=1)
    loader.set_epoch(1)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state, rest = loader.state_dict(), list(iterator)
    resumed = fastamp.DataLoader(X, 4, shuffle=True, seed=1)
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    assert_same(list(resumed), rest)
    resumed.load_state_dict(state)
    resumed.set_epoch(2)
    assert len(list(resumed)) == 10


def test_taking_a_state_does_not_depend_on_the_position(backend):
    """It is O(1): a sampler is not asked for anything."""
    asked = []

    class Counting(RandomSampler):
        def __iter__(self):
            for index in super().__iter__():
                asked.append(index)
                yield index

    def loader_of_counted():
        return fastamp.DataLoader(X, 4, sampler=Counting(X, generator=torch.Generator()))

    loader = loader_of_counted()
    iterator = iter(loader)
    next(iterator)
    before = len(asked)
    state = loader.state_dict()
    loader_of_counted().load_state_dict(state)
    assert len(asked) == before


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


def test_batches_that_come_in_any_order_have_no_state():
    loader = fastamp.DataLoader(Squares(8), 2, num_workers=2, in_order=False)
    for call in (loader.state_dict, lambda: loader.load_state_dict({})):
        with pytest.raises(TypeError, match="in_order=False: which batches are delivered is"):
            call()
