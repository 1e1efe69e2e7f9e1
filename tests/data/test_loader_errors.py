"""What ends a pass over the loader: broken items, samplers, workers, Ctrl-C, a fork. No hangs."""

from __future__ import annotations

import functools
import gc
import json
import sys
import threading
import time
import traceback

import pytest
import torch
from support.loading import HOST, Rows, Squares, assert_same, check, ends, make_array
from support.streams import Stream
from torch.utils.data import BatchSampler, Subset, TensorDataset
from torch.utils.data import DataLoader as TorchDataLoader

import fastamp

X = make_array(torch.float32, 1000, 5)


def drain(loader):
    """Return the batches before an error, and the error."""
    batches = []
    try:
        batches.extend(loader)  # which keeps what came before
    except Exception as error:  # noqa: BLE001 - the error is what is looked at
        return batches, error
    pytest.fail("nothing was raised")


@pytest.mark.parametrize("ahead", [False, True], ids=["alone", "prefetched"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_broken_item_reaches_the_consumer_with_its_origin(num_workers, ahead, backend):
    loader = fastamp.DataLoader(Squares(1000, bad=777), 10, num_workers=num_workers)
    gc.collect()
    threads = threading.active_count()
    batches, error = drain(fastamp.prefetch(loader) if ahead else loader)
    assert len(batches) == 77
    assert type(error) is FileNotFoundError
    assert "item 777 is broken" in str(error)
    told = "".join(traceback.format_exception(error))
    assert "in __getitem__" in told
    assert "raise FileNotFoundError(msg)" in told
    if sys.version_info >= (3, 11):
        assert "fastamp.DataLoader: raised by dataset[777]" in told
    del error
    # torch does not wait for the threads of its queues.
    assert ends(lambda: threading.active_count() <= threads)


def test_broken_items_fetched_together_are_named(backend):
    class Batched(Squares):
        def __getitems__(self, indices):
            return [self[index] for index in indices]

    batches, error = drain(fastamp.DataLoader(Batched(20, bad=13), 4))
    assert len(batches) == 3
    assert type(error) is FileNotFoundError
    if sys.version_info >= (3, 11):
        assert "[12, 13, 14, 15]" in error.__notes__[0]


@pytest.mark.parametrize("bad", [1000, -1001, 2**40])
@pytest.mark.parametrize(
    "dataset",
    [X, TensorDataset(X), Subset(X, range(1000)), Subset(X, [5, 1000, 2**40, -1001] * 250)],
    ids=["tensor", "TensorDataset", "Subset", "bad Subset"],
)
def test_an_index_out_of_bounds_is_told_as_torch_tells_it(dataset, bad, backend):
    sampler = [0, 4, 8, 12, 16, 20, bad, 0, 4]
    if isinstance(dataset, Subset) and not isinstance(dataset.indices, range):
        sampler = [0, 4, 8, 12, 16, 20, {1000: 1, 2**40: 2, -1001: 3}[bad], 0, 4]
    expected_batches, expected = drain(TorchDataLoader(dataset, 2, sampler=sampler))
    batches, error = drain(fastamp.DataLoader(dataset, 2, sampler=sampler))
    assert_same(batches, expected_batches)
    assert len(batches) == 3
    assert type(error) is type(expected)
    if isinstance(dataset, Subset) and isinstance(dataset.indices, range):
        return  # where torch says "range object index out of range"
    assert str(error) == str(expected)


def test_a_subset_of_a_subset_raises_where_the_batch_would_come():
    dataset = Subset(Subset(TensorDataset(X), [0, 1, 2]), [0, 1, 5])
    expected_batches, expected = drain(TorchDataLoader(dataset, 2))
    loader = fastamp.DataLoader(dataset, 2)
    batches, error = drain(loader)
    assert_same(batches, expected_batches)
    assert len(batches) == 1
    assert (type(error), str(error)) == (type(expected), str(expected))
    assert "item by item: the indices of the Subset" in str(loader)


def broken_after(count):
    yield from range(count)
    msg = "no more indices"
    raise LookupError(msg)


class Broken:
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return broken_after(self.count)


@pytest.mark.parametrize("dataset", [X, Squares()], ids=["arrays", "python"])
@pytest.mark.parametrize("count", [0, 1, 8, 9])
def test_a_sampler_that_raises_does_so_at_its_batch(count, dataset, backend):
    for options in (
        {"batch_size": 2, "sampler": Broken(count)},
        {"batch_sampler": BatchSampler(Broken(count), 2, drop_last=True)},
    ):
        expected_batches, expected = drain(TorchDataLoader(dataset, **options))
        batches, error = drain(fastamp.DataLoader(dataset, **options))
        assert_same(batches, expected_batches)
        assert (type(error), str(error)) == (type(expected), str(expected))


@pytest.mark.parametrize("indices", [[0.5], ["a"], []], ids=["float", "string", "empty"])
def test_indices_that_torch_refuses_are_refused(indices, backend):
    expected, _ = drain(TorchDataLoader(X, batch_sampler=[[1, 2], indices]))
    batches, _ = drain(fastamp.DataLoader(X, batch_sampler=[[1, 2], indices]))
    assert_same(batches, expected)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", [X, Squares()], ids=["arrays", "python"])
def test_a_batch_that_cannot_be_iterated_costs_no_other(dataset, num_workers, backend):
    batches = [[0], [1], [2], [3], [4], 5, [6]]
    options = {"num_workers": num_workers, "worker": "thread"}
    iterator = iter(fastamp.DataLoader(dataset, batch_sampler=batches, **options))
    assert_same([next(iterator) for _ in range(5)], [*TorchDataLoader(dataset, 1)][:5])
    with pytest.raises(TypeError, match="'int' object is not iterable"):
        next(iterator)
    assert_same(list(iterator), [*TorchDataLoader(dataset, 1)][6:7])


@pytest.mark.parametrize("dataset", [X, Squares(1000, bad=4)], ids=["arrays", "python"])
def test_what_is_prefetched_goes_on_after_an_error(dataset, backend):
    bad = 1000 if dataset is X else 4
    iterator = iter(fastamp.prefetch(fastamp.DataLoader(dataset, 1, sampler=[1, bad, 3])))
    first = next(iterator)
    with pytest.raises((IndexError, FileNotFoundError)):
        next(iterator)
    (last,) = iterator
    assert_same([first, last], list(fastamp.DataLoader(dataset, 1, sampler=[1, 3])))


def test_a_loader_can_be_used_after_an_error(backend):
    loader = fastamp.DataLoader(X, 2, sampler=[0, 1, 2, 1000])
    for _ in range(3):
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(IndexError):
            next(iterator)
        with pytest.raises(StopIteration):
            next(iterator)


def test_a_worker_that_takes_too_long_is_told():
    loader = fastamp.DataLoader(Rows(4, lambda _: time.sleep(1)), num_workers=1, timeout=0.3)
    with pytest.raises(RuntimeError, match=r"timed out after 0.3 seconds"):
        next(iter(loader))


class Interrupted:
    """Indices, between which Ctrl-C comes once."""

    def __init__(self, length, at):
        self.length, self.at = length, at

    def __len__(self):
        return self.length

    def __iter__(self):
        for index in range(self.length):
            if index == self.at:
                self.at = None
                raise KeyboardInterrupt
            yield index


class InterruptedRows(Squares):
    """Rows, one of which Ctrl-C does not give once."""

    def __getitem__(self, index):
        if index == self.bad:
            self.bad = None
            raise KeyboardInterrupt
        return super().__getitem__(index)


@pytest.mark.parametrize("device", [None, "meta"])
@pytest.mark.parametrize("kind", ["arrays", "python", "python's own"])
def test_a_pass_that_ctrl_c_interrupts_says_so_and_the_state_stays(kind, device, backend):
    dataset = X[:32] if kind == "arrays" else Squares(32)
    options = {"dataset": dataset, "batch_size": 4, "device": device}
    if kind == "python's own":
        options["dataset"] = InterruptedRows(32, bad=17)
    else:
        options["sampler"] = Interrupted(32, at=17)
    loader = fastamp.DataLoader(**options)
    iterator, before = iter(loader), []
    with pytest.raises(KeyboardInterrupt):
        before.extend(iterator)
    assert len(before) <= 4
    for _ in range(2):
        with pytest.raises(RuntimeError, match="this pass was interrupted in the middle of a"):
            next(iterator)
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (0, len(before))
    loader.load_state_dict(state)
    plain = fastamp.DataLoader(dataset, 4, device=device)
    assert_same(before + list(loader), list(plain))


class InterruptedStream(Stream):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_a_stream_that_ctrl_c_interrupts_has_no_state(backend):
    loader = fastamp.DataLoader(InterruptedStream(range(10), KeyboardInterrupt()), 4)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    with pytest.raises(RuntimeError, match="was interrupted while the dataset was read"):
        loader.state_dict()


@pytest.mark.parametrize("dataset", [Rows(4, int), torch.arange(4)], ids=["items", "gathered"])
def test_a_timeout_without_workers_is_refused_as_by_torch(dataset):
    for loader_class in (TorchDataLoader, fastamp.DataLoader):
        loader = loader_class(dataset, timeout=5)
        with pytest.raises(AssertionError):
            next(iter(loader))
    with pytest.raises(AssertionError, match="timeout: expected 0 without workers, got 5"):
        iter(loader)


# Each case runs in a child of one process, apart from pytest, whose signal handlers would disturb.
CASES = """
import gc, json, os, select, signal, sys, threading, time, traceback
import torch
import fastamp
from support.loading import Rows, Squares

LIMIT_S = 60  # for a machine whose cores are busy
X = torch.arange(10_000).reshape(1000, 10)

def slowly(index):
    time.sleep(0.05)
    return index

def forever():
    while True:
        yield torch.zeros(3)

def stuck():
    yield 0
    yield 1
    time.sleep(LIMIT_S)

def slow_workers():
    return fastamp.DataLoader(Rows(10**6, slowly), 4, num_workers=2)

interrupted = {
    "arrays": lambda: fastamp.DataLoader(X, 8),
    "large batches": lambda: fastamp.DataLoader(X.repeat(100, 5), 50_000),
    "python": lambda: fastamp.DataLoader(Squares(10**6), 4),
    "slow": lambda: fastamp.DataLoader(Rows(10**6, slowly), 4),
    "slow workers": slow_workers,
    "prefetch": lambda: fastamp.prefetch(forever()),
    "prefetched workers": lambda: fastamp.prefetch(slow_workers()),
    "stuck producer": lambda: fastamp.prefetch(stuck()),
}
forked = {
    "gathered": (
        lambda: fastamp.DataLoader(X, 10),
        None,
    ),
    "prefetched": (
        lambda: fastamp.prefetch(X.split(10), thread=True),
        "call iter() in the child",
    ),
}

def in_child(body, *arguments):
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        body(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)

def ended(pid):
    deadline = time.monotonic() + LIMIT_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return f"exit status {os.waitstatus_to_exitcode(status)}"
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"

def draw_for_ever(loader, started):
    count = 0
    while True:
        for batch in loader:
            count += 1
            if count == 1:
                os.write(started, b"x")

def until_interrupted(make, started):
    os.setpgid(0, 0)  # as a shell puts a program and its workers into one group
    signal.signal(signal.SIGINT, signal.default_int_handler)
    loader = make()
    try:
        draw_for_ever(loader, started)  # Python 3.13 lets Ctrl-C at a loop's jump out of its `try`
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    del loader

def interrupt(make):
    reads, writes = os.pipe()
    pid = in_child(until_interrupted, make, writes)
    assert select.select([reads], [], [], LIMIT_S)[0], "no batch"
    time.sleep(0.1)  # into the middle of the pass
    os.killpg(pid, signal.SIGINT)
    result = ended(pid)
    os.close(reads)
    os.close(writes)
    return result

def inherit(iterator, loader, message):
    if message:
        try:
            next(iterator)
        except RuntimeError as error:
            assert message in str(error), error
        else:
            raise AssertionError("no error")
    del iterator
    gc.collect()
    torch.set_num_threads(1)
    assert torch.equal(torch.cat(list(loader)), X)

def fork(make, message):
    torch.set_num_threads(4)  # so that there are threads to miss
    loader = make()
    iterator = iter(loader)
    first = next(iterator)
    result = ended(in_child(inherit, iterator, loader, message))
    assert torch.equal(torch.cat([first, *iterator]), X)
    torch.set_num_threads(1)
    return result

def lose_a_worker():
    def die(index):
        if index == 50:
            os.kill(os.getpid(), signal.SIGKILL)
        return index

    deadline = time.monotonic() + LIMIT_S
    try:
        list(fastamp.DataLoader(Rows(100, die), 5, num_workers=2))
    except RuntimeError as error:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises again and again
        told = "killed by signal: Killed" in str(error) or "exited unexpectedly" in str(error)
        assert "DataLoader worker" in str(error) and told, error
    except (OSError, EOFError):  # torch's, while it fetched a batch's memory from that worker
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    else:
        raise AssertionError("no error")
    while torch.multiprocessing.active_children() or threading.active_count() > 1:
        assert time.monotonic() < deadline, threading.enumerate()
        gc.collect()  # torch's handler of SIGCHLD may raise before all queues are closed
        time.sleep(0.01)

results = {}
for name in sys.argv[1:]:
    if name in interrupted:
        results[name] = interrupt(interrupted[name])
    elif name in forked:
        results[name] = fork(*forked[name])
    else:
        results[name] = ended(in_child(lose_a_worker))
print(json.dumps(results))
"""
OF_ARRAYS = ["arrays", "large batches"]
OF_PYTHON = ["python", "slow", "slow workers", "prefetch", "prefetched workers", "stuck producer"]
FORKED = ["gathered", "prefetched"]


@functools.cache
def results(backend):
    # Before there are other threads in the process: its children have none of them.
    names = [*OF_ARRAYS, *(["killed", *OF_PYTHON] if backend == HOST else []), *FORKED]
    return json.loads(check(CASES, *names, backend=backend))


@pytest.mark.parametrize("name", OF_ARRAYS)
def test_ctrl_c_ends_a_pass_over_arrays(name, backend):
    assert results(backend)[name] == "exit status 0"


@pytest.mark.parametrize("name", OF_PYTHON)
def test_ctrl_c_ends_a_pass_over_any_dataset(name):
    assert results(HOST)[name] == "exit status 0"


@pytest.mark.parametrize("name", FORKED)
def test_a_forked_child_begins_its_own_pass(name, backend):
    assert results(backend)[name] == "exit status 0"


def test_a_worker_that_is_killed_is_told():
    assert results(HOST)["killed"] == "exit status 0"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterable_dataset_that_raises_is_told(num_workers, backend):
    stream = Stream(range(10), OSError("the stream broke"))
    batches = []
    # An error that is kept would keep the worker, for whose end torch then waits 5 s.
    with pytest.raises(OSError, match="the stream broke"):
        batches.extend(fastamp.DataLoader(stream, 5, num_workers=num_workers))
    assert len(batches) == 2
