"""Thread workers: the batches of a loader without workers, and nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import sys
import threading
import time
import traceback
import weakref
from collections import deque

import pytest
import torch
from support.loading import Rows, Squares, assert_same, check, ends, make_array
from support.torchs_datasets import KINDS, Augmented
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

import fastamp
from fastamp.data import auto

X = make_array(torch.float32, 100, 2000)


def workers():
    """Return the threads of loaders; those of trackers, of other files, may still be there."""
    names = "fastamp", "fastamp worker"
    return [t for t in threading.enumerate() if t.name.rstrip(" 0123456789") in names]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    assert ends(lambda: not workers())


def in_threads(dataset, batch_size=4, num_workers=3, **options):
    options = {"num_workers": num_workers, "worker": "thread", **options}
    if "batch_sampler" not in options:
        options["batch_size"] = batch_size
    return fastamp.DataLoader(dataset, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_every_kind_are_those_without_workers(kind, backend):
    def two_epochs(make, **more):
        torch.manual_seed(7)
        dataset, options = KINDS[kind]()
        options = {"batch_size": 5, **options, **more}
        if "batch_sampler" in options:
            del options["batch_size"]
        elif options["batch_size"] is not None and "sampler" not in options:
            options["shuffle"] = True
        loader = make(dataset, **options)
        return [[*loader], [*loader], len(loader), torch.get_rng_state()]

    loader = TorchDataLoader if "seed" not in KINDS[kind]()[1] else fastamp.DataLoader
    expected = two_epochs(loader)
    for more in ({"num_workers": 1}, {"persistent_workers": True}, {"device": "cpu"}):
        found = two_epochs(in_threads, **more)
        if more.get("persistent_workers"):  # torch draws no seed for the second epoch
            found[1:2], found[3:] = expected[1:2], expected[3:]
        assert_same(found, expected)


def test_threads_know_who_they_are():
    began, seen = [], set()

    class Asking(Squares):
        def __getitem__(self, index):
            info = fastamp.get_worker_info()
            assert threading.current_thread().name == f"fastamp worker {info.id}"
            assert (info.num_workers, info.dataset) == (3, self)
            seen.add((info.id, info.seed))
            assert torch.get_num_threads() == 1
            return super().__getitem__(index)

    torch.set_num_threads(2)
    assert fastamp.get_worker_info() is None
    torch.manual_seed(3)
    base = int(torch.empty((), dtype=torch.int64).random_())
    torch.manual_seed(3)
    options = {"worker_init_fn": began.append, "persistent_workers": True}
    loader = in_threads(Asking(40), **options)
    for _ in range(3):
        assert len([*loader]) == 10
    assert sorted(began) == [0, 1, 2]
    assert seen <= {(i, base + i) for i in range(3)}
    assert torch.get_num_threads() == 2
    assert len(workers()) == 3  # they persist
    del loader
    assert not workers()
    for batch in fastamp.DataLoader(Rows(4, lambda _: fastamp.get_worker_info().id), num_workers=2):
        assert batch in (0, 1)  # in processes, too


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_broken_item_is_told_where_its_batch_would_have_come(num_workers):
    broken = {14, 13, 30}

    def get(index):
        if index in broken:
            msg = f"item {index} is broken"
            raise FileNotFoundError(msg)
        return X[index]

    for options in ({}, {"in_order": False, "num_workers": 1}, {"device": "cpu"}):
        errors, batches = [], []
        iterator = iter(in_threads(Rows(40, get), **{"num_workers": num_workers, **options}))
        for _ in range(10):
            with contextlib.suppress(FileNotFoundError):
                batches.append(None)
                batches[-1] = _next(iterator, errors)
        assert next(iterator, None) is None
        assert [n for n, batch in enumerate(batches) if batch is None] == [3, 7]
        assert [str(error) for error in errors] == ["item 13 is broken", "item 30 is broken"]
        assert_same(batches[4], X[16:20])
        told = "".join(traceback.format_exception(errors[0]))
        assert "raise FileNotFoundError(msg)" in told
        if sys.version_info >= (3, 11):
            assert "fastamp.DataLoader: raised by dataset[13]" in told


def test_other_errors_come_in_their_place():
    def collate(samples):
        return fail(LookupError, "here") if samples[0] == 8 else samples

    def sampler():
        yield from range(6)
        fail(LookupError, "here")

    def init(worker):
        fail(LookupError, "here")

    for options, count in (
        ({"collate_fn": collate}, 2),
        ({"sampler": sampler()}, 1),
        ({"worker_init_fn": init}, 0),
    ):
        iterator = iter(in_threads(Rows(40, int), **options))
        for _ in range(count):
            next(iterator)
        with pytest.raises(LookupError, match="here"):
            next(iterator)
    for error in (StopIteration, SystemExit):
        iterator = iter(in_threads(Rows(4, lambda _: fail(error, "end")), 2))  # noqa: B023 - used at once
        with pytest.raises(error):
            next(iterator)
        assert not workers()


def _next(iterator, errors):
    try:
        return next(iterator)
    except FileNotFoundError as error:
        errors.append(error)
        raise


def fail(kind, text):
    raise kind(text)  # no frame keeps the error, whose traceback would keep the pass


def test_a_batch_that_takes_too_long_is_told():
    go_on = threading.Event()
    loader = in_threads(Rows(4, lambda i: go_on.wait(60) or i), timeout=0.05)
    iterator = iter(loader)
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.05 seconds"):
        next(iterator)
    go_on.set()
    del iterator


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

    for max_bytes, ahead in ((None, 6), (3 * 4 * X[0].nbytes, 3)):
        asked.clear()
        done.clear()
        options = {"sampler": Counting(), "prefetch_factor": 2, "max_bytes": max_bytes}
        iterator = iter(in_threads(Rows(80, get), 4, **options))
        assert len(asked) == 6 * 4  # as torch's loader asks
        for delivered in range(1, 8):
            next(iterator)
            assert ends(lambda: len(done) >= 4 * (delivered + ahead))  # noqa: B023 - called at once
            assert len(done) == 4 * (delivered + ahead)
        assert len(asked) == (7 + 6) * 4
        del iterator
    with pytest.raises(ValueError, match=r"max_bytes=31999: one batch takes 32000 bytes"):
        next(iter(in_threads(Rows(80, get), 4, max_bytes=31999)))


def test_large_samples_are_copied_into_the_batch_by_the_threads(monkeypatch):
    """The collate function sees what is left, and everything where shapes differ."""
    seen = []
    call = fastamp.BatchCollator.__call__

    def watched(self, samples):
        seen.append(samples)
        return call(self, samples)

    monkeypatch.setattr(fastamp.BatchCollator, "__call__", watched)
    assert_same([*in_threads(Rows(4, lambda i: X[i]))], [X[:4]])
    assert not seen
    (batch,) = in_threads(Rows(4, lambda i: {"x": X[i], "i": i, "small": X[i, :2]}))
    assert [(sample["x"], sample["i"]) for sample in seen.pop()] == [(0, i) for i in range(4)]
    assert_same(batch, {"x": X[:4], "i": torch.arange(4), "small": X[:4, :2]})
    ragged = Rows(4, lambda i: (X[i, : 2000 - (i == 2)], X[i].numpy()))
    with pytest.raises(RuntimeError, match=r"samples\[2\]\[0\] has shape \(1999,\), samples\[0\]"):
        next(iter(in_threads(ragged)))
    mixed = Rows(4, lambda i: X[i] if i else X[i].numpy())
    assert_same([*in_threads(mixed)], [*fastamp.DataLoader(mixed, 4)])


class Writing(Squares):
    """Writes its samples into rows itself."""

    def _row_specs(self):
        return [((3,), torch.float32), ((), torch.int64)]

    def _write_row(self, index, rows):
        rows[0].fill_(index)
        rows[1].fill_(index * index + fastamp.sample_rng().python.getrandbits(3))

    def __getitem__(self, index):
        rows = [torch.empty(shape, dtype=dtype) for shape, dtype in self._row_specs()]
        self._write_row(index, rows)
        return tuple(rows)


def test_a_dataset_may_write_its_samples_itself():
    for dataset in (Writing(30), torch.utils.data.Subset(Writing(30), range(7, 20))):
        expected = [*fastamp.DataLoader(dataset, 4, seed=1)]
        assert_same([*in_threads(dataset, seed=1)], expected)
        assert_same(
            [*in_threads(dataset, None, seed=1)][3], dataset[3] and expected_single(dataset)
        )


def expected_single(dataset):
    return [*fastamp.DataLoader(dataset, None, seed=1)][3]


@pytest.mark.parametrize("seed", [None, 5])
def test_a_stopped_pass_resumes_with_any_number_of_threads(seed):
    rng = random.Random(1)

    def make(num_workers, **options):
        return in_threads(
            Augmented(60), shuffle=True, seed=seed, num_workers=num_workers, **options
        )

    for trial in range(30):
        torch.manual_seed(trial)
        loader = make(rng.randrange(5), in_order=True)
        for _ in range(rng.randrange(2)):
            list(loader)
        iterator = iter(loader)
        for _ in range(rng.randrange(16)):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [*iterator]
        torch.manual_seed(1000 + trial)
        resumed = make(rng.randrange(5), device=rng.choice([None, "cpu"]))
        resumed.load_state_dict(state)
        assert_same([*resumed], rest)


def test_batches_that_others_passed_are_not_lost():
    go_on = threading.Event()

    def loader_of(slow, num_workers):
        def get(index):
            if index in slow:
                go_on.wait(60)
            return index

        options = {"in_order": False, "num_workers": num_workers}
        return in_threads(Rows(60, get), 2, shuffle=True, seed=3, **options)

    order = [index for batch in loader_of((), 0) for index in batch.tolist()]
    loader = loader_of(order[:2], 3)
    loader._batch_nbytes = 16  # as after a batch; until then threads work on the first one alone
    iterator = iter(loader)
    seen = [index for _ in range(4) for index in next(iterator).tolist()]
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["late"] == [0]
    go_on.set()
    last = loader_of((), 2)
    last.load_state_dict(state)
    seen += [index for batch in last for index in batch.tolist()]
    assert sorted(seen) == list(range(60))


def test_a_dataset_with_a_state_is_refused_a_state_by_name():
    class Stateful(Squares):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    loader = in_threads(Stateful(9))
    assert len([*loader]) == 3
    with pytest.raises(TypeError, match="worker='thread': Stateful has a state_dict"):
        loader.state_dict()


@pytest.mark.parametrize("persistent", [False, True])
def test_the_threads_end_with_their_pass(persistent):
    alive = weakref.WeakSet()

    class Item(torch.Tensor):
        pass

    def get(index):
        item = torch.zeros(3).as_subclass(Item)
        alive.add(item)
        return item

    loader = in_threads(Rows(1000, get), 5, persistent_workers=persistent)
    for _ in range(20):
        for batch in loader:
            del batch
            break
        assert len(workers()) == 3 * persistent
    iterator = iter(loader)
    next(iterator)
    del iterator, loader
    assert ends(lambda: not workers() and not alive)


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
    processes = [*loader_of("process")]
    for stop in (0, 1, 4, 7, 8, 10):
        loader = loader_of("thread")
        iterator = iter(loader)
        taken = [next(iterator) for _ in range(min(stop, len(processes)))]
        state = json.loads(json.dumps(loader.state_dict()))
        for worker in ("thread", "process")[: 1 + (stop == 4)]:
            resumed = loader_of(worker)
            resumed.load_state_dict(state)
            assert_same([*taken, *resumed], processes)
    with pytest.raises(ValueError, match="num_workers=2, the loader's is 3"):
        loader_of("thread", num_workers=3).load_state_dict(state | {"batch": 1})


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


def test_what_threads_cannot_do_is_refused():
    for worker in ("threads", 3):
        with pytest.raises(ValueError, match="worker: expected None, 'process', 'thread' or"):
            fastamp.DataLoader(Squares(3), worker=worker)
    with pytest.raises(ValueError, match="multiprocessing_context: expected None"):
        in_threads(Squares(3), multiprocessing_context="fork")


FORK = """
import os, signal, threading, time
import torch
from support.loading import Rows
import fastamp
from fastamp.data import auto

for persistent in (False, True):
    loader = fastamp.DataLoader(
        Rows(400, lambda i: torch.full((2000,), float(i))), 4,
        num_workers=3, worker="thread", persistent_workers=persistent,
    )
    iterator = iter(loader)
    next(iterator)
    if os.fork() == 0:
        try:
            next(iterator)
        except RuntimeError as error:
            assert "made before the process forked" in str(error)
            assert len(list(loader)) == 100
            del iterator, loader
            os._exit(0)
        os._exit(1)
    assert os.wait()[1] == 0
    assert len(list(iterator)) == 99

    def interrupt():
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    slow = fastamp.DataLoader(
        Rows(400, lambda i: time.sleep(0.01) or i), 4, num_workers=3, worker="thread",
        persistent_workers=persistent,
    )
    batches = []
    threading.Thread(target=interrupt).start()
    try:
        for batch in slow:
            batches.append(batch)
    except KeyboardInterrupt:
        state = slow.state_dict()
        assert state["batch"] in (len(batches), len(batches) + 1)
    slow.load_state_dict(state)
    del iterator, loader
    assert len(list(slow)) == 100 - state["batch"]
    iterator = iter(slow)  # and the process ends meanwhile
"""


def test_passes_that_end_in_every_way_leave_nothing():
    """A small part of `nox -s passes`."""
    check("from support import thread_trials as t; found = t.main(120, 1); assert not found, found")


def test_a_pass_survives_forks_and_ctrl_c():
    check(FORK)


class Frozen:
    """A clock that tells no time but that which the test lets pass."""

    def __init__(self, monkeypatch):
        self.now_s = self.cpu_s = 0.0
        monkeypatch.setattr(auto.time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(auto.time, "process_time", lambda: self.cpu_s)


PROCESSES_WIN = (0.3, 0.1, 0.0, "processes: threads made 3.33 batches/s, processes 10")


@pytest.mark.parametrize(
    ("thread_s", "process_s", "cpu", "reason", "stop"),
    [
        (*PROCESSES_WIN, None),
        (*PROCESSES_WIN, 13),
        (*PROCESSES_WIN, 60),
        (0.1, 0.3, 0.0, "threads: threads made 10 batches/s, processes 3.33", None),
        (0.1, 0.095, 0.0, "threads: threads made 10 batches/s, processes 10.5", None),
        (0.1, 0.05, 2.0, "threads: threads keep 2.0 cores busy", None),
        (0.0, 0.05, 0.0, "threads: threads keep up with the loop", None),
    ],
)
def test_auto_measures_and_chooses_once(thread_s, process_s, cpu, reason, stop, monkeypatch):
    """With the same batches, whatever it does meanwhile, and from its states."""

    def make(**options):
        options = {"worker": "auto", "num_workers": 2, "shuffle": True, "seed": 3, **options}
        return fastamp.DataLoader(Augmented(100), 1, **options)

    monkeypatch.setattr(auto, "_count_cores", lambda: 2)
    clock = Frozen(monkeypatch)
    expected = [*make(num_workers=0)]
    loader = make()
    following = auto.FetchSource.__next__

    def next_later(source):
        clock.now_s += thread_s if loader._in_threads else process_s
        clock.cpu_s += thread_s * cpu
        return following(source)

    with monkeypatch.context() as patch:
        patch.setattr(auto.FetchSource, "__next__", next_later)
        iterator = iter(loader)
        batches = []
        for batch in iterator:
            clock.now_s += 0.0 if thread_s else 0.1
            batches.append(batch)
            if len(batches) == stop:
                break
    if stop is None:
        assert_same(batches, expected)
        assert loader.stats().workers == reason
        kinds = "thread" if reason.startswith("threads") else "worker"
        assert f"in 2 {kinds}s" in loader.stats().path
        assert loader.state_dict()["worker"] == ("thread" if kinds == "thread" else "process")
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = make(num_workers=1)
    resumed.load_state_dict(state)
    rest = [*resumed]
    assert_same([*batches, *rest] if stop else rest, expected if stop else rest)
    if stop != 13:
        assert resumed.stats().workers.endswith(": as in the loaded state")
    with pytest.raises(ValueError, match="state: its worker: expected None, 'process' or 'thread'"):
        resumed.load_state_dict(state | {"worker": 3})


def test_auto_leaves_to_processes_what_threads_cannot_do():
    class Stateful(Squares):
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    for dataset, options, reason in (
        (Stateful(9), {}, "Stateful has a state_dict"),
        (Parts(), {}, "Parts is read by each worker for itself"),
        (Squares(9), {"worker_init_fn": print}, "worker_init_fn is given"),
    ):
        loader = in_threads(dataset, worker="auto", num_workers=1, **options)
        next(iter(loader))
        assert loader.stats().workers == f"processes: {reason}"
    loader = in_threads(Squares(9), worker="auto", num_workers=2)  # too small to measure
    assert len([*loader]) == 3
    assert loader.stats().workers == ("threads: the first pass was over before there was a choice")


@pytest.mark.parametrize("length", [12, 14, 18, 22, 24])
def test_a_pass_that_ends_while_auto_measures_is_whole(length):
    loader = fastamp.DataLoader(range(length), num_workers=2, worker="auto")
    for _ in range(2):
        assert torch.cat([*loader]).tolist() == list(range(length))


class DiesInAProcess(torch.utils.data.Dataset):
    """Has a worker process end at once."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 20 and torch.utils.data.get_worker_info() is not None:
            os._exit(1)
        time.sleep(1e-3)
        return index


def test_a_process_that_dies_while_auto_measures_is_told_once(monkeypatch):
    monkeypatch.setattr(auto, "_MEASURE_S", 1e-3)
    batches = iter(fastamp.DataLoader(DiesInAProcess(), 1, num_workers=2, worker="auto"))
    try:
        deque(batches, maxlen=0)
    except RuntimeError as error:
        found = traceback.format_exception(error)
    assert "exited unexpectedly" in found[-1]
    assert len(found) < 40


def test_a_prefetch_factor_of_zero_is_refused_as_by_torch():
    for worker in ("thread", "auto"):
        with pytest.raises(AssertionError, match="prefetch_factor must be greater than 0"):
            [*fastamp.DataLoader(range(5), num_workers=2, worker=worker, prefetch_factor=0)]


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


def test_a_batch_sampler_may_yield_the_same_list_again():
    class Same:
        def __iter__(self):
            batch = [0, 1]
            for batch[0] in range(5):
                yield batch

    expected = [*TorchDataLoader(range(9), batch_sampler=Same())]
    assert_same([*in_threads(range(9), batch_sampler=Same())], expected)
