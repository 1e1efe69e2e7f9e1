"""What ends a pass over the loader: broken items, samplers, workers, Ctrl-C, a fork. No hangs."""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback

import pytest
import torch
from support.loading import Rows, Squares, assert_same, check, make_array
from support.streams import Stream
from torch.utils.data import BatchSampler, Subset, TensorDataset
from torch.utils.data import DataLoader as TorchDataLoader

import fastamp

pytestmark = pytest.mark.usefixtures("one_thread")

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
    deadline_s = time.monotonic() + 5  # torch does not wait for the threads of its queues
    while threading.active_count() > threads and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert threading.active_count() <= threads


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


def test_a_loader_can_be_used_after_an_error(backend):
    loader = fastamp.DataLoader(X, 2, sampler=[0, 1, 2, 1000])
    for _ in range(3):
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(IndexError):
            next(iterator)
        with pytest.raises(StopIteration):
            next(iterator)


KILLED = """
import os, signal, threading, time
import torch
import fastamp
from support.loading import Rows

def die(index):
    if index == 50:
        os.kill(os.getpid(), signal.SIGKILL)
    return index

start = time.monotonic()
try:
    list(fastamp.DataLoader(Rows(100, die), 5, num_workers=2))
except RuntimeError as error:
    told = "killed by signal: Killed" in str(error) or "exited unexpectedly" in str(error)
    assert "DataLoader worker" in str(error) and told, error
else:
    raise AssertionError("no error")
assert time.monotonic() - start < 10
while torch.multiprocessing.active_children() or threading.active_count() > 1:
    assert time.monotonic() - start < 10, threading.enumerate()
    time.sleep(0.01)
"""


def test_a_worker_that_is_killed_is_told():
    check(KILLED)  # apart from pytest, which torch's signal handler would disturb


def test_a_worker_that_takes_too_long_is_told():
    start_s = time.monotonic()
    loader = fastamp.DataLoader(Rows(4, lambda _: time.sleep(2)), num_workers=1, timeout=0.3)
    with pytest.raises(RuntimeError, match=r"timed out after 0.3 seconds"):
        next(iter(loader))
    assert time.monotonic() - start_s < 10


INTERRUPTED = """
import os, select, signal, sys, threading, time
import torch
import fastamp
from support.loading import Rows, Squares

def slowly(index):
    time.sleep(0.05)
    return index

def forever():
    while True:
        yield torch.zeros(3)

def stuck():
    yield 0
    time.sleep(2)
    yield 1

X = torch.zeros(100_000, 50)
cases = {
    "arrays": lambda: fastamp.DataLoader(X, 8),
    "large batches": lambda: fastamp.DataLoader(X, 50_000),
    "python": lambda: fastamp.DataLoader(Squares(10**6), 4),
    "2 workers": lambda: fastamp.DataLoader(Squares(10**6), 4, num_workers=2),
    "slow": lambda: fastamp.DataLoader(Rows(10**6, slowly), 4),
    "slow workers": lambda: fastamp.DataLoader(Rows(10**6, slowly), 4, num_workers=2),
    "prefetch": lambda: fastamp.prefetch(forever()),
    "prefetched workers": lambda: fastamp.prefetch(
        fastamp.DataLoader(Rows(10**6, slowly), 4, num_workers=2)
    ),
    "stuck producer": lambda: fastamp.prefetch(stuck()),
}

def child(loader, started):
    os.setpgid(0, 0)  # as a shell puts a program and its workers into one group
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        count = 0
        while True:
            for batch in loader:
                count += 1
                if count == 1:
                    os.write(started, b"x")
    except KeyboardInterrupt:
        pass
    del loader
    sys.exit(3)

for name in sys.argv[1:]:
    make = cases[name]
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        child(make(), writes)
    assert select.select([reads], [], [], 20)[0], name
    time.sleep(0.15)
    start = time.monotonic()
    os.killpg(pid, signal.SIGINT)
    while time.monotonic() - start < 10:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        time.sleep(0.01)
    else:
        os.killpg(pid, signal.SIGKILL)
        sys.exit(f"{name}: hangs after Ctrl-C")
    assert os.waitstatus_to_exitcode(status) == 3, (name, status)
    os.close(reads)
    os.close(writes)
"""


def test_ctrl_c_ends_a_pass_over_arrays(backend):
    check(INTERRUPTED, "arrays", "large batches", backend=backend)


def test_ctrl_c_ends_a_pass_over_any_dataset():
    check(INTERRUPTED, "python", "2 workers", "slow", "slow workers")


def test_ctrl_c_ends_a_pass_that_is_prefetched():
    check(INTERRUPTED, "prefetch", "prefetched workers", "stuck producer")


FORKED = """
import gc, os, sys, time
import torch
import fastamp
from support.loading import Squares
torch.set_num_threads(4)  # so that there are threads to miss
X = torch.arange(10_000).reshape(1000, 10)

def inherit(iterator, loader, message):
    if message:
        try:
            next(iterator)
        except RuntimeError as error:
            assert message in str(error), error
        else:
            sys.exit("no error")
    del iterator
    gc.collect()
    torch.set_num_threads(1)
    assert torch.equal(torch.cat(list(loader)), X)

threads = fastamp.backends() != ["fallback"]
for loader, message in (
    (fastamp.DataLoader(X, 10), "call iter(loader) in the child" if threads else None),
    (fastamp.prefetch(fastamp.DataLoader(X, 10)), "call iter() in the child"),
):
    iterator = iter(loader)
    first = next(iterator)
    pid = os.fork()
    if not pid:
        try:
            inherit(iterator, loader, message)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        del iterator
        os._exit(0)
    start = time.monotonic()
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        assert time.monotonic() - start < 20, "the child hangs"
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    assert torch.equal(torch.cat([first, *iterator]), X)
"""


def test_a_forked_child_begins_its_own_pass(backend):
    check(FORKED, backend=backend)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterable_dataset_that_raises_is_told(num_workers, backend):
    stream = Stream(range(10), OSError("the stream broke"))
    batches, error = drain(fastamp.DataLoader(stream, 5, num_workers=num_workers))
    assert len(batches) == 2
    assert type(error) is OSError
    assert "the stream broke" in str(error)
