"""Faults of earlier loaders, one test for each: all were red."""

from __future__ import annotations

import itertools
import sys
import time

import numpy as np
import pytest
import torch
from support.loading import Rows, Squares, assert_same
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

import fastamp
from fastamp.data import making, sources
from fastamp.data.structure import map_tensors

X, Y = torch.arange(120.0).reshape(40, 3), torch.arange(40)


class Slow(Squares):
    def __getitem__(self, index):
        time.sleep(2e-3)
        return super().__getitem__(index)


@pytest.mark.parametrize("threads", [0, 1])
def test_behind_prefetch_stats_count_what_the_loop_waits_for_and_gets(threads):
    loader = fastamp.DataLoader(Slow(40), 4, num_workers=threads, worker="thread")
    batches, waited_s = iter(fastamp.prefetch(loader)), 0.0
    for number in range(1, 6):
        start_s = time.perf_counter()
        next(batches)
        waited_s += time.perf_counter() - start_s
        assert loader.stats().batches == number
        time.sleep(0.02)
    assert loader.stats().wait_s <= waited_s
    assert threads or loader.stats().wait_s > waited_s / 2


class Resumable:
    """A loader with a state, as torchdata's, which knows what was taken, not what was delivered."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while self.place < 10:
            self.place += 1
            yield torch.tensor(self.place)

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def test_a_resume_behind_prefetch_loses_no_batch_of_another_loader():
    wrapped = fastamp.prefetch(Resumable())
    batches = iter(wrapped)
    seen = [int(next(batches)) for _ in range(3)]
    state = wrapped.state_dict()
    resumed = fastamp.prefetch(Resumable())
    resumed.load_state_dict(state)
    assert [*seen, *map(int, resumed)] == [*range(1, 11)]


@pytest.mark.parametrize("source", [Resumable(), fastamp.DataLoader(X)], ids=["other", "fastamp"])
def test_a_thread_for_a_loader_with_a_state_is_refused(source):
    with pytest.raises(ValueError, match="thread: expected False for an iterable with a state"):
        fastamp.prefetch(source, thread=True)


def test_a_write_at_each_step_makes_no_batch_twice(monkeypatch):
    made, gather = [], sources.Gathered.gather
    monkeypatch.setattr(
        sources.Gathered, "gather", lambda *args: made.append(args[3]) or gather(*args)
    )
    data = X.clone()
    for number, (rows,) in enumerate(fastamp.DataLoader(TensorDataset(data), 4)):
        assert (rows == X[4 * number : 4 * number + 4] + number).all()
        data += 1
    assert made == [*range(0, 40, 4)]


def seed_all(worker_id):
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002 - torch's own recipe


def test_worker_init_fn_in_threads_leaves_the_programs_generators_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    options = {"num_workers": 2, "worker": "thread", "worker_init_fn": seed_all}
    list(fastamp.DataLoader(Squares(8), 2, seed=1, **options))
    assert torch.equal(torch.rand(1), expected)
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002


class Lazy(Dataset):
    """Opens what it reads from once for each worker, as in torch's recipe."""

    def __init__(self):
        self.place = None

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.place is None:
            self.place = [0]
        self.place[0] = index
        time.sleep(1e-4)
        return self.place[0]


def test_a_thread_reads_the_rows_that_it_asked_for():
    loader = fastamp.DataLoader(Lazy(), 4, num_workers=4, worker="thread")
    assert torch.cat([*loader]).tolist() == [*range(64)]
    both = ConcatDataset([Lazy(), Lazy()])
    loader = fastamp.DataLoader(both, 4, num_workers=4, worker="thread")
    assert torch.cat([*loader]).tolist() == [*range(64), *range(64)]
    split = random_split(Lazy(), [40, 24], generator=torch.Generator().manual_seed(0))[0]
    loader = fastamp.DataLoader(split, 4, num_workers=4, worker="thread")
    assert torch.cat([*loader]).tolist() == [*split.indices]
    assert split.dataset.place is None  # the program's own is not opened


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


def test_a_state_after_an_epoch_of_fixed_steps_begins_the_next_one():
    def take(loader, count):
        return [batch for batch, _ in zip(loader, range(count), strict=False)]

    loader = fastamp.DataLoader(Y, 4, shuffle=True, seed=1)
    for _ in loader:
        inside = loader.state_dict()
        break
    state = loader.state_dict()
    assert (inside["epoch"], inside["batch"], state["epoch"], state["batch"]) == (0, 1, 1, 0)
    resumed = fastamp.DataLoader(Y, 4, shuffle=True, seed=1)
    resumed.load_state_dict(state)
    assert_same(take(resumed, 3), take(loader, 3))
    resumed.load_state_dict(inside)
    assert len([*resumed]) == 9


class Graph:
    """Moves itself to a device, as PyG's and DGL's batches."""

    def __init__(self, x, device="cpu"):
        self.x, self.device = x, device

    def to(self, device, **_):
        return Graph(self.x, str(device))


def test_objects_that_move_themselves_are_moved():
    batch = {"graph": Graph(torch.ones(2)), "list": [Graph(torch.ones(1))], "text": "a"}
    (moved,) = fastamp.prefetch([batch], "meta")
    assert moved["graph"].device == moved["list"][0].device == "meta"
    loader = fastamp.DataLoader(Rows(4, lambda i: i), 4, collate_fn=Graph, device="meta")
    assert next(iter(loader)).device == "meta"
    assert map_tensors(lambda t: t + 1, batch)["graph"] is batch["graph"]


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


def test_worker_init_fn_without_workers_leaves_gathering_on():
    assert fastamp.DataLoader(X, 4, worker_init_fn=seed_all).stats().path == "gathered"
    path = fastamp.DataLoader(X, 4, worker_init_fn=seed_all, num_workers=1).stats().path
    assert path == "item by item, in 1 worker: worker_init_fn is given"


def test_a_subset_turns_its_indices_into_an_array_once(monkeypatch):
    made, as_rows = [], sources.as_rows
    monkeypatch.setattr(sources, "as_rows", lambda rows: made.append(type(rows)) or as_rows(rows))
    subset = Subset(TensorDataset(X), [*range(30)])
    loader = fastamp.DataLoader(subset, 10)
    for _ in range(3):
        list(loader)
    assert made.count(list) == 1
    subset.indices = [39]
    assert next(iter(loader))[0].tolist() == X[39:].tolist()
    subset.indices.append(38)
    assert next(iter(loader))[0].tolist() == X[[39, 38]].tolist()


def test_samples_are_stacked_by_one_thread(monkeypatch):
    """A team of threads waits for one that the system has put aside."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: pytest.fail("a team is asked for"))
    dataset = Rows(4, lambda index: torch.full((1 << 18,), float(index)))
    assert next(iter(fastamp.DataLoader(dataset, 4)))[:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dataset", [TensorDataset(Y), Squares(40)], ids=["arrays", "python"])
def test_a_program_that_replaces_torchs_next_is_heard(dataset, monkeypatch):
    taken, stock = [], _BaseDataLoaderIter.__next__

    def replaced(iterator):
        batch = stock(iterator)
        taken.append(iterator._dataset)
        return batch

    expected = [*fastamp.DataLoader(dataset, 8, shuffle=True, seed=1)]
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", replaced)
    assert making.is_replaced()
    loader = fastamp.DataLoader(dataset, 8, shuffle=True, seed=1)
    assert_same([*loader], expected)
    assert taken == [dataset] * 5
    assert loader.stats().path == "item by item: torch's iterators are replaced"


def test_loaders_that_share_a_collator_have_memory_of_their_own():
    collate = fastamp.BatchCollator()
    memory = collate._memory
    loaders = [fastamp.DataLoader(Squares(8), 4, collate_fn=collate) for _ in range(2)]
    for loader in loaders:
        list(loader)
        assert loader.collate_fn is collate
    assert collate._memory is memory


def test_the_profiler_sees_the_loader():
    with torch.profiler.profile() as profiled:
        list(fastamp.DataLoader(X, 8))
    names = [event.key for event in profiled.key_averages()]
    assert any(name.startswith("enumerate(DataLoader)") for name in names)


class Named(TensorDataset):
    """Overrides nothing."""


class Reading(TensorDataset):
    def __getitem__(self, index):
        return super().__getitem__(index)


def test_a_subclass_that_overrides_nothing_is_gathered():
    assert fastamp.DataLoader(Named(X, Y)).stats().path == "gathered"
    assert fastamp.DataLoader(Subset(Named(X), [1])).stats().path == "gathered"
    assert fastamp.DataLoader(Reading(X)).stats().path == "item by item: the dataset is a Reading"


class Taken(fastamp.DataLoader):
    """Has attributes and methods with the names of the loader's options."""

    def device(self):
        return "own"

    seed = worker = _stats = resident = property(lambda self: "own")


def test_a_subclass_may_use_the_names_of_the_options():
    loader = Taken(Y, 4, shuffle=True, seed=1)
    assert_same([*loader], [*fastamp.DataLoader(Y, 4, shuffle=True, seed=1)])
    assert loader.device() == loader.seed == loader.worker == loader._stats == "own"


def test_whoever_rebuilds_a_sharded_loader_loses_neither_order_nor_samples():
    loader = fastamp.DataLoader(Y, 4, shuffle=True, seed=3, rank=1, world_size=2)
    assert (len(loader), len(loader.batch_sampler)) == (5, 10)
    rows = [*itertools.chain(*loader.batch_sampler)]
    expected = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    assert rows == expected.tolist()
    again = torch.utils.data.DataLoader(Y, batch_sampler=loader.batch_sampler)
    second = torch.randperm(40, generator=torch.Generator().manual_seed(4))
    assert torch.cat([*again]).tolist() == second.tolist()
    assert torch.cat([*loader]).tolist() == expected[1::2].tolist()


def test_a_gathered_batch_takes_at_most_eight_calls_of_python():
    batches = iter(fastamp.DataLoader(TensorDataset(X, Y), 4, shuffle=True, seed=1))
    next(batches)
    calls = []

    def note(frame, event, _):
        if event == "call":
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        next(batches)
    finally:
        sys.setprofile(None)
    assert len(calls) <= 8, calls


def test_default_collate_is_what_a_loader_says_it_uses():
    assert fastamp.DataLoader(X).collate_fn is default_collate


def test_prefetch_without_a_copy_takes_no_batch_before_the_loop_asks():
    """A generator may write each batch into the same memory."""

    def write_into_one():
        batch = torch.zeros(1)
        for number in range(3):
            yield batch.fill_(number)

    assert [batch.item() for batch in fastamp.prefetch(write_into_one(), "cpu")] == [0, 1, 2]


def test_a_method_set_on_a_dataset_is_called():
    dataset = TensorDataset(X)
    dataset.__getitems__ = lambda indices: [torch.tensor(7)] * len(indices)
    assert next(iter(fastamp.DataLoader(dataset, 2))).tolist() == [7, 7]


def test_sparse_samples_get_torchs_error():
    with pytest.raises(RuntimeError, match="custom collate_fn"):
        next(iter(fastamp.DataLoader(TensorDataset(X.to_sparse()), 2)))


def test_a_loop_that_fails_keeps_its_place_while_the_pass_is_held():
    loader = fastamp.DataLoader(TensorDataset(X), 4, seed=0)
    batches = iter(loader)

    def train():
        for number, _ in enumerate(batches, 1):
            1 / (3 - number)

    with pytest.raises(ZeroDivisionError):
        train()
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (0, 3)
