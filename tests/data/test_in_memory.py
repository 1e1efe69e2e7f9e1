"""Datasets that are read once: batches as torch's, what is refused, and the folder of the items."""

from __future__ import annotations

import os
import random
import shutil
import threading
import traceback
from collections import Counter, OrderedDict
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.loading import Point, Rows, Squares, assert_same, generator, make_array
from support.streams import Stream
from torch.utils.data import DataLoader, Subset, TensorDataset

import fastamp

LENGTH = 37
module = import_module("fastamp.data.in_memory")  # its name is the function's, too
BFLOATS = make_array(torch.bfloat16, LENGTH, 3)
FLOAT8S = make_array(torch.float8_e4m3fn, LENGTH, 5)
ITEMS = {
    "tuple": lambda i: (torch.full((3,), i), i * i),
    "list": lambda i: [torch.full((3,), i / 7), i / 3],
    "dict": lambda i: {"x": torch.arange(i, i + 4), "y": i % 3 == 0},
    "nested": lambda i: ({"a": [i, {"b": (float(i), np.full(2, i))}]}, [torch.tensor([i])]),
    "bare tensor": lambda i: torch.full((2, 2), i, dtype=torch.int16),
    "bare array": lambda i: np.full((2,), i, np.float32),
    "bare int": lambda i: i,
    "bare bool": lambda i: i % 2 == 1,
    "scalars": lambda i: (np.float32(i / 3), np.int16(i), np.bool_(i % 2), np.float64(i / 3)),
    "bfloat16": lambda i: (BFLOATS[i], BFLOATS[i, 0]),
    "float8": lambda i: FLOAT8S[i],
    "nothing": lambda i: (i, {}, (), torch.empty(0)),
    "named tuple": lambda i: Point(i, [i]),
    "ordered dict": lambda i: OrderedDict(x=i, a=[i]),
}


class Counted(Rows):
    """A dataset of the items of a function, which counts how often each is read."""

    def __init__(self, get=ITEMS["tuple"], length=LENGTH):
        super().__init__(length, get)
        self.reads = Counter()

    def __getitem__(self, index):
        self.reads[index] += 1
        return self.get(index)


def batches(kind, dataset):
    """Return a shuffled epoch, in an order that each call repeats."""
    return list(kind(dataset, 8, shuffle=True, generator=generator(3)))


def assert_loads_as(made, original):
    """Compare batches with those of torch's loader over the original."""
    ours = fastamp.DataLoader(made, 8, shuffle=True, generator=generator(3))
    assert "item by item" not in str(ours)
    expected = batches(DataLoader, original)
    assert_same(list(ours), expected)
    assert_same(batches(DataLoader, made), expected)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "sets" / "cache"


@pytest.mark.parametrize("item", ITEMS.values(), ids=ITEMS)
def test_batches_are_those_of_torchs_loader(item, folder):
    dataset = Rows(LENGTH, item)
    assert_loads_as(fastamp.in_memory(dataset), dataset)
    if item in (ITEMS["bfloat16"], ITEMS["float8"]):
        with pytest.raises(TypeError, match="unsupported ScalarType"):
            fastamp.in_memory(dataset, folder)
        return
    for _ in ("made", "mapped"):
        assert_loads_as(fastamp.in_memory(dataset, folder), dataset)


@pytest.mark.parametrize(("length", "size"), [(1, 3), (2, 3), (1025, 1), (3, 1 << 18)])
def test_any_length_and_size_is_read(length, size):
    dataset = Rows(length, lambda i: (torch.full((size,), i), i * i))
    assert_loads_as(fastamp.in_memory(dataset), dataset)


@pytest.mark.parametrize("worker", ["process", "thread"])
def test_workers_read_the_same(worker, folder, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_ROWS", 3)
    readers, main = set(), (os.getpid(), threading.get_ident())
    dataset = Rows(LENGTH, lambda i: readers.add(threading.get_ident()) or ITEMS["nested"](i))
    for path in (None, folder):
        assert_loads_as(fastamp.in_memory(dataset, path, num_workers=2, worker=worker), dataset)
    assert (len(readers) > 1) == (worker == "thread")
    items = Rows(9, lambda i: [os.getpid(), threading.get_ident()] if i == 2 else [*main])
    found = fastamp.in_memory(items, num_workers=2, worker=worker)[2]
    assert [int(part) for part in found] != [*main]


def test_an_item_is_what_the_original_gives_up_to_collation():
    made = fastamp.in_memory(Rows(LENGTH, lambda i: [i, np.array([i, 7], "u1"), (True,)]))
    array = torch.tensor([5, 7], dtype=torch.uint8)
    assert_same(made[5], (torch.tensor(5), array, [torch.tensor(True)]))


def test_every_item_is_read_once_and_eight_are_probed_four_times():
    dataset = Counted()
    made = fastamp.in_memory(dataset)
    probed = dict.fromkeys((0, 1, 6, 12, 18, 24, 30, 36), 5)
    assert dataset.reads == {index: probed.get(index, 1) for index in range(LENGTH)}
    dataset.reads.clear()
    batches(fastamp.DataLoader, made)
    assert not dataset.reads


def test_what_is_gathered_already_is_returned_as_it_is():
    rows = TensorDataset(torch.arange(6))
    tokens = fastamp.TokenDataset(np.arange(50), 4, random_offsets=True)
    for dataset in (rows, Subset(rows, [1, 3]), rows.tensors[0], np.arange(3), tokens):
        assert fastamp.in_memory(dataset) is dataset
    table = fastamp.in_memory({"x": torch.arange(3)})
    assert_same(next(iter(fastamp.DataLoader(table, 3))), {"x": torch.arange(3)})


def test_what_is_gathered_already_may_be_kept_in_a_folder(folder):
    dataset = fastamp.ArrayDataset({"x": np.arange(LENGTH), "y": torch.rand(LENGTH, 2)})
    assert_loads_as(fastamp.in_memory(dataset, folder), dataset)


REFUSED = {
    "text": "a",
    "complex number": 1j,
    "grad": torch.ones(2, requires_grad=True),
    "meta": torch.ones(2, device="meta"),
    "objects": np.array([None]),
}


@pytest.mark.parametrize("leaf", REFUSED.values(), ids=REFUSED)
def test_a_leaf_that_is_no_plain_number_is_refused(leaf):
    with pytest.raises(TypeError, match=r"dataset\[0\]: expected plain tensors on|default_collate"):
        fastamp.in_memory(Rows(LENGTH, lambda i: {"a": [0, leaf]}))


VARYING = {
    "shape": (torch.ones(2), torch.ones(3), RuntimeError),
    "dtype": (np.ones(2, "f"), np.ones(2), TypeError),
    "float": (1, 1.5, TypeError),
    "grad": (torch.ones(2), torch.ones(2, requires_grad=True), TypeError),
    "one less": ([1, 2], [1], RuntimeError),
    "key": ({"a": 1}, {"b": 1}, KeyError),
}


@pytest.mark.parametrize(("first", "other", "error"), VARYING.values(), ids=VARYING)
@pytest.mark.parametrize("rows", [1, 5])
def test_items_that_vary_are_refused(first, other, error, rows, folder, monkeypatch):
    """By torch where they do not collate, also if each fills a batch of its own."""
    monkeypatch.setattr(module, "_CHUNK_ROWS", rows)
    dataset = Rows(LENGTH, lambda i: {"x": other if i == 3 else first, "y": i})
    error = (error, TypeError) if rows == 1 else error
    with pytest.raises(error, match=r"dataset\[|stack|equal size|expected Tensor|'a'"):
        fastamp.in_memory(dataset, folder)
    assert not folder.exists()
    assert not list(folder.parent.iterdir())


DRAWS = {
    "torch": lambda: float(torch.rand(())),
    "python": random.random,
    "numpy": np.random.rand,
    "sample_rng": lambda: float(fastamp.sample_rng().numpy.random()),
}


@pytest.mark.parametrize("source", DRAWS)
@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.95])
def test_a_random_transform_is_noticed_though_it_is_rare(source, p, folder):
    """As a flip that depends on one draw: two seeds for all rows would give all rows the same."""
    draw = DRAWS[source]
    with pytest.raises(ValueError, match=r"dataset\[\d+\]: is random"):
        fastamp.in_memory(Rows(LENGTH, lambda i: -i - 1 if draw() < p else i + 1), folder)
    assert not folder.parent.exists()


def test_the_programs_generators_are_left_as_they_were():
    random.seed(7)
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[1]  # noqa: NPY002
    fastamp.in_memory(Rows(LENGTH, ITEMS["dict"]), num_workers=1)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert np.array_equal(np.random.get_state()[1], states[2])  # noqa: NPY002


def test_more_than_the_free_disk_is_refused(monkeypatch, folder):
    free = SimpleNamespace(free=LENGTH * 32 - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(OSError, match="no space for 1,184 bytes"):
        fastamp.in_memory(Counted(), folder)


@pytest.mark.parametrize("dataset", [Stream([1]), iter([1]), DataLoader([1]), 3, []])
def test_only_map_style_datasets_with_items_are_taken(dataset):
    said = r"len\(\)|subscriptable|^dataset: has no items$"
    with pytest.raises((TypeError, ValueError), match=said):
        fastamp.in_memory(dataset)


class Broken(Squares):
    def __getitem__(self, index):
        return super().__getitem__(index)["x"]


@pytest.mark.parametrize(
    "workers", [{}, {"num_workers": 2}, {"num_workers": 2, "worker": "thread"}]
)
@pytest.mark.parametrize("index", [0, 20])
def test_an_items_error_is_raised_as_it_is_and_says_which_it_was(index, workers, folder):
    with pytest.raises(FileNotFoundError, match=f"item {index} is broken") as raised:
        fastamp.in_memory(Broken(LENGTH, index), folder, **workers)
    if hasattr(raised.value, "__notes__") and not workers:
        assert raised.value.__notes__[0] == f"fastamp.DataLoader: raised by dataset[{index}]"
    assert not list(folder.parent.glob("*"))
    # They hold the workers, for whose end the garbage collection would wait 5 s.
    traceback.clear_frames(raised.tb)


def test_a_second_run_maps_the_folder_and_reads_the_probed_items_only(folder):
    fastamp.in_memory(Counted(), folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    dataset = Counted()
    made = fastamp.in_memory(dataset, str(folder))
    assert len(dataset.reads) == 8
    made[3][0].fill_(-1)  # copy on write
    assert made[3][0].tolist() == [-1] * 3
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_holds_arrays_that_numpy_opens(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    fastamp.in_memory(Rows(LENGTH, lambda i: {"x": i, "y": [i / 3]}), "~/cache")
    x, y = (np.load(tmp_path / "cache" / name) for name in ("0.npy", "1.npy"))
    assert np.array_equal(x, np.arange(LENGTH))
    assert np.array_equal(y, np.arange(LENGTH) / 3)


OTHERS = {
    "length": (Counted(length=LENGTH - 1), "it holds"),
    "dtype": (Counted(lambda i: (torch.full((3,), i).int(), i * i)), "it holds"),
    "more leaves": (Counted(lambda i: (torch.full((3,), i), i * i, i)), "2.npy"),
    "row": (Counted(lambda i: (torch.full((3,), i), i * i + (i == 36))), "items .36. differ; rem"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_of_another_dataset_is_an_error_and_stays(name, folder):
    fastamp.in_memory(Counted(), folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    dataset, found = OTHERS[name]
    with pytest.raises((ValueError, FileNotFoundError), match=f"cache.*{found}"):
        fastamp.in_memory(dataset, folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
