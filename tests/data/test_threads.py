"""Thread workers: the batches of a loader without workers, as far ahead as asked."""

from __future__ import annotations

import functools
import gc
import threading
import time

import numpy as np
import pytest
import torch
from support.loading import Rows, Squares, Stateful, assert_same, check, ends, make_array
from support.streams import Stream
from support.thread_workers import in_threads, workers
from support.torchs_datasets import KINDS
from torch.utils.data import ConcatDataset, Dataset, TensorDataset, random_split
from torch.utils.data import DataLoader as TorchDataLoader

import fastamp

X = make_array(torch.float32, 100, 2000)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    assert ends(lambda: not workers())


def two_epochs(make, kind, **more):
    torch.manual_seed(7)
    dataset, options = KINDS[kind]()
    options = {"batch_size": 5, **options, **more}
    if "batch_sampler" in options:
        del options["batch_size"]
    elif options["batch_size"] is not None and "sampler" not in options:
        options["shuffle"] = True
    loader = make(dataset, **options)
    return [[*loader], [*loader], len(loader), torch.get_rng_state()]


@functools.cache
def without_workers(kind):
    seeded = "seed" in KINDS[kind]()[1]
    return two_epochs(fastamp.DataLoader if seeded else TorchDataLoader, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_every_kind_are_those_without_workers(kind, backend):
    expected = [*without_workers(kind)]
    for more in ({"num_workers": 1}, {"device": "cpu"}):
        assert_same(two_epochs(in_threads, kind, **more), expected)


def test_threads_know_who_they_are():
    began, seen = [], set()

    class Asking(Squares):
        def __getitem__(self, index):
            info = fastamp.get_worker_info()
            assert threading.current_thread().name.startswith("fastamp worker")
            assert (info.num_workers, info.dataset is self) == (3, True)
            assert info.rng is None
            seen.add((info.id, info.seed))
            assert torch.get_num_threads() == 1
            return super().__getitem__(index)

    torch.set_num_threads(2)
    assert fastamp.get_worker_info() is None
    torch.manual_seed(3)
    base = int(torch.empty((), dtype=torch.int64).random_())
    torch.manual_seed(3)
    loader = in_threads(Asking(40), worker_init_fn=began.append)
    assert len([*loader]) == 10
    assert sorted(began) == [0, 1, 2]
    assert seen <= {(i, base + i) for i in range(3)}
    assert torch.get_num_threads() == 2
    assert ends(lambda: not workers())
    for batch in fastamp.DataLoader(Rows(4, lambda _: fastamp.get_worker_info().id), num_workers=2):
        assert batch in (0, 1)  # in processes, too


@pytest.mark.parametrize("grad", [False, True])
def test_threads_record_gradients_where_the_loop_does(grad):
    weight = torch.ones(1, requires_grad=True)
    with torch.set_grad_enabled(grad):
        batches = [*in_threads(Rows(9, lambda index: weight * index))]
    assert {batch.requires_grad for batch in batches} == {grad}


def test_batches_are_made_ahead_as_far_as_asked():
    asked, done = [], []

    class Counting:
        def __iter__(self):
            for index in range(80):
                asked.append(index)
                yield index

    def get(index):
        done.append(index)
        return X[index]

    options = {"sampler": Counting(), "prefetch_factor": 2}
    iterator = iter(in_threads(Rows(80, get), 4, **options))
    for delivered in range(1, 8):
        next(iterator)
        assert ends(lambda: len(done) >= 4 * (delivered + 6))  # noqa: B023 - called at once
        assert len(done) == 4 * (delivered + 6)
    assert len(asked) == (7 + 6) * 4


def test_what_threads_cannot_do_is_refused():
    for worker in ("threads", 3):
        with pytest.raises(ValueError, match="worker: expected None, 'process' or 'thread'"):
            fastamp.DataLoader(Squares(3), worker=worker)
    of_processes = {"multiprocessing_context": "fork", "in_order": False, "timeout": 3}
    for name, value in {**of_processes, "persistent_workers": True}.items():
        with pytest.raises(ValueError, match=f"{name}: expected worker='process' with it"):
            in_threads(Squares(3), **{name: value})
    with pytest.raises(ValueError, match="iterable dataset: expected worker="):
        in_threads(Stream(range(3)))
    with pytest.raises(TypeError, match="num_workers: Stateful has a position of its own in each"):
        in_threads(Stateful(9)).state_dict()


def test_a_dropped_pass_begins_no_more_batches():
    gate, done = threading.Event(), []

    def get(index):
        assert index < 4 or gate.wait(30)
        done.append(index)
        return X[index]

    batches = iter(in_threads(Rows(80, get), 4, 1))
    next(batches)
    threading.Timer(0.5, gate.set).start()
    del batches
    assert done == [*range(8)]


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
def test_a_batch_sampler_may_yield_the_same_indices_again(kind):
    class Same:
        def __iter__(self):
            batch = kind([0, -1])
            for batch[0] in range(5):
                yield batch

    for dataset in (range(9), TensorDataset(torch.arange(9))):
        expected = [*TorchDataLoader(dataset, batch_sampler=Same())]
        assert_same([*in_threads(dataset, batch_sampler=Same())], expected)


def test_passes_that_end_in_any_way_leave_nothing():
    """A small part of tests/support/thread_trials.py."""
    check("from support import thread_trials as t; found = t.main(120, 1); assert not found, found")


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
