"""Batches beside a GPU, without one: gathered on it, and copied to it by their consumer."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from support.loading import assert_same, ends, make_array
from support.stream_model import Model
from support.stream_schedules import prefetching
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import Subset, TensorDataset, random_split

import fastamp
from fastamp import _ops
from fastamp.data.columns import find_core
from fastamp.data.gather import GatherSource

X, Y = make_array(torch.float32, 40, 3, 5), torch.arange(40)
TOKENS = np.arange(65500, 65536, dtype=np.uint16)


@pytest.fixture
def model():
    model = Model(0)
    with model.installed(prefetching), _ops.use_only("fallback"):
        yield model
    assert model.found == []


def make_datasets(folder):
    parts = []
    for name, tokens in (("a", TOKENS[:17]), ("b", TOKENS[17:])):
        parts.append(folder / name)
        tokens.tofile(parts[-1])
    np.save(folder / "rows.npy", make_array("<u2", 40, 7))
    return {
        "tensors": TensorDataset(X, Y),
        "nested": {"x": X, "y": (Y.numpy(), make_array("?", 40))},
        "a memmap": np.load(folder / "rows.npy", mmap_mode="r"),
        "part": Subset(TensorDataset(X, Y), [*range(30, 0, -3), -1, -40]),
        "tokens": fastamp.TokenDataset(TOKENS, 4),
        "files of tokens": fastamp.TokenDataset(parts, 4, random_offsets=True, dtype="uint16"),
        "wide tokens": fastamp.TokenDataset(TOKENS.astype("u4") * 65537, 4),
    }


NAMES = "tensors", "nested", "a memmap", "part", "tokens", "files of tokens", "wide tokens"


def compare(ours, theirs):
    """Compare batches on a device with those of the host."""
    ours, spec = tree_flatten(ours)
    theirs, expected = tree_flatten(theirs)
    assert spec == expected
    for one, other in zip(ours, theirs, strict=True):
        assert one.device == torch.device("cuda:1")
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.numpy().tobytes() == other.numpy().tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_resident_batches_and_states_are_those_of_the_host(name, model, tmp_path, monkeypatch):
    monkeypatch.setattr("fastamp.data.resident._CHUNK_NBYTES", 50)
    dataset = make_datasets(tmp_path)[name]
    options = {"batch_size": 2, "shuffle": True, "seed": 3}
    host = fastamp.DataLoader(dataset, **options)
    there = fastamp.DataLoader(dataset, device="cuda:1", resident=True, **options)
    if name == "nested" and torch.__version__ < (2, 10):
        pytest.skip("torch 2.6 collates NumPy's booleans as another type")
    assert str(there).endswith("gathered on cuda:1")
    for stop in (1, 3):
        expected, batches = [*host], iter(there)
        found = [next(batches) for _ in range(stop)]
        state = json.loads(json.dumps(there.state_dict()))
        for ours, theirs in zip([*found, *batches], expected, strict=True):
            compare(ours, theirs)
        for make, check in (({}, assert_same), ({"device": "cuda:1", "resident": True}, compare)):
            resumed = fastamp.DataLoader(dataset, **options, **make)
            resumed.load_state_dict(state)
            for ours, theirs in zip(resumed, expected[stop:], strict=True):
                check(ours, theirs)
    again = pickle.loads(pickle.dumps(fastamp.DataLoader(dataset, device="cuda:1", resident=True)))
    assert again._moved is None


def test_a_loader_says_how_it_reads_without_a_look_at_the_device(monkeypatch):
    monkeypatch.setattr(torch, "empty", None)
    loader = fastamp.DataLoader(X, 4, device="cuda")
    assert str(loader).startswith("fastamp.DataLoader: gathered by")


def test_nothing_waits_for_a_resident_batch(model, monkeypatch):
    batches = iter(fastamp.DataLoader(X, 4, device="cuda:1", resident=True))
    next(batches)  # the dataset is moved
    for kind in (model.Stream, model.Event):
        monkeypatch.setattr(kind, "synchronize", None)
    assert len([*batches]) == 9


def test_windows_of_one_sequence_are_moved_once(model):
    loader = fastamp.DataLoader(fastamp.TokenDataset(TOKENS, 4), device="cuda:1", resident=True)
    next(iter(loader))
    x, y = (column.array for column in loader._moved)
    assert x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    assert y.storage_offset() == 1


def test_the_splits_of_a_dataset_share_what_is_moved(model):
    first, second = random_split(TensorDataset(X, Y), [30, 10])
    loaders = [
        fastamp.DataLoader(split, 4, device="cuda:1", resident=True) for split in (first, second)
    ]
    for loader in loaders:
        next(iter(loader))
    ours, theirs = ([column.array for column in loader._moved] for loader in loaders)
    assert [x.data_ptr() for x in ours] == [x.data_ptr() for x in theirs]


def test_memory_of_a_dataset_is_not_used_again_while_it_is_read(model):
    loader = fastamp.DataLoader(X, 4, device="cuda:1", resident=True)
    batches = iter(loader)
    next(batches)
    model.current.streams[1] = model.Stream(1)
    batch = next(batches)
    model.current.streams[1] = model.defaults[1]
    del batches, loader, batch
    for _ in range(10):
        torch.empty(3, device="cuda:1").fill_(1.0)


def test_data_that_is_on_the_device_is_gathered_there(model):
    there = [part.to("cuda:1") for part in (X, Y)]
    for device in (None, "cuda:1"):
        loader = fastamp.DataLoader(TensorDataset(*there), 4, device=device, num_workers=2)
        assert loader.stats().path == "gathered on cuda:1"
        for ours, theirs in zip(loader, fastamp.DataLoader(TensorDataset(X, Y), 4), strict=True):
            compare(ours, theirs)
    elsewhere = fastamp.DataLoader(TensorDataset(*there), 4, device="cuda:0")
    assert str(elsewhere).endswith("item by item: the TensorDataset is on another device")
    mixed = fastamp.DataLoader(TensorDataset(X, there[1]), 4)
    assert str(mixed).endswith("the TensorDataset holds more than plain arrays")


def test_what_cannot_be_resident_is_refused_and_nothing_has_begun(model, monkeypatch):
    with pytest.raises(ValueError, match="resident=True: device: expected the device to keep"):
        fastamp.DataLoader(X, resident=True)
    images = fastamp.ArrayDataset(X, augment=[fastamp.RandomHorizontalFlip()])
    for dataset, error in (
        (
            [*range(9)],
            "expected a dataset that is gathered, this is read item by item",
        ),
        (images, "images are augmented on the host: leave out resident, or augment"),
        (X.expand(50, 40, 3, 5).flatten(0, 1), "takes 120000 bytes, and cuda:1 has 50000 free"),
    ):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (50000, 10**9))
        loader = fastamp.DataLoader(dataset, device="cuda:1", resident=True, shuffle=True, seed=1)
        state = loader.state_dict()
        with pytest.raises(ValueError, match=error):
            iter(loader)
        assert loader.state_dict() == state


@pytest.mark.parametrize("resident", [True, False])
def test_an_index_that_is_out_of_bounds_is_told_where_its_batch_would_come(resident, model):
    dataset = TensorDataset(X, Y)
    options = {"batch_sampler": [[0, 1], [3, 40], [-1]], "device": "cuda:1", "resident": resident}
    batches = iter(fastamp.DataLoader(dataset, **options))
    compare(next(batches), [X[:2], Y[:2]])
    with pytest.raises(IndexError, match="index 40 is out of bounds for dimension 0 with size 40"):
        next(batches)
    compare(next(batches), [X[39:], Y[39:]])
    assert next(batches, None) is None


def test_the_consumer_begins_the_copies_of_what_is_gathered(model, monkeypatch):
    """And no thread of Python runs beside it."""
    done = []
    monkeypatch.setattr(GatherSource, "is_next_ready", lambda source: done and done.pop())
    begun, start = [], prefetching.CudaCopies.start
    monkeypatch.setattr(
        prefetching.CudaCopies, "start", lambda *args: begun.append(1) or start(*args)
    )
    loader = fastamp.DataLoader(TensorDataset(X, Y), 4, device="cuda:1")
    batches = iter(loader)
    expected = iter(fastamp.DataLoader(TensorDataset(X, Y), 4))
    for ready, count in (([], 1), ([True], 3), ([], 3), ([], 4), ([True] * 9, 7), ([True] * 9, 8)):
        done[:] = ready
        compare(next(batches), next(expected))
        assert len(begun) == count
    assert len(model.threads) == 1
    for ours, theirs in zip(batches, expected, strict=True):
        compare(ours, theirs)


def test_the_core_says_when_a_batch_is_gathered():
    if find_core() is None:
        pytest.skip("needs the compiled core")
    for size, count in ((1 << 20, 6), (2, 40)):  # a small one is ready at any time
        loader = fastamp.DataLoader(torch.zeros(count, size), 2)
        source = iter(loader)._batches
        assert not source.is_next_ready()
        for _ in range(count // 2 - 1):
            next(source)
            assert ends(source.is_next_ready) if size > 2 else source.is_next_ready()
        next(source)
        assert not source.is_next_ready()


@pytest.mark.cuda
@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_batches_are_those_of_the_host(name, resident, device, tmp_path):
    dataset = make_datasets(tmp_path)[name]
    options = {"batch_size": 2, "shuffle": True, "seed": 3}
    host = fastamp.DataLoader(dataset, **options)
    there = fastamp.DataLoader(dataset, device=device, resident=resident, **options)
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            found = []
            for batch in there:
                torch.cuda._sleep(10**6)
                found.append(tree_map(torch.clone, batch))
            assert_same(tree_map(torch.Tensor.cpu, found), [*host])
