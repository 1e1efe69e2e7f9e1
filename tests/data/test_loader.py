"""fastamp.DataLoader gives torch's batches, bit for bit, and passes for torch's loader."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref

import numpy as np
import pytest
import torch
from support.loading import Rows, Squares, assert_same, generator, make_array
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

import fastamp
from fastamp.data import making

N = 600
BATCH = 2
X = make_array(torch.float32, N, 5)
Y = torch.arange(N)
NESTED = {"x": X, "y": (Y, {"z": make_array("u1", N, 2)}), "s": X[:, 0]}
THIRDS = range(0, N, 3)
WORKERS = {"num_workers": 2, "batch_size": 40, "shuffle": True}


def nested_row(i):
    return {"x": X[i], "y": (Y[i], {"z": NESTED["y"][1]["z"][i]}), "s": X[i, 0]}


def memmap(folder):
    make_array("i4", N, 3).tofile(folder / "rows.bin")
    # torch's loader warns of arrays that are read-only.
    return tuple(np.memmap(folder / "rows.bin", "i4", mode, shape=(N, 3)) for mode in "rc")


# What gathers: the dataset for both loaders, or one for each.
GATHERED = {
    "TensorDataset": lambda _: TensorDataset(X, Y),
    "tensor": lambda _: X,
    "vector": lambda _: Y,
    "ndarray": lambda _: make_array("f8", N, 2, 3),
    "vector of numpy": lambda _: make_array("f4", N),
    "memmap": memmap,
    "nested": lambda _: (NESTED, Rows(N, nested_row)),
    "ArrayDataset": lambda _: (fastamp.ArrayDataset(X, Y.numpy()), TensorDataset(X, Y)),
    "ArrayDataset of one": lambda _: (fastamp.ArrayDataset(X), TensorDataset(X)),
    "ArrayDataset of a memmap": lambda folder: fastamp.ArrayDataset(Y, memmap(folder)[1]),
    "ArrayDataset of a dict": lambda _: (fastamp.ArrayDataset(NESTED), Rows(N, nested_row)),
    "ArrayDataset of a dict and more": lambda _: (
        fastamp.ArrayDataset({"x": X}, Y, [X, (Y,)]),
        Rows(N, lambda i: ({"x": X[i]}, Y[i], [X[i], (Y[i],)])),
    ),
    "ArrayDataset of a list and a dict of one": lambda _: (
        fastamp.ArrayDataset([X], {"y": Y}),
        Rows(N, lambda i: ([X[i]], {"y": Y[i]})),
    ),
    "Subset of ArrayDataset": lambda _: Subset(fastamp.ArrayDataset({"x": X}), range(0, N, 2)),
    "Subset": lambda _: Subset(TensorDataset(X, Y), list(range(N))[::-1]),
    "Subset of range": lambda _: Subset(X, range(N - 1, -1, -2)),
    "Subset with negatives": lambda _: Subset(X.numpy(), [-1, 0, -N] * 200),
    "Subset of Subset": lambda _: Subset(Subset(TensorDataset(X), [*THIRDS]), [-1, 5, 0] * 200),
    "Subset of tokens": lambda _: Subset(fastamp.TokenDataset(make_array("u2", N), 4), [3, 1] * 9),
    "rows of no size": lambda _: torch.empty(N, 0, 3),
    "rows with gaps": lambda _: make_array(torch.float32, N, 9)[:, 2:7],
    "every third row": lambda _: make_array(torch.float32, 3 * N, 2)[::3],
    "numpy rows with gaps": lambda _: make_array("f4", 2 * N, 9)[::2, 2:7],
    "one row N times": lambda _: make_array(torch.int32, 1, 4).expand(N, 4),
    "columns": lambda _: make_array(torch.float32, 3, N).T,
    "numpy columns": lambda _: make_array("f4", 3, N).T,
    "big rows": lambda _: make_array(torch.uint8, N, 5000),
    **{
        str(dtype): functools.partial(lambda dtype, _: make_array(dtype, N, 3), dtype)
        for dtype in (
            *("?", "c8", "c16", "f2", "u2", "u4", "u8", "i1"),
            *(torch.bool, torch.complex64, torch.float16, torch.bfloat16, torch.uint16),
            *(torch.float8_e4m3fn, torch.int8),
        )
    },
}
# What goes through torch's own iterators.
FETCHED = {
    "numpy backwards": lambda _: make_array("f4", N, 3)[::-1],
    "Squares": lambda _: Squares(N),
    "big-endian": lambda _: Rows(N, lambda i: np.arange(N, dtype="f4")[i]),
    "requires_grad": lambda _: TensorDataset(X.clone().requires_grad_(), Y),
    "list": lambda _: list(range(N)),
    "tuple of two arrays": lambda _: (X, X + 1),
    "list of two arrays": lambda _: [X, X + 1],
    "dict by number": lambda _: {i: i * i for i in range(N)},
    "Subset of a tuple": lambda _: Subset((X, X + 1), [1, 0, 1]),
    "ArrayDataset of big-endian": lambda _: fastamp.ArrayDataset(Y, np.arange(N, dtype=">i8")),
    "dict of fields": lambda _: Rows(N, lambda i: {"x": X[i], "name": f"row {i}"}),
}


def both(dataset):
    """Return a dataset as fastamp's loader gets it and as torch's does."""
    if isinstance(dataset, tuple) and isinstance(dataset[1], Dataset | np.ndarray):
        return dataset
    return dataset, dataset


def two_epochs(loader_class, dataset, make_options):
    torch.manual_seed(7)
    loader = loader_class(dataset, **make_options())
    epochs = []
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        for epoch in range(2):
            if isinstance(loader.sampler, DistributedSampler):
                loader.sampler.set_epoch(epoch)
            epochs.append(list(loader))
    return loader, epochs, [torch.get_rng_state(), *(str(each.message) for each in raised)]


TORCHS = {}
"""What torch's loader gives, by the name of the case: the same on all backends."""


def assert_as_torch(case, dataset, make_options, *, gathers=None):
    ours, theirs = both(dataset)
    if case not in TORCHS:
        _, *TORCHS[case] = two_epochs(TorchDataLoader, theirs, make_options)
    expected = TORCHS[case]
    loader, *actual = two_epochs(fastamp.DataLoader, ours, make_options)
    assert_same(actual, expected)
    assert loader.stats().batches == sum(map(len, expected[0]))
    if gathers is not None:
        assert loader.stats().path.startswith("gathered") == gathers


@pytest.mark.parametrize("name", [*GATHERED, *FETCHED])
def test_batches_of_every_dataset_are_torchs(name, backend, tmp_path):
    dataset = {**GATHERED, **FETCHED}[name](tmp_path)
    assert_as_torch(
        name,
        dataset,
        lambda: {"batch_size": 5, "shuffle": True, "generator": generator(3)},
        gathers=name in GATHERED,
    )


def replacing(num_samples):
    sampler = functools.partial(RandomSampler, Y, num_samples=num_samples)
    return {"batch_size": 9, "sampler": sampler(replacement=True)}


def worker_init(worker_id):
    assert torch.utils.data.get_worker_info().id == worker_id
    assert isinstance(torch.utils.data.get_worker_info().dataset, (TensorDataset, Squares))


OPTIONS = {
    "defaults": dict,
    "global seed": lambda: {"shuffle": True, "batch_size": 64},
    "generator": lambda: {"shuffle": True, "batch_size": 64, "generator": generator(1)},
    "drop_last": lambda: {"batch_size": 64, "drop_last": True, "shuffle": True},
    "a generator without shuffle": lambda: {"batch_size": 64, "generator": generator(1)},
    "a list as sampler": lambda: {"sampler": [3, 1, -1, 5, -N] * 5, "batch_size": 4},
    "a sampler of arrays": lambda: {"sampler": np.arange(50), "batch_size": 4},
    "a sampler of tensors": lambda: {"sampler": [*torch.arange(50)], "batch_size": 4},
    "replacement": lambda: replacing(100),
    "num_samples = 2 n": lambda: {"batch_size": 64, "sampler": RandomSampler(Y, num_samples=2 * N)},
    "weights": lambda: {"batch_size": 7, "sampler": WeightedRandomSampler(Y + 1.0, 200)},
    "SubsetRandomSampler": lambda: {"batch_size": 7, "sampler": SubsetRandomSampler(THIRDS)},
    "DistributedSampler": lambda: {"batch_size": 7, "sampler": DistributedSampler(Y, 2, 1)},
    "a list as batch_sampler": lambda: {"batch_sampler": [[0], [*range(128)], range(9, 0, -2)]},
    "BatchSampler": lambda: {"batch_sampler": BatchSampler(SequentialSampler(Y), 9, True)},
    "BatchSampler of random": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(Y, generator=generator(5)), 9, drop_last=False)
    },
    "no batches": lambda: {"batch_size": None, "shuffle": True},
    "no batches, workers": lambda: {"batch_size": None, "sampler": [9, 29, 49], "num_workers": 2},
    "workers": lambda: WORKERS | {"prefetch_factor": 3, "timeout": 60},
    "persistent_workers": lambda: WORKERS | {"persistent_workers": True, "generator": generator(1)},
    "worker_init_fn": lambda: {"num_workers": 1, "worker_init_fn": worker_init, "batch_size": 99},
    "in_order": lambda: {"num_workers": 1, "in_order": False, "batch_size": 99},
    "spawn": lambda: {"num_workers": 1, "multiprocessing_context": "fork", "batch_size": 99},
    "collate_fn": lambda: {"collate_fn": list, "batch_size": 40},
    "torch's collate_fn": lambda: {"collate_fn": default_collate, "batch_size": 40},
    "larger than the dataset": lambda: {"batch_size": N + 1},
    "larger than the dataset, dropped": lambda: {"batch_size": N + 1, "drop_last": True},
}


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", ["arrays", "python"])
@pytest.mark.parametrize("name", OPTIONS)
def test_batches_under_every_option_are_torchs(name, kind, backend):
    dataset = TensorDataset(X, Y) if kind == "arrays" else Squares(N)
    assert_as_torch((name, kind), dataset, OPTIONS[name])


class LongStream(IterableDataset):
    """An iterator that `iter` begins anew. torch warns of each batch beyond its length."""

    def __iter__(self):
        self.items = iter(range(20))
        return self

    def __next__(self):
        return next(self.items)

    def __len__(self):
        return 13


STREAM = LongStream()


@pytest.mark.parametrize(("count", "persistent"), [(0, False), (2, False), (2, True)])
def test_an_iterable_dataset_is_read_as_torch_reads_it(count, persistent, backend):
    workers = {"num_workers": count, "persistent_workers": persistent}
    for options in ({"batch_size": 1}, {"batch_size": None}, {"batch_size": 7, "drop_last": True}):
        assert_as_torch(str((options, workers)), STREAM, lambda o=options: o | workers)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_data_pipes_are_read_as_torch_reads_them(num_workers):
    options = {"batch_size": 7, "shuffle": True, "num_workers": num_workers}
    shards = IterableWrapper(range(50)).shuffle().sharding_filter()
    for name, pipe in (("map", SequenceWrapper(range(50))), ("iter", shards)):
        assert_as_torch((name, num_workers), pipe, lambda: options)


@pytest.mark.parametrize("dataset", [Squares(9), IterableWrapper(range(9))], ids=["python", "pipe"])
def test_workers_that_persist_end_with_their_loader(dataset, request):
    loader = fastamp.DataLoader(dataset, 2, num_workers=1, persistent_workers=True)
    assert len([*loader, *loader]) % 2 == 0
    workers = weakref.ref(loader._fastamp.inner._iterator)
    request.addfinalizer(gc.enable)
    gc.disable()
    del loader
    assert workers() is None


def test_workers_may_be_taken_away(backend):
    loader = fastamp.DataLoader(Squares(9), 2, num_workers=1)
    loader.num_workers = 0
    assert_same([*loader], [*TorchDataLoader(Squares(9), 2)])


def test_indices_that_are_no_integers_give_what_torch_gives(backend):
    mask = torch.arange(N) % 2 == 0
    samplers = [torch.nonzero(mask), [slice(0, 3), slice(1, 4)], [[1, 2], [3, 4]], [True, True]]
    for sampler in samplers:
        assert_as_torch(str(sampler), X, lambda s=sampler: {"batch_size": 2, "sampler": s})
    if np.lib.NumpyVersion(np.__version__) >= "2.3.0":  # before, numpy.bool is an index
        with pytest.raises(IndexError):
            list(fastamp.DataLoader(Subset(X, mask.numpy()), 2))


def test_the_default_device_does_not_matter(backend):
    with torch.device("meta"):
        loader = fastamp.DataLoader(Subset(X, [3, 1, 2]), 2, seed=0, shuffle=True)
        assert torch.equal(torch.cat(list(loader)).sort(0).values, X[1:4].sort(0).values)


@pytest.mark.parametrize("true", [True, torch.tensor(data=True)])
@pytest.mark.parametrize("wrap", [lambda x: x, TensorDataset], ids=["tensor", "TensorDataset"])
def test_a_boolean_among_indices_is_what_it_is_in_torch(wrap, true, backend):
    dataset, batches = wrap(torch.arange(12).reshape(4, 3)), [[true, True], [true, 2]]
    for loader in (TorchDataLoader, fastamp.DataLoader):
        iterator = iter(loader(dataset, batch_sampler=batches))
        (first,) = next(iterator) if wrap is TensorDataset else (next(iterator),)
        assert first.shape == (2, 1, 4, 3)
        with pytest.raises(RuntimeError, match=r"\[1, 4, 3\]|\(1, 4, 3\)"):
            next(iterator)


@pytest.mark.parametrize("dataset", [TensorDataset(Y[:40]), Squares(40)], ids=["arrays", "python"])
def test_a_program_that_replaces_torchs_next_is_heard(dataset, monkeypatch):
    taken, stock = [], _BaseDataLoaderIter.__next__

    def replaced(iterator):
        batch = stock(iterator)
        taken.append(iterator._dataset)
        return batch

    expected = [*fastamp.DataLoader(dataset, 8, shuffle=True, seed=1)]
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", replaced)
    assert making.is_replaced()
    loader = fastamp.DataLoader(dataset, 8, shuffle=True, seed=1)
    assert_same([*loader], expected)
    assert taken == [dataset] * 5
    assert loader.stats().path == "item by item: torch's iterators are replaced"


class Taken(fastamp.DataLoader):
    """Has attributes and methods with the names of the loader's options."""

    def device(self):
        return "own"

    seed = worker = _stats = resident = property(lambda self: "own")


def test_a_subclass_may_use_the_names_of_the_options():
    loader = Taken(Y, 4, shuffle=True, seed=1)
    assert_same([*loader], [*fastamp.DataLoader(Y, 4, shuffle=True, seed=1)])
    assert loader.device() == loader.seed == loader.worker == loader._stats == "own"
