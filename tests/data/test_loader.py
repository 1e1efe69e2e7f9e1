"""fastamp.DataLoader gives torch's batches, bit for bit, and passes for torch's loader."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import re
import time
import warnings

import numpy as np
import pytest
import torch
from support.loading import Rows, Squares, assert_same, generator, make_array
from support.streams import Stream
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data import DataLoader as TorchDataLoader

import fastamp
from fastamp.data.slots import Slots

N = 600
BATCH = 2  # 300 batches
X = make_array(torch.float32, N, 5)
Y = torch.arange(N)
NESTED = {"x": X, "y": (Y, {"z": make_array("u1", N, 2)}), "s": X[:, 0]}
THIRDS = range(0, N, 3)


def nested_row(i):
    return {"x": X[i], "y": (Y[i], {"z": NESTED["y"][1]["z"][i]}), "s": X[i, 0]}


def tokens_from(kind, folder, dtype="u2"):
    tokens = make_array(dtype, N * 4 + 3)
    if kind == "array":
        return fastamp.TokenDataset(tokens, 4)
    if kind == "tensor":
        return fastamp.TokenDataset(torch.from_numpy(tokens), 4)
    if kind == "npy":
        np.save(folder / "tokens.npy", tokens)
        return fastamp.TokenDataset(folder / "tokens.npy", 4)
    tokens.tofile(folder / "tokens.bin")
    return fastamp.TokenDataset(str(folder / "tokens.bin"), 4, dtype=dtype)


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
    "Subset of ArrayDataset": lambda _: Subset(fastamp.ArrayDataset({"x": X}), range(0, N, 2)),
    "Subset": lambda _: Subset(TensorDataset(X, Y), list(range(N))[::-1]),
    "Subset of range": lambda _: Subset(X, range(N)),
    "Subset with negatives": lambda _: Subset(X.numpy(), [-1, 0, -N] * 200),
    "Subset of Subset": lambda _: Subset(Subset(TensorDataset(X), [*THIRDS]), [-1, 5, 0] * 200),
    "Subset of tokens": lambda folder: Subset(tokens_from("npy", folder), [3, 1] * 300),
    "rows of no size": lambda _: torch.empty(N, 0, 3),
    "rows with gaps": lambda _: make_array(torch.float32, N, 9)[:, 2:7],
    "every third row": lambda _: make_array(torch.float32, 3 * N, 2)[::3],
    "numpy rows with gaps": lambda _: make_array("f4", 2 * N, 9)[::2, 2:7],
    "numpy backwards": lambda _: make_array("f4", N, 3)[::-1],
    "one row N times": lambda _: make_array(torch.int32, 1, 4).expand(N, 4),
    "big rows": lambda _: make_array(torch.uint8, N, 5000),
    **{
        f"tokens {dtype} from {kind}": functools.partial(tokens_from, kind, dtype=dtype)
        for dtype in ("u1", "u2", "i4", "i8")
        for kind in (("array", "tensor", "npy", "file") if dtype == "u2" else ("array", "file"))
    },
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
    "Squares": lambda _: Squares(N),
    "columns": lambda _: make_array(torch.float32, 3, N).T,
    "numpy columns": lambda _: make_array("f4", 3, N).T,
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
    for epoch in range(2):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        epochs.append(list(loader))
    return loader, epochs, torch.get_rng_state()


def assert_as_torch(dataset, make_options, *, gathers=None):
    ours, theirs = both(dataset)
    _, expected, expected_state = two_epochs(TorchDataLoader, theirs, make_options)
    loader, actual, state = two_epochs(fastamp.DataLoader, ours, make_options)
    assert_same(actual, expected)
    assert torch.equal(state, expected_state)
    assert loader.stats().batches == sum(map(len, expected))
    if gathers is not None:
        assert loader.stats().path.startswith("gathered") == gathers


@pytest.mark.parametrize("name", [*GATHERED, *FETCHED])
def test_batches_of_every_dataset_are_torchs(name, backend, tmp_path):
    dataset = {**GATHERED, **FETCHED}[name](tmp_path)
    assert_as_torch(
        dataset,
        lambda: {"batch_size": 5, "shuffle": True, "generator": generator(3)},
        gathers=name in GATHERED,
    )


def distributed():
    return {"sampler": DistributedSampler(Y, num_replicas=2, rank=1, seed=4), "batch_size": 7}


def replacing(num_samples):
    sampler = functools.partial(RandomSampler, Y, num_samples=num_samples)
    return {"batch_size": 9, "sampler": sampler(replacement=True)}


def worker_init(worker_id):
    assert torch.utils.data.get_worker_info().id == worker_id
    assert isinstance(torch.utils.data.get_worker_info().dataset, (TensorDataset, Squares))


def growing_batches():
    return [[*range(size)] for size in (1, 40, 0x80, 3)]


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
    "replacement, many": lambda: replacing(N * 2 + 5),
    "num_samples > n": lambda: {"batch_size": 64, "sampler": RandomSampler(Y, num_samples=1500)},
    "num_samples = 2 n": lambda: {
        "batch_size": 64,
        "sampler": RandomSampler(Y, num_samples=2 * N, generator=generator(2)),
    },
    "weights": lambda: {"batch_size": 7, "sampler": WeightedRandomSampler(Y + 1.0, 200)},
    "SubsetRandomSampler": lambda: {"batch_size": 7, "sampler": SubsetRandomSampler(THIRDS)},
    "DistributedSampler": distributed,
    "a list as batch_sampler": lambda: {"batch_sampler": growing_batches()},
    "BatchSampler": lambda: {"batch_sampler": BatchSampler(SequentialSampler(Y), 9, True)},
    "BatchSampler of random": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(Y, generator=generator(5)), 9, drop_last=False)
    },
    "no batches": lambda: {"batch_size": None, "shuffle": True},
    "no batches, workers": lambda: {
        "batch_size": None,
        "sampler": range(9, N, 20),
        "num_workers": 2,
    },
    "workers": lambda: {"num_workers": 2, "batch_size": 40, "shuffle": True},
    "persistent_workers": lambda: {
        "num_workers": 2,
        "batch_size": 40,
        "persistent_workers": True,
        "prefetch_factor": 3,
        "shuffle": True,
        "generator": generator(1),
        "timeout": 60,
    },
    "worker_init_fn": lambda: {"num_workers": 1, "worker_init_fn": worker_init, "batch_size": 99},
    "in_order": lambda: {"num_workers": 1, "in_order": False, "batch_size": 99},
    "spawn": lambda: {"num_workers": 1, "multiprocessing_context": "fork", "batch_size": 99},
    "collate_fn": lambda: {"collate_fn": list, "batch_size": 40},
    "torch's collate_fn": lambda: {"collate_fn": default_collate, "batch_size": 40},
    "larger than the dataset": lambda: {"batch_size": N + 1},
    "larger than the dataset, dropped": lambda: {"batch_size": N + 1, "drop_last": True},
}


@pytest.mark.parametrize("kind", ["arrays", "python"])
@pytest.mark.parametrize("name", OPTIONS)
def test_batches_under_every_option_are_torchs(name, kind, backend):
    assert_as_torch(TensorDataset(X, Y) if kind == "arrays" else Squares(N), OPTIONS[name])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_iterable_dataset_is_read_as_torch_reads_it(num_workers, backend):
    for options in ({"batch_size": 7}, {"batch_size": None}, {"batch_size": 7, "drop_last": True}):
        assert_as_torch(Stream(range(100)), lambda o=options: {**o, "num_workers": num_workers})


def test_the_warning_about_pinning_without_an_accelerator_is_torchs(backend):
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    for dataset in (X, Squares()):
        texts = []
        for loader_class in (TorchDataLoader, fastamp.DataLoader):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                list(loader_class(dataset, 300, pin_memory=True))
            texts.append([str(warning.message) for warning in caught])
        if not texts[0]:
            pytest.skip("torch 2.6 does not warn")
        assert texts[0] == texts[1]
        assert len(texts[0]) == 1


def test_a_batch_that_is_kept_is_not_overwritten(backend, monkeypatch):
    monkeypatch.setattr("fastamp.data.slots._REUSE_NBYTES", 1)
    loader = fastamp.DataLoader(TensorDataset(X, Y), BATCH, shuffle=True, seed=1, max_bytes=4000)
    expected = [(x.clone(), y.clone()) for x, y in loader]
    loader = fastamp.DataLoader(TensorDataset(X, Y), BATCH, shuffle=True, seed=1, max_bytes=4000)
    iterator = iter(loader)
    for start in range(0, 300, 100):
        kept = next(iterator)
        later = [next(iterator) for _ in range(50)]
        del later
        for _ in range(49):
            next(iterator)
        assert_same(tuple(kept), expected[start])


def test_a_loader_can_be_made_anew_from_its_attributes(backend):
    """As Lightning and Accelerate do it: read, replace the sampler, make another."""
    loader = fastamp.DataLoader(NESTED, 6, shuffle=True, seed=3, device="cpu", max_bytes=10**6)
    assert isinstance(loader, TorchDataLoader)
    names = inspect.signature(type(loader).__init__).parameters
    attributes = {k: v for k, v in vars(loader).items() if not k.startswith("_")}
    kwargs = {name: value for name, value in attributes.items() if name in names}
    missing = set(names) - {"self"} - set(kwargs)
    assert missing <= {"shuffle", "multiprocessing_context", "shard", "rank", "world_size"}
    sampler = DistributedSampler(loader.dataset, num_replicas=2, rank=0, shuffle=False)
    again = type(loader)(**{**kwargs, "sampler": sampler, "batch_sampler": None})
    assert torch.equal(torch.cat([batch["y"][0] for batch in again]), Y[::2])
    assert (again.seed, again.device, again.max_bytes) == (3, "cpu", 10**6)
    batches = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    accelerate = type(loader)(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        generator=loader.generator,
        multiprocessing_context=loader.multiprocessing_context,
    )
    assert torch.equal(torch.cat([batch["y"][0] for batch in accelerate]), Y[::2])
    assert len(again) == len(accelerate) == 50
    with pytest.raises(ValueError, match="attribute should not be set"):
        loader.batch_size = 4


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
@pytest.mark.parametrize("dataset", [TensorDataset(X, Y), Squares(50)], ids=["arrays", "python"])
def test_a_loader_can_be_copied_and_pickled(dataset, duplicate, backend):
    loader = fastamp.DataLoader(dataset, 8, shuffle=True, seed=2)
    next(iter(loader))
    other = duplicate(loader)
    counted = loader.stats().batches
    assert_same(list(other), list(loader))
    assert loader.stats().batches == counted + len(loader)


@pytest.mark.parametrize("dataset", [TensorDataset(X, Y), Squares(N)], ids=["arrays", "python"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_two_iterators_over_one_loader_are_apart(dataset, num_workers, backend):
    def pairs(loader_class):
        torch.manual_seed(1)
        loader = loader_class(dataset, 100, shuffle=True, num_workers=num_workers)
        first, second = iter(loader), iter(loader)
        mixed = [next(first), next(second), next(second), next(first)]
        nested = [(a, b) for a, _ in zip(loader, range(2), strict=False) for b in loader]
        return [*mixed, *nested, *first]

    assert_same(pairs(fastamp.DataLoader), pairs(TorchDataLoader))


def test_an_iterator_has_the_loaders_length(backend):
    for dataset in (TensorDataset(X, Y), Squares(30)):
        assert len(iter(fastamp.DataLoader(dataset, 7))) == len(iter(TorchDataLoader(dataset, 7)))


def test_breaking_off_leaves_the_next_epoch_alone(backend):
    loader = fastamp.DataLoader(TensorDataset(X, Y), 10, shuffle=True, seed=5)
    whole = [list(loader) for _ in range(3)]
    loader = fastamp.DataLoader(TensorDataset(X, Y), 10, shuffle=True, seed=5)
    for epoch in whole:
        for batch, expected in zip(loader, epoch[:7], strict=False):
            assert_same(batch, expected)


def test_an_iterator_stays_exhausted_and_counts_its_epoch_once(backend):
    loader = fastamp.DataLoader(X, 100, seed=0, shuffle=True)
    iterator = iter(loader)
    assert len(list(iterator)) == 6
    assert [next(iterator, None) for _ in range(3)] == [None] * 3
    assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_gives_the_same_batches(threads, backend):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_as_torch(TensorDataset(X, Y), lambda: {"batch_size": BATCH, "shuffle": True})
    finally:
        torch.set_num_threads(before)


def test_the_loader_holds_no_more_than_max_bytes(backend, monkeypatch):
    made = []
    allocate = Slots.allocate

    def watched(self, shape, dtype):
        made.append(allocate(self, shape, dtype))
        return made[-1]

    monkeypatch.setattr(Slots, "allocate", watched)
    row_nbytes = X[0].nbytes + Y[0].nbytes
    for sizes, max_bytes in (
        ([10] * 60, 25 * row_nbytes),
        ([1, 2, 20, 1, 20, 19], 24 * row_nbytes),
    ):
        made.clear()
        delivered = 0
        batches = [[*range(size)] for size in sizes]
        for batch in fastamp.DataLoader(
            TensorDataset(X, Y), batch_sampler=batches, max_bytes=max_bytes
        ):
            delivered += sum(tensor.nbytes for tensor in batch)
            assert sum(tensor.nbytes for tensor in made) - delivered <= max_bytes
        assert delivered == sum(sizes) * row_nbytes


def test_a_batch_larger_than_max_bytes_is_refused(backend):
    loader = fastamp.DataLoader(X, 10, max_bytes=199)
    with pytest.raises(ValueError, match=r"max_bytes=199: one batch takes 200 bytes"):
        next(iter(loader))
    with pytest.raises(ValueError, match="max_bytes: expected an integer of at least 1, got 0"):
        fastamp.DataLoader(X, max_bytes=0)
    assert len(list(fastamp.DataLoader(X, 10, max_bytes=200))) == 60


def test_a_bare_tuple_is_a_dataset_of_two_samples(backend):
    for pair in ((X, X + 1), [X, X + 1]):
        loader = fastamp.DataLoader(pair, 2)
        assert len(loader) == 1
        assert_same(next(iter(loader)), torch.stack((X, X + 1)))


def test_an_array_dataset_is_a_dataset_of_its_rows():
    pairs = fastamp.ArrayDataset(X, Y.numpy())
    assert isinstance(pairs, Dataset)
    assert len(pairs) == N
    assert_same(pairs[-1], (X[-1], Y.numpy()[-1]))
    assert_same(fastamp.ArrayDataset(NESTED)[3], nested_row(3))
    with pytest.raises(IndexError):
        pairs[N]


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ((), ValueError, "arrays: expected at least one tensor or NumPy array"),
        (({},), ValueError, "arrays: expected at least one tensor or NumPy array"),
        ((X, [1, 2]), TypeError, "arrays[1][0]: expected a tensor or NumPy array with a first"),
        ((X, "text"), TypeError, "with a first dimension, got str"),
        ((X, torch.tensor(1)), TypeError, "arrays[1]: expected a tensor or NumPy array with a fir"),
        ((X, Y[:3]), ValueError, "arrays[1]: has 3 rows, and arrays[0] has 600"),
        (({"x": X, "y": Y[:3]},), ValueError, "arrays['y']: has 3 rows, and arrays['x'] has 600"),
    ],
    ids=["nothing", "empty dict", "list", "text", "scalar", "lengths", "lengths in a dict"],
)
def test_what_has_no_common_rows_is_refused_by_name(arrays, error, message):
    with pytest.raises(error, match=re.escape(message)):
        fastamp.ArrayDataset(*arrays)


def test_arrays_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"dataset\['y'\]: has 3 rows, and dataset\['x'\] has 600"):
        fastamp.DataLoader({"x": X, "y": Y[:3]})


@pytest.mark.parametrize(
    "data", [b"x" * 80, b"PK\3\4" + b"x" * 80, b"\x93NUMPY\1\0v\0{'descr': '|O'}", b"\x80\4N."]
)
def test_a_damaged_npy_file_is_refused_by_name(tmp_path, data):
    path = tmp_path / "t.npy"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"t\.npy: cannot be read"):
        fastamp.TokenDataset(path, 2)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="0 tokens are too few"):
        fastamp.TokenDataset(path, 2)
    with pytest.raises(FileNotFoundError, match="missing"):
        fastamp.TokenDataset(tmp_path / "missing.npy", 2)


def test_token_files_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "t.bin"
    path.write_bytes(b"\1" * 7)
    with pytest.raises(ValueError, match="7 bytes"):
        fastamp.TokenDataset(path, 2)
    with pytest.raises(ValueError, match="too few"):
        fastamp.TokenDataset(path, 7, dtype="u1")
    for bad in (0, -1, 2.0, "2", None, True):
        with pytest.raises(ValueError, match=f"block_size: expected an integer .* got {bad!r}"):
            fastamp.TokenDataset(path, bad, dtype="u1")
    for bad in ("no dtype", "S0", "f4", object, [], 5):
        with pytest.raises(ValueError, match="dtype: "):
            fastamp.TokenDataset(path, 2, dtype=bad)
    with pytest.raises(ValueError, match="path_or_array: cannot be read"):
        fastamp.TokenDataset(torch.zeros(9, dtype=torch.int64, device="meta"), 2)
    with pytest.raises(ValueError, match="float32"):
        fastamp.TokenDataset(np.zeros(9, "f4"), 2)
    with pytest.raises(ValueError, match=r"in this machine's byte order, got [<>]u2"):
        fastamp.TokenDataset(np.zeros(9, np.dtype("u2").newbyteorder()), 2)
    with pytest.raises(ValueError, match=r"\(3, 3\)"):
        fastamp.TokenDataset(np.zeros((3, 3), "u1"), 2)


def test_a_token_file_travels_as_its_path(tmp_path):
    dataset = tokens_from("file", tmp_path)
    assert len(pickle.dumps(dataset)) < 500
    assert_same(pickle.loads(pickle.dumps(dataset))[5], dataset[5])


def test_statistics_count_what_was_delivered(backend):
    loader = fastamp.DataLoader(TensorDataset(X, Y), 100)
    assert str(loader.stats()) == "nothing measured yet"
    list(loader)
    stats = loader.stats()
    assert (stats.batches, stats.nbytes) == (6, X.nbytes + Y.nbytes)
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


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_slow_dataset_is_named_as_the_cause_of_starvation(num_workers, backend):
    def get(index):
        time.sleep(0.005)
        return X[index]

    loader = fastamp.DataLoader(Rows(40, get), 10, num_workers=num_workers)
    list(loader)
    stats = loader.stats()
    assert stats.wait_share > 0.5
    assert stats.getitem_s >= 0.2
    assert stats.getitem_s > max(stats.collate_s, stats.copy_s, stats.slot_wait_s)


def test_indices_that_are_no_integers_give_what_torch_gives(backend):
    mask = torch.arange(N) % 2 == 0
    samplers = [torch.nonzero(mask), [slice(0, 3), slice(1, 4)], [[1, 2], [3, 4]], [True, True]]
    for sampler in samplers:
        assert_same(
            list(fastamp.DataLoader(X, 2, sampler=sampler)),
            list(TorchDataLoader(X, 2, sampler=sampler)),
        )
    with pytest.raises(IndexError):
        list(fastamp.DataLoader(Subset(X, mask.numpy()), 2))


def test_a_pass_goes_on_after_an_error(backend):
    for loader_class in (fastamp.DataLoader, TorchDataLoader):
        iterator = iter(loader_class(X, 2, sampler=[1, 2, 3, N, 5, 6]))
        assert torch.equal(next(iterator), X[1:3])
        with pytest.raises(IndexError):
            next(iterator)
        assert torch.equal(next(iterator), X[5:7])


def test_the_default_device_does_not_matter(backend):
    with torch.device("meta"):
        loader = fastamp.DataLoader(Subset(X, [3, 1, 2]), 2, seed=0, shuffle=True)
        assert torch.equal(torch.cat(list(loader)).sort(0).values, X[1:4].sort(0).values)


@pytest.mark.parametrize("seed", [1.5, "a", True, -1, 2**64])
def test_a_bad_seed_is_refused(seed):
    with pytest.raises(ValueError, match="seed: expected an integer of at least 0"):
        fastamp.DataLoader(X, seed=seed)


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


def test_quantized_and_nested_tensors_are_loaded_as_in_torch(backend):
    floats = torch.arange(12.0).reshape(6, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one is deprecated, the other a prototype
        quantized = torch.quantize_per_tensor(floats, 0.5, 3, torch.quint8)
        nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    for dataset, size in ((quantized, 4), (TensorDataset(quantized), 4), (nested, 1)):
        expected = list(TorchDataLoader(dataset, size, sampler=[0, 1]))  # nested: no length
        batches = list(fastamp.DataLoader(dataset, size, sampler=[0, 1]))
        for batch, other in zip(batches, expected, strict=True):
            ours, theirs = (b[0] if type(b) is list else b for b in (batch, other))
            assert ours.dtype == theirs.dtype
            assert ours.shape == theirs.shape
            assert torch.equal(ours.dequantize(), theirs.dequantize())
