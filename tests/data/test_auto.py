"""`worker="auto"`: threads or processes by measurement, once."""

from __future__ import annotations

import json
import os
import random
import threading
import time
import traceback
from collections import deque
from contextlib import suppress

import pytest
import torch
from support.loading import Rows, Squares, Stateful, assert_same
from support.thread_workers import in_threads
from support.torchs_datasets import Augmented
from torch.utils.data import IterableDataset, Sampler

import fastamp
from fastamp.data import auto

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


class Frozen:
    """A clock that tells no time but that which the test lets pass."""

    def __init__(self, monkeypatch):
        self.now_s = self.cpu_s = 0.0
        monkeypatch.setattr(auto.time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(auto.time, "process_time", lambda: self.cpu_s)


def let_time_pass(monkeypatch, clock, loader, thread_s, process_s, cpu=0.0):
    """Let each batch take its time, of threads and of processes."""
    following = auto.FetchSource.__next__

    def next_later(source):
        clock.now_s += thread_s if loader._in_threads else process_s
        clock.cpu_s += thread_s * cpu
        return following(source)

    monkeypatch.setattr(auto.FetchSource, "__next__", next_later)


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

    monkeypatch.setattr(auto, "count_cores", lambda: 2)
    clock = Frozen(monkeypatch)
    expected = [*make(num_workers=0)]
    loader = make()
    with monkeypatch.context() as patch:
        let_time_pass(patch, clock, loader, thread_s, process_s, cpu)
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
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(9))

    for dataset, options, reason in (
        (Stateful(9), {}, "Stateful has a state_dict"),
        (Stream(), {}, "Stream is read by each worker for itself"),
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


@pytest.mark.parametrize("process_s", [0.1, 0.3])
def test_a_sampler_is_asked_once_while_auto_measures(process_s, monkeypatch):
    """So that one that draws with Python's generator gives each sample once."""

    class Shuffled(Sampler):
        def __iter__(self):
            return iter(random.sample(range(100), 100))

    monkeypatch.setattr(auto, "count_cores", lambda: 2)
    loader = fastamp.DataLoader(range(100), 1, sampler=Shuffled(), num_workers=2, worker="auto")
    let_time_pass(monkeypatch, Frozen(monkeypatch), loader, 0.2, process_s)
    assert sorted(torch.cat([*loader]).tolist()) == list(range(100))
    assert "batches/s" in loader.stats().workers  # both have been tried


@pytest.mark.parametrize("bad", [9, 13, 14, 16])
def test_the_error_of_a_sampler_is_raised_while_auto_measures(bad, monkeypatch):
    def indices():
        yield from range(bad)
        msg = "no more indices"
        raise LookupError(msg)

    class Broken(Sampler):
        def __iter__(self):
            return indices()

    monkeypatch.setattr(auto, "count_cores", lambda: 2)
    loader = fastamp.DataLoader(range(100), 1, sampler=Broken(), num_workers=2, worker="auto")
    let_time_pass(monkeypatch, Frozen(monkeypatch), loader, 0.3, 0.1)
    seen = []
    with pytest.raises(LookupError, match="no more indices"):
        seen.extend(loader)
    assert torch.cat(seen).tolist() == [*range(bad)][: len(seen)]
    assert len(seen) >= min(bad, 12)  # torch raises it where its workers are asked for the batch


def test_states_of_batches_in_any_order_stay_exact_where_processes_take_over(monkeypatch):
    gate = torch.multiprocessing.Event()
    monkeypatch.setattr(auto, "count_cores", lambda: 2)
    dataset = Rows(40, lambda index: index + 0 * (index == 20 and gate.wait(60)))
    loader = fastamp.DataLoader(dataset, num_workers=2, worker="auto", in_order=False)
    let_time_pass(monkeypatch, Frozen(monkeypatch), loader, 0.3, 0.1)
    seen, lates = [], []
    for batch in loader:
        seen += batch.tolist()
        late = loader.state_dict()["late"]
        assert {*seen, *late} == {*range(len(seen) + len(late))}
        lates += late
        if seen[-1] > 20:
            gate.set()
    assert 20 in lates
    assert loader.stats().workers.startswith("processes")


def test_a_timeout_costs_no_batch_where_processes_take_over(monkeypatch):
    gate = threading.Event()

    def wait(index):
        assert index != 3 or gate.wait(60)
        return index

    monkeypatch.setattr(auto, "count_cores", lambda: 2)
    loader = fastamp.DataLoader(Rows(100, wait), num_workers=2, worker="auto", timeout=0.2)
    let_time_pass(monkeypatch, Frozen(monkeypatch), loader, 0.3, 0.1)
    batches, seen = iter(loader), []
    while len(seen) < 100:
        with suppress(RuntimeError):  # timeouts
            seen += next(batches).tolist()
            continue
        gate.set()
    assert gate.is_set()
    assert next(batches, None) is None
    assert seen == [*range(100)]
    assert loader.stats().workers.startswith("processes")


class DiesInAProcess(torch.utils.data.Dataset):
    """Has a worker process end at once."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 20 and torch.utils.data.get_worker_info() is not None:
            os._exit(1)
        time.sleep(1e-3)
        return index


# torch's handler may interrupt torch's own look at its files, and leave one to the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_process_that_dies_while_auto_measures_is_told_once(monkeypatch):
    monkeypatch.setattr(auto, "_MEASURE_S", 1e-3)
    batches = iter(fastamp.DataLoader(DiesInAProcess(), 1, num_workers=2, worker="auto"))
    try:
        deque(batches, maxlen=0)
    except RuntimeError as error:
        found = traceback.format_exception(error)
    assert "exited unexpectedly" in found[-1]
    assert len(found) < 40
