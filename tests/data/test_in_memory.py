"""Datasets that are read once: batches as torch's, what is refused, and the folder of the items."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import threading
import warnings
from collections import OrderedDict
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from filelock import FileLock
from support import kept_sets
from support.kept_sets import LENGTH, assert_loads_as, batches, fail_on, keep_over_ranks
from support.loading import Point, Rows, Squares, assert_same, ends, make_array
from support.ranks import start
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import fastamp
from fastamp.data.item_layout import read_layout

module = import_module("fastamp.data.in_memory")  # its name is the function's, too
BFLOATS = make_array(torch.bfloat16, LENGTH, 3)
FLOAT8S = make_array(torch.float8_e4m3fn, LENGTH, 5)
COMPLEX = make_array("complex64", LENGTH, 2)
HALVES = make_array("float16", LENGTH, 2, 2)
SHORTS = make_array("uint16", LENGTH, 4)
ITEMS = {
    "tuple": lambda i: (torch.full((3,), i), i * i),
    "list": lambda i: [torch.full((3,), i / 7), i / 3],
    "tuple of one": lambda i: (torch.tensor(i),),
    "dict": lambda i: {"x": torch.arange(i, i + 4), "y": i % 3 == 0},
    "nested": lambda i: ({"a": [i, {"b": (float(i), np.full(2, i))}]}, [torch.tensor([i])]),
    "bare tensor": lambda i: torch.full((2, 2), i, dtype=torch.int16),
    "bare array": lambda i: np.full((2,), i, np.float32),
    "bare int": lambda i: i,
    "bare float": lambda i: i / 10,
    "bare bool": lambda i: i % 2 == 1,
    "scalars": lambda i: (np.float32(i / 3), np.int16(i), np.bool_(i % 2), np.float64(i / 3)),
    "arrays of no dimension": lambda i: {"x": np.array(i / 3), "y": torch.tensor(i)},
    "bfloat16": lambda i: (BFLOATS[i], BFLOATS[i, 0]),
    "float8": lambda i: FLOAT8S[i],
    "complex": lambda i: {"x": COMPLEX[i], "y": torch.from_numpy(COMPLEX)[i]},
    "halves": lambda i: (HALVES[i], torch.from_numpy(HALVES)[i, 0]),
    "unsigned": lambda i: SHORTS[i],
    "strided": lambda i: (HALVES[i].T, torch.from_numpy(HALVES)[i].T),
    "named": lambda i: {"point": Point(i, torch.tensor([i]))},
    "ordered": lambda i: (OrderedDict(x=i, y=torch.tensor([i])), i),
    "nothing": lambda i: (i, {}, (), torch.empty(0), torch.empty(2, 0, dtype=torch.bfloat16)),
}


class Counted(kept_sets.Counted):
    def __init__(self, get=ITEMS["tuple"], length=LENGTH):
        super().__init__(get, length)


class Together(Rows):
    def __getitems__(self, indices):
        return [self.get(index) for index in indices]

    def __getitem__(self, index):
        raise NotImplementedError


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "sets" / "cache"


@pytest.mark.parametrize("item", ITEMS.values(), ids=ITEMS)
def test_batches_are_those_of_torchs_loader(backend, item, folder):
    dataset = Rows(LENGTH, item)
    assert_loads_as(fastamp.in_memory(dataset), dataset)
    for _ in ("made", "mapped"):
        assert_loads_as(fastamp.in_memory(dataset, folder), dataset)


@pytest.mark.parametrize("length", [1, 2, 3, 1025, 5000])
def test_any_length_is_read(length):
    dataset = Rows(length, ITEMS["tuple"])
    assert_same(
        batches(fastamp.DataLoader, fastamp.in_memory(dataset)), batches(DataLoader, dataset)
    )


@pytest.mark.parametrize("worker", ["process", "thread"])
def test_workers_read_the_same(worker, folder, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_ROWS", 3)
    dataset = Rows(LENGTH, ITEMS["nested"])
    for path in (None, folder):
        made = fastamp.in_memory(dataset, path, num_workers=2, worker=worker)
        assert_loads_as(made, dataset)


def test_other_processes_or_threads_read():
    dataset, main = Counted(), threading.get_ident()
    fastamp.in_memory(dataset, num_workers=2)
    assert sum(dataset.reads.values()) == 4 * 2 + 1  # the probes, in this process
    readers = set()
    fastamp.in_memory(
        Rows(LENGTH, lambda i: readers.add(threading.get_ident()) or i),
        num_workers=2,
        worker="thread",
    )
    assert readers - {main}


def test_a_dataset_goes_to_processes_that_are_spawned():
    layout = read_layout(ITEMS["named"](0))
    assert pickle.loads(pickle.dumps(layout)) == layout


def test_large_items_are_read_one_by_one():
    dataset = Rows(3, lambda i: torch.full((1 << 18,), i))
    assert_same(
        batches(fastamp.DataLoader, fastamp.in_memory(dataset)), batches(DataLoader, dataset)
    )


def test_an_item_is_what_the_original_gives_up_to_collation():
    made = fastamp.in_memory(Rows(LENGTH, lambda i: [i, np.full(2, i), True]))
    assert_same(made[5], (torch.tensor(5), torch.tensor([5, 5]), torch.tensor(True)))


def test_read_only_arrays_are_read_without_torchs_warning():
    made = fastamp.in_memory(Rows(LENGTH, lambda i: np.frombuffer(bytes([i, 7]), np.uint8)))
    assert_same(made, torch.tensor([[i, 7] for i in range(LENGTH)], dtype=torch.uint8))


def test_every_item_is_read_once_and_four_are_probed_twice():
    dataset = Counted()
    made = fastamp.in_memory(dataset)
    probed = {0: 4, 1: 3, LENGTH // 2: 3, LENGTH - 1: 3}  # item 0 has also shown the layout
    assert dataset.reads == {index: probed.get(index, 1) for index in range(LENGTH)}
    dataset.reads.clear()
    batches(fastamp.DataLoader, made)
    assert not dataset.reads


def test_items_are_read_together_as_torch_reads_them():
    dataset = Together(LENGTH, ITEMS["tuple"])
    assert_loads_as(fastamp.in_memory(dataset), dataset)


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


class Tagged(torch.Tensor):
    pass


REFUSED = {
    "text": "a",
    "nothing": None,
    "object": object(),
    "complex number": 1j,
    "grad": torch.ones(2, requires_grad=True),
    "sparse": torch.ones(2).to_sparse(),
    "meta": torch.ones(2, device="meta"),
    "subclass": torch.ones(2).as_subclass(Tagged),
    "parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
    "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
    "objects": np.array([None]),
    "texts": np.array(["a"]),
    "dates": np.array(["2020-01-01"], "M8[D]"),
    "other byte order": np.ones(2, np.dtype("f4").newbyteorder()),
    "masked": np.ma.ones(2),
    "matrix": np.ones((1, 1)).view(np.matrix),
}


@pytest.mark.parametrize("leaf", REFUSED.values(), ids=REFUSED)
def test_a_leaf_that_is_no_plain_number_is_refused(leaf):
    place = (
        r"dataset\[{}\]\['a'\]\[1\]: expected a plain tensor on the CPU, a NumPy array or a number"
    )
    with pytest.raises(TypeError, match=place.format(0)):
        fastamp.in_memory(Rows(LENGTH, lambda i: {"a": [0, leaf]}))
    with pytest.raises(TypeError, match=place.format(3)):
        fastamp.in_memory(Rows(LENGTH, lambda i: {"a": [0, leaf if i == 3 else 1]}))


def test_a_quantized_tensor_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in torch 2.13
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.5, 3, torch.quint8)
    with pytest.raises(TypeError, match=r"dataset\[0\]: expected a plain tensor .* torch.quint8"):
        fastamp.in_memory(Rows(LENGTH, lambda i: quantized))


VARYING = {
    "shape": (torch.ones(2), torch.ones(3), r"\['x'\]: is tensor of .*, shape \(3,\), in dataset"),
    "dtype": (np.ones(2), np.ones(2, "f"), r"\['x'\]: is array of torch.float32"),
    "array": (torch.ones(2), np.ones(2, "f"), r"\['x'\]: is array of .* in dataset\[0\] tensor of"),
    "float": (1, 1.5, r"\['x'\]: is float, in dataset\[0\] int"),
    "bool": (1, True, r"\['x'\]: is bool, in dataset\[0\] int"),
    "scalar": (np.float32(1), np.float64(1), r"\['x'\]: is NumPy scalar of torch.float64"),
    "one less": ([1, 2], [1], r"\['x'\]\[1\]: is missing"),
    "one more": ([1], [1, 2], r"\['x'\]\[1\]: is int, in dataset\[0\] missing"),
    "key": ({"a": 1}, {"b": 1}, r"\['x'\]\['a'\]: is missing"),
    "order": ({"a": 1, "b": 1}, {"b": 1, "a": 1}, ": has other containers, or another order"),
    "container": ([1], (1,), ": has other containers, or another order"),
    "empty": ([], (), ": has other containers, or another order"),
}


@pytest.mark.parametrize(("first", "other", "message"), VARYING.values(), ids=VARYING)
def test_items_that_vary_are_refused(first, other, message, folder):
    dataset = Rows(LENGTH, lambda i: {"x": other if i == 3 else first, "y": i})
    with pytest.raises(TypeError, match=r"dataset\[3\]" + message):
        fastamp.in_memory(dataset, folder)
    assert not folder.exists()


@pytest.mark.parametrize(
    "item",
    [Point(1, 2), OrderedDict(x=1), (), {}, ({"x": 1},), ([], {"x": ()})],
    ids=["named", "ordered", "empty tuple", "empty dict", "dict alone in a tuple", "no leaves"],
)
def test_containers_that_batches_could_not_have_are_refused(item):
    with pytest.raises(
        TypeError, match=r"dataset\[0\]: expected numbers in dicts, lists and tuples"
    ):
        fastamp.in_memory(Rows(LENGTH, lambda i: item))


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(2),
        random.random,
        lambda: np.random.rand(2),  # noqa: NPY002
        lambda: fastamp.sample_rng().numpy.random(3),
    ],
    ids=["torch", "python", "numpy", "sample_rng"],
)
@pytest.mark.parametrize("row", [0, 1, LENGTH // 2, LENGTH - 1])
def test_a_random_dataset_is_refused_by_four_of_its_items(draw, row):
    still = draw()
    dataset = Counted(lambda i: draw() if i == row else still)
    with pytest.raises(ValueError, match=rf"dataset\[{row}\]: is random"):
        fastamp.in_memory(dataset)
    assert {*dataset.reads} <= {0, 1, LENGTH // 2, LENGTH - 1}


def test_augmented_images_are_random(folder):
    images = torch.zeros(4, 3, 8, 8, dtype=torch.uint8).random_()
    augment = [fastamp.RandomCrop(padding=2)]
    dataset = fastamp.ArrayDataset(images, augment=augment)
    with pytest.raises(ValueError, match="is random"):
        fastamp.in_memory(dataset, folder)


def test_an_item_that_changes_later_is_noticed_when_it_is_read(folder):
    dataset = Counted()
    dataset.get = lambda i: sum(dataset.reads.values()) > 20 if i == LENGTH // 2 else i < 0
    with pytest.raises(ValueError, match=rf"dataset\[{LENGTH // 2}\]: is random"):
        fastamp.in_memory(dataset, folder)
    assert not folder.exists()


def test_the_programs_generators_are_left_as_they_were():
    random.seed(7)
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[1]  # noqa: NPY002
    fastamp.in_memory(Rows(LENGTH, ITEMS["dict"]), num_workers=1)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert np.array_equal(np.random.get_state()[1], states[2])  # noqa: NPY002


@pytest.mark.parametrize("in_folder", [False, True], ids=["memory", "folder"])
def test_too_many_bytes_are_refused_before_more_than_one_item_is_read(in_folder, folder):
    dataset, path, nbytes = Counted(), folder if in_folder else None, LENGTH * 4 * 8
    with pytest.raises(
        ValueError, match=f"take {nbytes:,} bytes, more than max_bytes={nbytes - 1}"
    ):
        fastamp.in_memory(dataset, path, max_bytes=nbytes - 1)
    assert dataset.reads == {0: 1}
    assert not folder.parent.exists()
    fastamp.in_memory(dataset, path, max_bytes=nbytes)


def test_more_than_half_of_the_free_memory_is_refused(monkeypatch):
    monkeypatch.setattr(module, "_free_memory", lambda: 2 * LENGTH * 32 - 2)
    with pytest.raises(ValueError, match="more than half of the free memory, see max_bytes"):
        fastamp.in_memory(Counted())
    fastamp.in_memory(Counted(), max_bytes=1 << 20)


def test_the_free_memory_is_some_of_the_machines():
    assert 1 << 20 < module._free_memory() < 1 << 50


def test_more_than_the_free_disk_is_refused(monkeypatch, folder):
    free = SimpleNamespace(free=LENGTH * 32 - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(ValueError, match="more than what is free in"):
        fastamp.in_memory(Counted(), folder, max_bytes=1 << 40)


class Stream(IterableDataset):
    def __iter__(self):
        yield 1


@pytest.mark.parametrize("dataset", [Stream(), iter([1]), DataLoader([1]), 3])
def test_only_map_style_datasets_are_taken(dataset):
    with pytest.raises(TypeError, match="dataset: expected a map-style dataset"):
        fastamp.in_memory(dataset)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="dataset: expected at least one item"):
        fastamp.in_memory([])
    for name, value in {"num_workers": -1, "max_bytes": 0, "worker": "fiber"}.items():
        with pytest.raises(ValueError, match=f"{name}: expected"):
            fastamp.in_memory(Counted(), **{name: value})
    with pytest.raises(TypeError, match="key: expected a string or None, got 3"):
        fastamp.in_memory(Counted(), key=3)


@pytest.mark.parametrize("index", [0, 20])
def test_an_items_error_is_raised_as_it_is_and_says_which_it_was(index, folder):
    with pytest.raises(FileNotFoundError, match=f"item {index} is broken") as raised:
        fastamp.in_memory(Squares(LENGTH, bad=index) if not index else Broken(index), folder)
    if hasattr(raised.value, "__notes__"):
        assert raised.value.__notes__ == [f"fastamp.in_memory: raised by dataset[{index}]"]
    assert [path.name for path in folder.parent.glob("*")] == [".cache.lock"] * (index > 0)


class Broken(Squares):
    def __init__(self, bad):
        super().__init__(LENGTH, bad)

    def __getitem__(self, index):
        return super().__getitem__(index)["x"]


@pytest.mark.parametrize("worker", ["process", "thread"])
def test_a_workers_error_is_raised(worker, folder):
    with pytest.raises(FileNotFoundError, match="item 20 is broken"):
        fastamp.in_memory(Broken(20), folder, num_workers=2, worker=worker)
    assert [path.name for path in folder.parent.iterdir()] == [".cache.lock"]


def test_a_second_run_maps_the_folder_and_reads_the_probed_items_only(folder):
    fastamp.in_memory(Counted(), folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    dataset = Counted()
    made = fastamp.in_memory(dataset, str(folder))
    assert dataset.reads == {0: 3, 1: 2, LENGTH // 2: 2, LENGTH - 1: 2}
    made[3][0].fill_(-1)  # copy on write
    assert made[3][0].tolist() == [-1] * 3
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_holds_arrays_that_numpy_opens(folder):
    fastamp.in_memory(Rows(LENGTH, lambda i: {"x": i, "y": BFLOATS[i]}), folder, key="v1")
    layout = json.loads((folder / "layout.json").read_bytes())
    assert (layout["length"], layout["class"], layout["key"]) == (LENGTH, "Rows", "v1")
    assert [leaf["name"] for leaf in layout["leaves"]] == ["['x']", "['y']"]
    assert [leaf["dtype"] for leaf in layout["leaves"]] == ["torch.int64", "torch.bfloat16"]
    x, y = (np.load(folder / leaf["file"]) for leaf in layout["leaves"])
    assert np.array_equal(x, np.arange(LENGTH))
    assert torch.equal(torch.from_numpy(y).view(torch.bfloat16)[..., 0].isnan(), BFLOATS.isnan())


class Other(Counted):
    pass


OTHERS = {
    "length": (Counted(length=LENGTH + 1), {}),
    "leaves": (Counted(lambda i: (torch.full((3,), i).int(), i * i)), {}),
    "class": (Other(), {}),
    "key": (Counted(), {"key": "v2"}),
    "items": (Counted(lambda i: (torch.full((3,), i), i)), {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_of_another_dataset_is_an_error_and_stays(name, folder):
    fastamp.in_memory(Counted(), folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    dataset, options = OTHERS[name]
    with pytest.raises(
        ValueError, match=rf"cache/layout.json: has {name} .*, this dataset .*remove"
    ):
        fastamp.in_memory(dataset, folder, **options)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "no layout": ("layout.json: expected a folder", lambda f: (f / "layout.json").unlink()),
    "half a layout": ("layout.json: expected", lambda f: (f / "layout.json").write_text('{"a')),
    "a list": ("layout.json: expected", lambda f: (f / "layout.json").write_text("[1]")),
    "other version": ("layout.json: has version 2", None),
    "no file": ("1.npy: cannot be mapped", lambda f: (f / "1.npy").unlink()),
    "short file": ("1.npy: cannot be mapped", lambda f: (f / "1.npy").write_bytes(b"\x93NUMPY")),
    "cut file": ("0.npy: cannot be mapped", lambda f: os.truncate(f / "0.npy", 500)),
    "other array": ("0.npy: is int64 of shape", lambda f: np.save(f / "0.npy", np.arange(3))),
    "other bits": (f"is damaged: its row {LENGTH - 1} ", lambda f: flip(f / "1.npy", -8)),
    "a file": ("layout.json: expected", lambda f: (shutil.rmtree(f), f.write_text("mine"))),
}


@pytest.mark.parametrize(("message", "damage"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_folder_is_an_error_that_names_the_file(message, damage, folder):
    fastamp.in_memory(Counted(), folder)
    if damage is None:
        path = folder / "layout.json"
        path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    else:
        damage(folder)
    with pytest.raises(ValueError, match=message) as raised:
        fastamp.in_memory(Counted(), folder)
    assert str(folder) in str(raised.value)


def test_what_a_killed_process_has_left_is_replaced(folder):
    part = folder.with_name(".cache.writing")
    part.mkdir(parents=True)
    (part / "0.npy").write_bytes(b"half")
    dataset = Counted()
    assert_loads_as(fastamp.in_memory(dataset, folder), dataset)
    assert not part.exists()


def test_processes_that_make_one_folder_wait_and_one_of_them_reads(folder):
    folder.parent.mkdir()
    dataset, made = Counted(), []
    calls = [
        threading.Thread(target=lambda: made.append(fastamp.in_memory(dataset, folder)))
        for _ in range(3)
    ]
    with FileLock(folder.with_name(".cache.lock"), preserve_lock_file=True):
        for call in calls:
            call.start()
            assert ends(lambda: dataset.reads[LENGTH - 1] % 2 == 0)  # probed, twice
        assert not folder.exists()
        assert dataset.reads[2] == 0
    for call in calls:
        call.join()
    assert len(made) == 3
    assert dataset.reads[2] == 1
    for each in made:
        assert_same(each[:], made[0][:])


def test_nothing_is_printed_and_the_bar_counts_the_items(monkeypatch, capfd):
    ticks = []

    class Bar:
        def __init__(self, total):
            assert total == LENGTH

        def __enter__(self):
            return ticks.append

        def __exit__(self, *_):
            pass

    fastamp.in_memory(Counted())
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(module, "progress", Bar)
    monkeypatch.setattr(module, "_CHUNK_ROWS", 10)
    fastamp.in_memory(Counted())
    assert ticks == [10, 10, 10, 7]


@pytest.fixture(scope="module")
def ranks():
    with start(2) as started:
        yield started


def test_one_rank_makes_the_folder_and_all_map_it(ranks, folder):
    reads = ranks.run(2, keep_over_ranks, folder, None)
    once = 2  # by torch's loader, for the comparison
    assert [read - once for read in reads] == [1, 0]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_is_raised_on_all(ranks, rank, folder):
    errors = ranks.run(2, fail_on, rank, folder)
    assert errors[rank] == f"KeyError({2 - 2 * rank})"
    assert errors[1 - rank] == f"RuntimeError('rank {rank} has failed: KeyError: {2 - 2 * rank}')"
    assert folder.exists() == (rank == 1)
