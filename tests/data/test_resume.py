"""A loader's state: small, at any batch, and in a new process the batches that would have come."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import random
import tempfile
from pathlib import Path

import pytest
import torch
from support.loading import Squares, assert_same, check, make_array
from support.resumable import EPOCHS, VARIANTS, make_loader, run
from support.streams import Stream
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, TensorDataset

import fastamp

X = make_array(torch.float32, 40, 3)
AN_INTEGER = "expected an integer of at least 0"

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
    before = [batch for _, batch in zip(range(stop), run(loader), strict=False)]
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


def test_foreign_states_are_refused_and_change_nothing(backend):
    loader = fastamp.DataLoader(X, 4, shuffle=True, seed=1)
    expected = loader.state_dict()
    other = fastamp.DataLoader(X, 5, shuffle=True, seed=1)
    with pytest.raises(ValueError, match="its batch_size is 5, the loader's 4"):
        loader.load_state_dict(other.state_dict())
    for options, message in (
        ({"drop_last": True}, "its drop_last is False, the loader's True"),
        ({"shuffle": False}, "its sampler is 'RandomSampler', the loader's 'SequentialSampler'"),
        ({"seed": None}, "its seed is 1, the loader's None"),
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
    for state in ({}, {"version": 99}, {"epoch": 1, "batch": 2}):
        with pytest.raises(ValueError, match=r"expected what DataLoader\.state_dict returns"):
            loader.load_state_dict(state)
    assert_same(loader.state_dict(), expected)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *[
            (key, None, "expected an integer of at least 0")
            for key in ("epoch", "batch", "consumed")
        ],
        *[
            (key, -1, "expected an integer of at least 0")
            for key in ("epoch", "batch", "told_epoch")
        ],
        ("epoch", torch.tensor(3), "expected an integer of at least 0"),
        ("batch", 1.5, "expected an integer of at least 0"),
        ("consumed", True, "expected an integer of at least 0"),
        ("told_epoch", "1", "expected an integer of at least 0"),
        ("batch_size", torch.tensor([4, 4]), "the loader's 4"),
        ("drop_last", None, "the loader's False"),
        ("rng", torch.zeros(3), "expected the state of a generator"),
        ("rng", 5, "expected the state of a generator"),
        ("generator", torch.zeros(7, dtype=torch.uint8), "expected the state of a generator"),
        ("exhausted", None, "expected True or False"),
    ],
)
def test_a_state_with_another_kind_of_value_is_refused_by_its_key(key, value, message, backend):
    loader = fastamp.DataLoader(X, 4, shuffle=True, generator=torch.Generator())
    next(iter(loader))
    state = loader.state_dict()
    kept = copy.deepcopy(state)
    with pytest.raises(ValueError, match=f"^state: its {key}.*{message}"):
        loader.load_state_dict({**state, key: value})
    without = {name: value for name, value in state.items() if name != key}
    with pytest.raises(ValueError, match=key):
        loader.load_state_dict(without)
    assert_same(loader.state_dict(), kept)


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
    for stop in (0, 1, 2, len(whole) - 1, len(whole)):
        resumed = fastamp.DataLoader(make(), **options)
        resumed.load_state_dict(json.loads(states[stop]))
        assert_same(whole[:stop] + list(resumed), whole)


def test_a_state_of_other_workers_is_refused_inside_an_epoch(backend):
    loader = fastamp.DataLoader(Drawing(30), 4)
    next(iter(loader))
    with pytest.raises(ValueError, match="state: it is of num_workers=0, the loader's is 2"):
        fastamp.DataLoader(Drawing(30), 4, num_workers=2).load_state_dict(loader.state_dict())


def test_a_stream_without_a_state_is_read_again(backend):
    loader = fastamp.DataLoader(Stream(range(100)), 4)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    resumed = fastamp.DataLoader(Stream(range(100)), 4)
    resumed.load_state_dict(state)
    assert_same(list(resumed), list(iterator))


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
    assert loader.state_dict()["dataset"] == {"position": 12}
    assert dataset.asked == 1
    assert pickle.loads(pickle.dumps(loader)).state_dict()["dataset"] == {"position": 12}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_state_is_that_after_the_last_batch_delivered(device, backend):
    """Batches for another device than the CPU are made ahead."""
    loader = fastamp.DataLoader(Resumable(), 4, device=device)
    iterator = iter(loader)
    for count in range(1, 26):
        next(iterator)
        state = loader.state_dict()
        assert (state["dataset"], state["exhausted"]) == ({"position": 4 * count}, False)
    assert next(iterator, None) is None
    assert loader.state_dict()["dataset"] == {"position": 0}


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


@pytest.mark.parametrize("version", [None, True, 1.0, "1", torch.ones(2), torch.eye(2).to_sparse()])
def test_a_version_that_is_no_integer_is_another_version(version):
    loader = fastamp.DataLoader(X, 4)
    with pytest.raises(ValueError, match=r"state: expected what DataLoader\.state_dict returns"):
        loader.load_state_dict(loader.state_dict() | {"version": version})


def test_the_state_of_a_dataset_that_cannot_load_one_is_refused():
    loader = fastamp.DataLoader(Squares(20), 4)
    before = loader.state_dict()
    with pytest.raises(ValueError, match="state: it has the state of a dataset, and Squares has"):
        loader.load_state_dict(before | {"dataset": {"at": 3}, "epoch": 2})
    assert loader.state_dict() == before


def test_a_generator_that_is_none_is_refused_by_its_name():
    with pytest.raises(TypeError, match=r"generator: expected a torch\.Generator or None, got 3"):
        fastamp.DataLoader(X, 4, generator=3)


class Waiting(Squares):
    """Rows, of which some are given once they are asked for in earnest."""

    def __init__(self, length, slow):
        super().__init__(length)
        self.slow, self.go_on = slow, torch.multiprocessing.Event()

    def __getitem__(self, index):
        if index in self.slow:
            assert self.go_on.wait(60)
        return super().__getitem__(index)


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_others_passed_are_not_lost(workers, device):
    def make(slow, num_workers):
        options = {"num_workers": num_workers, "in_order": False, "device": device}
        return fastamp.DataLoader(Waiting(60, slow), 2, shuffle=True, seed=3, **options)

    order = [batch["x"][:, 0].int().tolist() for batch in make({}, 0)]
    seen, state = [], None
    for _ in range(2):  # it is resumed twice
        left = [row for batch in order for row in batch if row not in seen]
        loader = make(left[:2], 2)
        if state:
            loader.load_state_dict(state)
        batches = iter(loader)
        for _ in range(3):
            seen += next(batches)["x"][:, 0].int().tolist()
        state = json.loads(json.dumps(loader.state_dict()))
        assert state["late"][0] == 0
        loader.dataset.go_on.set()
        del batches
    last = make({}, workers)
    last.load_state_dict(state)
    for batch in last:
        seen += batch["x"][:, 0].int().tolist()
    assert sorted(seen) == list(range(60))
    assert last.state_dict()["late"] == []


def test_a_sharded_loader_whose_batches_come_in_any_order_has_no_state():
    options = {"shard": True, "rank": 0, "world_size": 2}
    loader = fastamp.DataLoader(Squares(40), 2, num_workers=1, in_order=False, **options)
    with pytest.raises(TypeError, match="in_order=False"):
        loader.state_dict()
