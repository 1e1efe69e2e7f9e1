"""What a loader says of itself: the way its batches are made, and what it waits for."""

from __future__ import annotations

import time

import pytest
import torch
from support.loading import Rows, Squares, make_array
from support.streams import Stream
from torch.utils.data import Subset, TensorDataset, default_collate

import fastamp
from fastamp.data import LoaderStats

ROWS = TensorDataset(torch.arange(8))
X, Y = make_array(torch.float32, 600, 5), torch.arange(600)


@pytest.mark.parametrize(
    ("times", "verdict"),
    [
        ({"wait_s": 0.04, "getitem_s": 0.04}, "compute-bound"),
        ({"wait_s": 0.18, "getitem_s": 0.17, "collate_s": 0.01}, "starved 18 %: getitem"),
        ({"wait_s": 0.18, "collate_s": 0.9}, "starved 18 %: collate"),  # of several workers
        ({"wait_s": 0.98, "copy_s": 0.0143}, "starved 98 %"),
        ({"wait_s": 0.06, "copy_s": 0.04}, "starved 6 %"),
        ({"wait_s": 0.5, "getitem_s": 0.3, "collate_s": 0.2}, "starved 50 %"),
        ({"path": "item by item, in 2 threads: a reason"}, "compute-bound; its threads may hold"),
    ],
)
def test_a_cause_is_named_only_where_it_explains_the_waiting(times, verdict):
    said = str(LoaderStats(batches=1, elapsed_s=1.0, **times))
    assert said.startswith(verdict) if "path" in times else said == verdict


ITEM_BY_ITEM = {
    "the dataset is a Squares": {"dataset": Squares()},
    "the dataset is a Stream": {"dataset": Stream(range(3))},
    "the dataset is a list": {"dataset": Subset([1, 2], [1])},
    "the indices of the Subset are not all rows of its dataset": {"dataset": Subset(ROWS, [10**6])},
    "the tuple holds more than plain arrays in one place": {
        "dataset": TensorDataset(torch.ones(8, requires_grad=True))
    },
    "the loader makes no batches": {"dataset": ROWS, "batch_size": None},
    "collate_fn is the user's": {"dataset": ROWS, "collate_fn": lambda rows: rows},
    "collate_fn pads": {"dataset": ROWS, "collate_fn": fastamp.BatchCollator(pad=0)},
}


@pytest.mark.parametrize("reason", ITEM_BY_ITEM)
def test_a_loader_says_why_it_goes_item_by_item(reason):
    loader = fastamp.DataLoader(**ITEM_BY_ITEM[reason])
    assert loader.stats().path == f"item by item: {reason}"
    assert str(loader) == f"fastamp.DataLoader: item by item: {reason}"
    for count, workers in ((1, "1 worker"), (2, "2 workers")):
        loader = fastamp.DataLoader(**ITEM_BY_ITEM[reason], num_workers=count)
        assert loader.stats().path == f"item by item, in {workers}: {reason}"


@pytest.mark.parametrize("dataset", [ROWS, Subset(ROWS, [1]), torch.ones(3), {"x": torch.ones(3)}])
def test_a_loader_says_that_its_batches_are_gathered(dataset, backend):
    for options in ({}, {"collate_fn": default_collate, "num_workers": 2}):
        loader = fastamp.DataLoader(dataset, **options)
        assert str(loader) == "fastamp.DataLoader: gathered"
        assert loader.stats().path == "gathered"


def test_statistics_count_what_was_delivered(backend):
    loader = fastamp.DataLoader(TensorDataset(X, Y), 100)
    assert str(loader.stats()) == "nothing measured yet"
    list(loader)
    stats = loader.stats()
    assert stats.batches == 6
    assert stats.copy_s > 0
    list(loader)
    assert (stats.batches, loader.stats().batches) == (6, 12)


def test_a_slow_consumer_is_told_that_it_is_compute_bound(backend, monkeypatch):
    now_s = [1.0]
    monkeypatch.setattr("fastamp.data.passes.time.perf_counter", lambda: now_s[0])
    loader = fastamp.DataLoader(TensorDataset(X, Y), 100)
    for _ in loader:
        now_s[0] += 0.05
    assert str(loader.stats()) == "compute-bound"
    assert loader.stats().elapsed_s == pytest.approx(0.3)  # the last batch counts too


def get_slowly(index):
    time.sleep(0.005)
    return X[index]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_slow_dataset_is_named_as_the_cause_of_starvation(num_workers, backend):
    loader = fastamp.DataLoader(Rows(40, get_slowly), 10, num_workers=num_workers)
    list(loader)
    stats = loader.stats()
    assert stats.wait_s > stats.elapsed_s / 2
    assert stats.getitem_s >= 0.2
    assert stats.getitem_s > max(stats.collate_s, stats.copy_s)


@pytest.mark.parametrize("threads", [0, 1])
def test_behind_prefetch_stats_count_what_the_loop_waits_for_and_gets(threads):
    loader = fastamp.DataLoader(Rows(40, get_slowly), 4, num_workers=threads, worker="thread")
    batches, waited_s = iter(fastamp.prefetch(loader)), 0.0
    for number in range(1, 6):
        start_s = time.perf_counter()
        next(batches)
        waited_s += time.perf_counter() - start_s
        assert loader.stats().batches == number
        time.sleep(0.02)
    assert loader.stats().wait_s <= waited_s
    assert threads or loader.stats().wait_s > waited_s / 2


def test_worker_init_fn_without_workers_leaves_gathering_on():
    assert fastamp.DataLoader(X, 4, worker_init_fn=print).stats().path == "gathered"
    path = fastamp.DataLoader(X, 4, worker_init_fn=print, num_workers=1).stats().path
    assert path == "item by item, in 1 worker: worker_init_fn is given"


def test_the_profiler_sees_the_loader():
    with torch.profiler.profile() as profiled:
        list(fastamp.DataLoader(X, 8))
    assert any(event.key.startswith("enumerate(DataLoader)") for event in profiled.key_averages())


class Named(TensorDataset):
    """Overrides nothing."""


class Reading(TensorDataset):
    def __getitem__(self, index):
        return super().__getitem__(index)


def test_a_subclass_that_overrides_nothing_is_gathered():
    assert fastamp.DataLoader(Named(X, Y)).stats().path == "gathered"
    assert fastamp.DataLoader(Subset(Named(X), [1])).stats().path == "gathered"
    assert fastamp.DataLoader(Reading(X)).stats().path == "item by item: the dataset is a Reading"
