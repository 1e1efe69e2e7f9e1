"""Thread workers over iterable datasets: what processes read, also after errors and stops."""

from __future__ import annotations

import contextlib
import threading
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from support.loading import assert_same
from support.thread_workers import fail, in_threads
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

import fastamp

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


class Parts(IterableDataset):
    """A stream of which each worker reads a part, of another length."""

    def __init__(self):
        self.start = 0

    def __iter__(self):
        info = fastamp.get_worker_info()
        worker = 0 if info is None else info.id
        assert info is None or info.dataset is self
        for i in range(self.start, 10 + 7 * worker):
            self.start = i
            yield worker, i, fastamp.sample_rng().python.getrandbits(40)
        self.start = 0


class StatefulParts(Parts):
    def state_dict(self):
        return {"start": self.start}

    def load_state_dict(self, state):
        self.start = state["start"] + 1


@pytest.mark.parametrize("make", [Parts, StatefulParts])
def test_a_stream_is_read_in_threads_as_in_processes(make):
    def loader_of(worker, **options):
        options = {"num_workers": 2, "seed": 3, "worker": worker, **options}
        return fastamp.DataLoader(make(), **{"batch_size": 3, **options})

    for options in ({"persistent_workers": True}, {"drop_last": True}, {"batch_size": None}):
        processes, threads = loader_of("process", **options), loader_of("thread", **options)
        assert_same([[*threads], [*threads]], [[*processes], [*processes]])
    with pytest.raises(TypeError, match=r"worker='thread': (Stateful)?Parts is iterable, and"):
        loader_of("thread").state_dict()


class Held(StatefulParts):
    """A stream whose first part waits in a thread for `go_on`."""

    go_on = threading.Event()

    def __iter__(self):
        if fastamp.get_worker_info().id == 0:
            assert self.go_on.wait(60)
        yield from super().__iter__()


def test_batches_of_a_stream_may_pass_those_of_a_slow_worker():
    def loader_of():
        options = {"in_order": False, "seed": 3, "timeout": 20, "worker": "thread"}
        return fastamp.DataLoader(Held(), 3, num_workers=2, **options)

    def samples(batches):
        leaves = (torch.cat(leaf).tolist() for leaf in zip(*batches, strict=True))
        return sorted(zip(*leaves, strict=True))

    Held.go_on.clear()
    loader = loader_of()
    iterator = iter(loader)
    taken = [next(iterator) for _ in range(6)]  # all of the second part's 17
    assert [worker for worker, _, _ in samples(taken)] == [1] * 17
    Held.go_on.set()
    assert [(worker, i) for worker, i, _ in samples(iterator)] == [(0, i) for i in range(10)]


def test_more_batches_than_a_stream_has_told_are_warned_of_as_by_torch():
    class Told(Held):
        def __len__(self):
            return 20

    Held.go_on.set()
    found = []
    for make in (TorchDataLoader, partial(fastamp.DataLoader, worker="thread")):
        told, untold = (make(Told(), 1, num_workers=2) for _ in range(2))
        assert len(told) == 20
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for loader in (told, told, untold):
                assert len([*loader]) == 27
        caught = [w for w in caught if "IterableDataset" in str(w.message)]
        found.append([str(w.message).partition(" was ")[2] for w in caught])
    assert all(Path(w.filename) == Path(__file__) for w in caught)  # older torch names itself
    assert found[0] == found[1]
    assert len(found[0]) == 14


@pytest.mark.parametrize("worker", ["process", "thread"])
def test_workers_that_persist_warn_of_a_length_that_is_told_between_passes(worker):
    class Told(Held):
        def __len__(self):
            return 20

    Held.go_on.set()
    options = {"num_workers": 2, "persistent_workers": True, "worker": worker}
    loader = fastamp.DataLoader(Told(), 1, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len([*loader]) == 27
    assert len(loader) == 20
    with pytest.warns(UserWarning, match="was reported to be 20"):
        assert len([*loader]) == 27


def test_a_stream_that_fails_in_a_thread_is_told():
    class Failing(IterableDataset):
        lock = None

        def __iter__(self):
            yield 1
            fail(LookupError, "no more")

    iterator = iter(in_threads(Failing(), 1, num_workers=1))
    assert next(iterator) == 1
    with pytest.raises(LookupError, match="no more"):
        next(iterator)
    assert next(iterator, None) is None
    dataset = Failing()
    dataset.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"copy\.deepcopy of this Failing fails"):
        iter(in_threads(dataset))


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


@pytest.mark.parametrize("worker", ["thread", "process"])
@pytest.mark.parametrize("at", [0, 4])
def test_a_stream_goes_on_after_an_error_and_draws_as_without_workers(worker, at):
    def read(**options):
        batches, found = iter(fastamp.DataLoader(Fails(at), 2, seed=3, **options)), []
        for _ in range(9):
            with contextlib.suppress(StopIteration):
                try:
                    found.append(next(batches))
                except ValueError:
                    found.append("error")
        return found

    expected, found = read(), read(num_workers=1, worker=worker)
    assert [type(each) for each in found] == [type(each) for each in expected]
    for one, other in zip(found, expected, strict=True):
        if type(other) is not str:
            assert torch.equal(one[0], other[0])
            assert at or torch.equal(one[1], other[1])
