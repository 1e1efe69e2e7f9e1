"""Datasets with a state of their own: it is in the loader's, and both resume together."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import pickle
import random
import warnings

import numpy as np
import pytest
import torch
from support.loading import Squares, assert_same
from support.streams import Stream
from torch.utils.data import IterableDataset

import fastamp
from fastamp.train.random_state import rng_state, set_rng_state


class Resumable(IterableDataset):
    def __init__(self):
        self.position = 0

    def __iter__(self):
        while self.position < 100:
            self.position += 1
            yield self.position
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Drawing(Squares):
    """A map-style dataset whose samples depend on those before."""

    def __init__(self, length):
        super().__init__(length)
        self.draws = 0

    def __getitem__(self, index):
        self.draws += 1
        return index, self.draws

    def state_dict(self):
        return {"draws": self.draws}

    def load_state_dict(self, state):
        self.draws = state["draws"]


class Place:
    """An iterator that says where it is."""

    def __init__(self, first, last):
        self.next, self.last = first, last

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == self.last:
            raise StopIteration
        self.next += 1
        return self.next - 1

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Parts(IterableDataset):
    """A stream of which each worker has a part; the first part is shorter."""

    def __init__(self, make=Place):
        self.make = make

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return self.make(*((0, 30) if info is None else ((0, 9), (9, 30))[info.id]))


def plain_range(first, last):
    return iter(range(first, last))


STATEFUL = {
    "map": (lambda: Drawing(30), {"shuffle": True, "seed": 3}),
    "map without batches": (lambda: Drawing(11), {"batch_size": None}),
    "iterator": (Parts, {}),
    "iterator without batches": (Parts, {"batch_size": None}),
    "iterator, drop_last": (Parts, {"drop_last": True}),
    "generator": (Resumable, {}),
    "nothing": (lambda: Parts(plain_range), {}),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize("kind", STATEFUL)
def test_a_dataset_with_a_state_of_its_own_resumes_with_the_loader(kind, device, num_workers):
    make, options = STATEFUL[kind]
    options = {"batch_size": 4, "num_workers": num_workers, "device": device, **options}
    expected = list(fastamp.DataLoader(make(), **options))
    loader = fastamp.DataLoader(make(), **options)
    iterator = iter(loader)
    whole, states = [], [json.dumps(loader.state_dict())]
    for _ in expected:
        whole.append(next(iterator))
        states.append(json.dumps(loader.state_dict()))
    assert_same(whole, expected)
    stops = [0, len(whole) - 1, 2, 1, len(whole)]
    first = [*STATEFUL].index(kind) % 2  # each has all without workers, or every other one
    for stop in stops[first::2] if num_workers else stops:
        resumed = fastamp.DataLoader(make(), **options)
        resumed.load_state_dict(json.loads(states[stop]))
        assert_same(whole[:stop] + list(resumed), whole)


def test_a_state_of_other_workers_is_refused_inside_an_epoch(backend):
    loader = fastamp.DataLoader(Drawing(30), 4)
    next(iter(loader))
    with pytest.raises(ValueError, match="state: its num_workers is 0, the loader's 2"):
        fastamp.DataLoader(Drawing(30), 4, num_workers=2).load_state_dict(loader.state_dict())


def test_a_stream_without_a_state_is_read_again(backend):
    loader = fastamp.DataLoader(Stream(range(100)), 4)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    resumed = fastamp.DataLoader(Stream(range(100)), 4)
    resumed.load_state_dict(state)
    assert_same(list(resumed), list(iterator))


def test_what_a_stream_draws_while_it_is_read_again_is_not_the_programs(backend):
    def noise():
        return iter([random.random(), np.random.rand(), torch.rand(())])  # noqa: NPY002

    class Noise(IterableDataset):
        def __iter__(self):
            for _ in range(4):
                yield from noise()

    loader = fastamp.DataLoader(Noise(), 3)
    batches = iter(loader)
    next(batches)
    state, rng = loader.state_dict(), rng_state([])
    expected = [*batches, *noise()]
    loader = fastamp.DataLoader(Noise(), 3)
    loader.load_state_dict(state)
    set_rng_state(rng, [])
    assert_same([*loader, *noise()], expected)


class Rewound(Place, IterableDataset):
    """A dataset that is its own iterator, and begins anew in `__iter__`."""

    def __init__(self):
        super().__init__(0, 30)

    def __iter__(self):
        self.next = 0
        return self


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("count", [0, 3, 8])
def test_a_dataset_that_begins_anew_as_its_own_iterator_resumes(count, num_workers):
    loader = fastamp.DataLoader(Rewound(), 4, num_workers=num_workers)
    batches = iter(loader)
    [next(batches) for _ in range(count)]
    state = json.loads(json.dumps(loader.state_dict()))
    expected = [*batches, *loader]
    resumed = fastamp.DataLoader(Rewound(), 4, num_workers=num_workers)
    resumed.load_state_dict(state)
    assert_same([*resumed, *resumed], expected)


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_workers_of_a_dataset_with_a_state_exit_with_the_last_reference(persistent_workers):
    before = set(multiprocessing.active_children())
    options = {"num_workers": 2, "persistent_workers": persistent_workers}
    loader = fastamp.DataLoader(Drawing(30), 4, **options)
    batches = iter(loader)
    next(batches)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    gc.disable()
    try:
        del batches, loader
        assert [worker.exitcode for worker in workers] == [0, 0]
    finally:
        gc.enable()


@pytest.mark.parametrize("stop", [0, 1, 12, 24, 25, 26])
def test_an_iterable_dataset_resumes_from_its_own_state(stop, backend):
    def two_epochs(loader, start=0):
        for _ in range(start, 2):
            yield from loader

    whole = list(two_epochs(fastamp.DataLoader(Resumable(), 4)))
    loader = fastamp.DataLoader(Resumable(), 4)
    before = [batch for _, batch in zip(range(stop), two_epochs(loader), strict=False)]
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    resumed = fastamp.DataLoader(Resumable(), 4)
    resumed.load_state_dict(state)
    assert_same(before + list(two_epochs(resumed, state["epoch"])), whole)


class Counting(Resumable):
    """Counts how often it is asked for its state."""

    asked = 0

    def state_dict(self):
        self.asked += 1
        return super().state_dict()


def test_an_iterable_dataset_is_asked_for_its_state_when_the_loader_is(backend):
    dataset = Counting()
    loader = fastamp.DataLoader(dataset, 4)
    for _ in zip(range(3), loader, strict=False):
        pass
    assert dataset.asked == 0
    state = loader.state_dict()
    assert dataset.asked == 1
    again = fastamp.DataLoader(Resumable(), 4)
    again.load_state_dict(state)
    assert next(iter(again)).tolist() == [13, 14, 15, 16]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_state_is_that_after_the_last_batch_delivered(device, backend):
    loader = fastamp.DataLoader(Resumable(), 4, device=device)
    iterator = iter(loader)
    for count in range(1, 26):
        next(iterator)
        if count % 6 == 0:
            again = fastamp.DataLoader(Resumable(), 4)
            again.load_state_dict(loader.state_dict())
            assert next(iter(again)).tolist()[0] == 4 * count + 1
    assert next(iterator, None) is None
    again.load_state_dict(loader.state_dict())
    assert next(iter(again)).tolist()[0] == 1


class Streaming(Resumable):
    """Has a state as the datasets of streaming libraries have it."""

    def state_dict(self, num_samples, *, from_beginning):
        return {"position": num_samples * from_beginning}


def test_a_state_dict_with_arguments_is_left_to_its_owner(backend):
    loader = fastamp.DataLoader(Streaming(), 4)
    assert_same(list(loader), list(fastamp.DataLoader(Resumable(), 4)))
    with pytest.raises(TypeError, match="dataset: the state_dict of Streaming takes arguments"):
        loader.state_dict()
    with pytest.raises(TypeError, match="dataset: the state_dict of Streaming takes arguments"):
        loader.load_state_dict(fastamp.DataLoader(Resumable(), 4).state_dict())


def test_the_state_of_a_dataset_that_cannot_load_one_is_refused():
    loader = fastamp.DataLoader(Squares(20), 4)
    before = loader.state_dict()
    other = fastamp.DataLoader(Drawing(20), 4).state_dict()
    with pytest.raises(ValueError, match="state: its num_workers is 0, the loader's None"):
        loader.load_state_dict(other)
    assert loader.state_dict() == before


def test_without_torchdata_a_dataset_with_a_state_is_read_and_its_state_names_the_extra(
    monkeypatch,
):
    for module in ("loader", "torch_loader"):
        monkeypatch.setattr(f"fastamp.data.{module}.stateful_loader", lambda: None)
    for dataset in (Resumable(), Drawing(100)):
        loader = fastamp.DataLoader(dataset, 4)
        iterator = iter(loader)
        next(iterator)
        for call in (loader.state_dict, lambda: loader.load_state_dict({})):  # noqa: B023
            with pytest.raises(ImportError, match=r"pip install 'fastamp\[state\]'"):
                call()
        assert len([*iterator]) == 24
    plain = fastamp.DataLoader(Stream(range(20)), 4)
    next(iter(plain))
    assert plain.state_dict()["batch"] == 1


class Shares(IterableDataset):
    """Each worker's share of 14 items, with those of the passes before told apart."""

    def __init__(self):
        self.passes = self.given = 0

    def __iter__(self):
        info = fastamp.get_worker_info()
        for item in range(info.id + self.given * info.num_workers, 14, info.num_workers):
            self.given += 1
            yield 100 * self.passes + item
        self.passes, self.given = self.passes + 1, 0


class SharesWithState(Shares):
    def state_dict(self):
        return vars(self).copy()

    def load_state_dict(self, state):
        vars(self).update(state)


@pytest.mark.parametrize("kind", [Shares, SharesWithState])
def test_a_pass_of_workers_that_persist_resumes_before_each_has_made_a_batch(kind):
    """The states of those that have not are of the pass before, which has ended."""
    options = {"num_workers": 2, "persistent_workers": True, "seed": 0}

    def make():
        return fastamp.DataLoader(kind(), 2, **options)

    loader = make()
    list(loader)
    batches, states = [], []
    for batch in loader:
        batches.append(batch.tolist())
        states.append(loader.state_dict())
    for count, state in enumerate(states, 1):
        again = make()
        again.load_state_dict(pickle.loads(pickle.dumps(state)))
        resumed = [batch.tolist() for batch in again]
        if kind is Shares:  # without a state a dataset counts its passes anew
            resumed = [[100 + item for item in batch] for batch in resumed]
        assert resumed == batches[count:]


class Alone(SharesWithState):
    """Without workers."""

    def __iter__(self):
        while self.given < 5:
            self.given += 1
            yield 100 * self.passes + self.given + fastamp.sample_rng().python.random()
        self.passes, self.given = self.passes + 1, 0


def test_a_state_at_the_last_short_batch_knows_that_the_dataset_has_ended_its_pass(backend):
    def make():
        return fastamp.DataLoader(Alone(), 3, generator=torch.Generator().manual_seed(5))

    whole, states = [], []
    loader = make()
    for _ in range(3):
        for batch in loader:
            whole.append(batch.tolist())
            states.append(pickle.loads(pickle.dumps(loader.state_dict())))
    for count, state in enumerate(states, 1):
        again = make()
        again.load_state_dict(state)
        resumed = [b.tolist() for _ in range(state["epoch"], 3) for b in again]
        assert whole[:count] + resumed == whole


class Told(IterableDataset):
    def __iter__(self):
        info = fastamp.get_worker_info()
        return iter(range(10 + 7 * info.id))

    def __len__(self):
        return 20


def test_workers_that_persist_warn_of_a_length_that_is_told_between_passes():
    loader = fastamp.DataLoader(Told(), 1, num_workers=2, persistent_workers=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len([*loader]) == 27
    assert len(loader) == 20
    with pytest.warns(UserWarning, match="was reported to be 20"):
        assert len([*loader]) == 27


class Fails(IterableDataset):
    """An iterator that fails once and goes on, with a random number beside each sample."""

    def __init__(self, at):
        self.at = at

    def __iter__(self):
        self.number = 0
        return self

    def __next__(self):
        self.number += 1
        if self.number == self.at:
            raise ValueError(self.number)
        if self.number > 8:
            raise StopIteration
        return self.number, fastamp.sample_rng().python.random()


@pytest.mark.parametrize("at", [0, 4])
def test_a_stream_goes_on_after_an_error_and_draws_as_without_workers(at):
    def read(**options):
        batches, found = iter(fastamp.DataLoader(Fails(at), 2, seed=3, **options)), []
        for _ in range(9):
            with contextlib.suppress(StopIteration):
                try:
                    found.append(next(batches))
                except ValueError:
                    found.append("error")
        return found

    expected, found = read(), read(num_workers=1)
    assert [type(each) for each in found] == [type(each) for each in expected]
    for one, other in zip(found, expected, strict=True):
        if type(other) is not str:
            assert torch.equal(one[0], other[0])
            assert at or torch.equal(one[1], other[1])
