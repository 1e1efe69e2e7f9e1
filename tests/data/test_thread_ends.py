"""Thread workers: errors come in their place, and no thread outlives its pass."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
import weakref

import pytest
import torch
from support.loading import Rows, assert_same, check, ends, make_array
from support.thread_workers import fail, in_threads, workers

import fastamp

pytestmark = pytest.mark.usefixtures("no_thread_is_left")
X = make_array(torch.float32, 100, 2000)


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


def test_a_batch_that_takes_too_long_is_told():
    go_on = threading.Event()
    loader = in_threads(Rows(4, lambda i: go_on.wait(60) or i), timeout=0.05)
    iterator = iter(loader)
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 0\.05 seconds"):
        next(iterator)
    go_on.set()
    del iterator


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


FORK = """
import os, signal, threading, time
import torch
from support.loading import Rows
from torch.utils.data import IterableDataset

import fastamp

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


def test_ctrl_c_does_not_come_where_a_thread_would_wait_forever(monkeypatch):
    """In `Thread.start`, between the lock of a condition and its release."""
    enter = threading.Condition.__enter__

    def interrupted(condition):
        enter(condition)
        if threading.get_ident() == threading.main_thread().ident:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Condition, "__enter__", interrupted)
    assert len(next(iter(in_threads(Rows(9, float))))) == 4


def test_threads_that_the_system_refuses_are_told(monkeypatch):
    def refuse(_thread):
        fail(RuntimeError, "can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        iter(in_threads(Rows(9, float)))


def test_a_pass_survives_forks_and_ctrl_c():
    check(FORK)


COLLATING_CHILD = """
import os, signal, time
import torch
import fastamp

fastamp.backends()  # loads the compiled code, which uses no threads yet
torch.set_num_threads(2)
torch.ones(5_000_000).exp_()  # torch does
samples = [torch.ones(1_000_000) for _ in range(4)]
pid = os.fork()
if pid == 0:
    fastamp.BatchCollator()(samples)
    os._exit(0)
signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
signal.alarm(20)
assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.skipif("cpu" not in fastamp.backends(), reason="torch.stack waits for them")
def test_a_forked_child_waits_for_no_thread_of_its_parent():
    check(COLLATING_CHILD)
