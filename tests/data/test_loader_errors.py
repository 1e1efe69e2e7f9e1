"""What ends a pass over the loader: broken items, samplers, workers, Ctrl-C, a fork. No hangs."""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback

import pytest
import torch
from support.loading import Rows, Squares, assert_same, ends, make_array
from support.streams import Stream
from torch.utils.data import BatchSampler, SequentialSampler, Subset, TensorDataset
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


BAD = [5, 1000, 2**40, -1001] * 250


@pytest.mark.parametrize("bad", [1000, -1001, 2**40])
@pytest.mark.parametrize(
    "dataset",
    [
        X,
        TensorDataset(X),
        Subset(X, range(1000)),
        Subset(X, BAD),
        Subset(Subset(X, BAD), [*range(40)]),
    ],
    ids=["tensor", "TensorDataset", "Subset", "bad Subset", "Subset of a bad one"],
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


@pytest.mark.parametrize("dataset", [X, Squares()], ids=["arrays", "python"])
def test_a_sampler_of_indices_in_the_place_of_batches_is_an_error_as_in_torch(dataset):
    with pytest.raises(TypeError, match="not iterable"):
        next(iter(fastamp.DataLoader(dataset, batch_sampler=SequentialSampler(dataset))))


@pytest.mark.parametrize("indices", [[0.5], ["a"], [], range(5, 3), range(990, 1010, 2)], ids=str)
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
        with pytest.raises(RuntimeError, match="this pass was interrupted or failed in"):
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
    with pytest.raises(RuntimeError, match="interrupted or failed: the dataset's pos"):
        loader.state_dict()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterable_dataset_that_raises_is_told(num_workers, backend):
    stream = Stream(range(10), OSError("the stream broke"))
    batches = []
    with pytest.raises(OSError, match="the stream broke") as raised:
        batches.extend(fastamp.DataLoader(stream, 5, num_workers=num_workers))
    # They hold the worker, for whose end the garbage collection would wait 5 s.
    traceback.clear_frames(raised.tb)
    assert len(batches) == 2
