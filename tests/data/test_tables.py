"""Hugging Face datasets: gathered where that gives torch's batches, and else left to them."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from support.loading import assert_same, generator
from torch.utils.data import DataLoader, Subset

import fastamp
from fastamp.data.columns import Column, Windows, make_gatherer
from fastamp.data.tables import read_table

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")

ROWS = 2300
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"]
FLOATS = ["float32", "float64"]


def make_numbers(count=ROWS):
    """Return columns with the ends of each range, infinities, NaNs and what float32 rounds."""
    rng = np.random.default_rng(0)
    columns = {}
    for name in INTEGERS:
        bounds = np.iinfo(name)
        columns[name] = rng.integers(bounds.min, bounds.max, count, name, endpoint=True)
        columns[name][:2] = bounds.min, bounds.max
    for name in FLOATS:
        columns[name] = (rng.standard_normal(count) * 2.0 ** rng.integers(-150, 13, count)).astype(
            name
        )
        columns[name][:5] = np.nan, -np.nan, np.inf, -np.inf, -0.0
    return columns


def make_lists(count=ROWS):
    """Return columns whose rows are vectors and matrices, in all of Arrow's ways."""
    rng = np.random.default_rng(1)
    return datasets.Dataset.from_dict(
        {
            "fixed": rng.integers(0, 9, (count, 3)).tolist(),
            "regular": rng.integers(0, 9, (count, 4)).tolist(),
            "large": rng.random((count, 2)).tolist(),
            "nested": rng.random((count, 2, 3)).tolist(),
            "matrix": rng.integers(0, 9, (count, 2, 2)).tolist(),
            "label": rng.integers(0, 2, count).tolist(),
        },
        features=datasets.Features(
            fixed=datasets.Sequence(datasets.Value("int16"), length=3),
            regular=datasets.Sequence(datasets.Value("int32")),
            large=datasets.LargeList(datasets.Value("float64")),
            nested=datasets.Sequence(datasets.Sequence(datasets.Value("float32"))),
            matrix=datasets.Array2D((2, 2), "uint8"),
            label=datasets.ClassLabel(2),
        ),
    )


def loaders(table, **options):
    """Return fastamp's loader and torch's, whose shuffled orders are the same."""
    options = {"batch_size": 97, "shuffle": True, **options}
    kinds = (fastamp.DataLoader, DataLoader)
    return [kind(table, generator=generator(3), **options) for kind in kinds]


def assert_loads_as_torch(table, path, **options):
    ours, torchs = loaders(table, **options)
    assert ours.stats().path.startswith(path), ours.stats().path
    batches = list(torchs)
    assert_same(list(ours), batches)
    return batches


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return numbers and lists that are read from mapped files, in pieces of 1,000 rows."""
    folder = tmp_path_factory.mktemp("tables")
    datasets.disable_progress_bars()
    datasets.Dataset(pa.table(make_numbers())).save_to_disk(folder / "numbers")
    make_lists().save_to_disk(folder / "lists")
    numbers, lists = (datasets.load_from_disk(folder / name) for name in ("numbers", "lists"))
    assert numbers.data.table["int64"].num_chunks == 3
    return numbers, lists


def test_batches_are_gathered_as_torch_loads_them(backend, saved):
    numbers, lists = saved
    memory = datasets.Dataset(pa.table(make_numbers(301)))
    beside = datasets.Dataset(pa.table({"beside": np.arange(len(lists), dtype=np.int32)}))
    part = lists.select(range(700, 2100))
    assert part._indices is None
    unlike = datasets.concatenate_datasets([memory, numbers.select(range(990, 2010)), memory])
    tables = [
        numbers.with_format(None),
        numbers.with_format("torch"),
        memory.with_format("numpy"),
        unlike.with_format("torch"),
        unlike.with_format("numpy"),
        part.with_format("torch"),
        part.with_format("numpy"),
        datasets.concatenate_datasets([lists, beside], axis=1).with_format("torch"),
        lists.with_format("torch", columns=["label", "fixed"]),
        numbers.with_format("torch", columns=["float64"], output_all_columns=True),
        Subset(part.with_format("torch"), [5, -1, 0, 5, 1399]),
    ]
    for table in tables:
        order = torch.randperm(len(table), generator=generator(0))[:200].tolist()
        assert_loads_as_torch(table, "gathered", shuffle=False, sampler=order)
    assert_loads_as_torch(part.with_format("torch"), "gathered", num_workers=1)


OTHERS = {
    "'x' of string": ({"x": ["a", "b"] * 5}, "torch"),
    "'x' of bool": ({"x": [True, False] * 5}, "torch"),
    "'x' of halffloat": ({"x": np.ones(10, np.float16)}, "torch"),
    "'x' of uint64": ({"x": np.arange(10, dtype=np.uint64)}, "torch"),
    "'x' of timestamp[s]": ({"x": np.arange(10).astype("M8[s]")}, "numpy"),
    "'x' of struct": ({"x": [{"a": 1}] * 10}, "torch"),
    "'x' with nulls": ({"x": [1, None] * 5}, "torch"),
    "'x' of lists of several lengths": ({"x": [[1], [1, 2]] * 5}, "torch"),
    "'x' of empty lists": ({"x": [[]] * 10}, "torch"),
    "'x' of lists and no format": ({"x": [[1, 2]] * 10}, None),
    "the format arrow": ({"x": [1] * 10}, "arrow"),
}


@pytest.mark.parametrize("reason", OTHERS)
def test_what_is_not_of_fixed_width_is_left_to_the_dataset(backend, reason):
    columns, kind = OTHERS[reason]
    table = datasets.Dataset.from_dict(columns).with_format(kind)
    ours, torchs = loaders(table, batch_size=1)
    assert ours.stats().path.startswith("item by item: the Hugging Face dataset has ")
    assert reason in ours.stats().path
    try:
        expected = list(torchs)
    except Exception as error:  # noqa: BLE001 - which one is what is compared
        with pytest.raises(type(error)):
            list(ours)
    else:
        assert_same(list(ours), expected)


def test_other_tables_are_asked_once_for_each_batch(backend, monkeypatch):
    table = datasets.Dataset.from_dict({"x": np.arange(10), "y": np.arange(10) / 3})
    calls = []
    get = datasets.Dataset.__getitems__
    monkeypatch.setattr(
        datasets.Dataset, "__getitems__", lambda self, keys: calls.append(keys) or get(self, keys)
    )
    for other, why in (
        (table.shuffle(seed=1).with_format("torch"), "an indices mapping"),
        (table.with_transform(lambda batch: {"x": torch.tensor(batch["x"])}), "a transform"),
        (
            table.with_format("torch", dtype=torch.float64),
            "a column 'x' that becomes",
        ),
        (
            table.with_format("torch", requires_grad=True, columns=["y"]),
            "a column 'y' that becomes",
        ),
    ):
        ours, torchs = loaders(other, batch_size=4)
        assert f"the Hugging Face dataset has {why}" in ours.stats().path
        calls.clear()
        batches = list(ours)
        assert len(calls) == 3
        assert_same(batches, list(torchs))
    assert "no rows" in fastamp.DataLoader(table.select([])).stats().path
    refused = fastamp.DataLoader(table.with_format("torch", dtype="nothing"))
    assert "no batch: " in refused.stats().path


def test_a_changed_format_is_noticed(backend):
    table = datasets.Dataset.from_dict({"x": np.arange(50), "y": np.arange(50) / 3})
    for kind in ("torch", None, "torch"):
        table.set_format(kind)
        assert_loads_as_torch(table, "gathered")
    table.set_transform(lambda batch: batch)
    assert_loads_as_torch(table, "item by item: ")


def test_the_memory_lives_as_long_as_the_columns(backend, tmp_path):
    table = datasets.Dataset.from_dict({"x": [[i, 2 * i] for i in range(1500)]})
    table.save_to_disk(tmp_path)
    (column,), build = read_table(datasets.load_from_disk(tmp_path).with_format("torch"))
    del table
    gc.collect()
    output = torch.empty(2, 2, dtype=torch.int64)
    gatherer = make_gatherer([column], 1)
    gatherer.submit(torch.tensor([1499, 7]), [output])
    gatherer.wait()
    assert build([output])["x"].tolist() == [[1499, 2998], [7, 14]]


def test_a_stopped_pass_resumes_to_the_bit(backend, saved):
    table = saved[0].with_format("torch", columns=["int8", "float64"])
    loader, again = (fastamp.DataLoader(table, 400, shuffle=True, seed=seed) for seed in (5, 5))
    batches = iter(loader)
    next(batches)
    again.load_state_dict(loader.state_dict())
    assert_same(list(again), list(batches))


def test_an_index_beyond_the_table_is_an_error(backend):
    table = datasets.Dataset.from_dict({"x": np.arange(5)}).with_format("torch")
    assert_loads_as_torch(table, "gathered", shuffle=False, sampler=[4, -5, 0])
    for loader in loaders(table, shuffle=False, sampler=[0, 5]):
        with pytest.raises(IndexError, match="out of bounds"):
            list(loader)


@pytest.mark.parametrize(
    "lengths", [[1, 900, 2, 1, 1, 300, 5], [1] * 40 + [1000], [1000] + [1] * 40]
)
def test_rows_are_found_in_parts_of_any_length(backend, lengths):
    whole = np.arange(2 * sum(lengths), dtype=np.int16).reshape(-1, 2)
    parts = [part.reshape(-1).copy() for part in np.split(whole, np.cumsum(lengths)[:-1])]
    rows = torch.from_numpy(np.random.default_rng(0).permutation(len(whole)))
    rows = torch.cat([rows, rows - len(whole)])
    output = torch.empty(len(rows), 2, dtype=torch.int16)
    column = Column(Windows(parts, 2, whole.shape), torch.int16)
    gatherer = make_gatherer([column], 1)
    gatherer.submit(rows, [output])
    gatherer.wait()
    np.testing.assert_array_equal(output, whole[rows.numpy()])
