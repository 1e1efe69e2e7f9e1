"""Hugging Face datasets: read once where that gives torch's batches, and else left to them."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from support.gathering import gather
from support.loading import assert_same, generator
from torch.utils.data import DataLoader, Subset, default_collate

import fastamp
from fastamp.data import tables as tables_module
from fastamp.data.tables import columns_of_table

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")

ROWS = 2300
MAX_BYTES = 1 << 30
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"]


def make_numbers(count=ROWS):
    """Return columns with the ends of each range, infinities, NaNs and what float32 rounds."""
    rng = np.random.default_rng(0)
    columns = {"bool": rng.random(count) < 0.5}
    for name in INTEGERS:
        bounds = np.iinfo(name)
        columns[name] = rng.integers(bounds.min, bounds.max, count, name, endpoint=True)
        columns[name][:2] = bounds.min, bounds.max
    for name in ("float32", "float64"):
        columns[name] = rng.standard_normal(count) * 2.0 ** rng.integers(-150, 13, count)
        columns[name] = columns[name].astype(name)
        columns[name][:5] = np.nan, -np.nan, np.inf, -np.inf, -0.0
    return datasets.Dataset(pa.table(columns))


def make_lists(count=ROWS):
    """Return columns whose rows are vectors and matrices, in all of Arrow's ways."""
    rng, sequence, value = np.random.default_rng(1), datasets.Sequence, datasets.Value
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
            fixed=sequence(value("int16"), length=3),
            regular=sequence(value("int32")),
            large=datasets.LargeList(value("float64")),
            nested=sequence(sequence(value("float32"))),
            matrix=datasets.Array2D((2, 2), "uint8"),
            label=datasets.ClassLabel(2),
        ),
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return numbers and lists that are read from mapped files, in pieces of 1,000 rows."""
    folder = tmp_path_factory.mktemp("tables")
    datasets.disable_progress_bars()
    for name, table in {"numbers": make_numbers(), "lists": make_lists()}.items():
        table.save_to_disk(folder / name)
    return [datasets.load_from_disk(folder / name) for name in ("numbers", "lists")]


WAYS = {
    "whole": lambda table: table,
    "shuffle": lambda table: table.shuffle(seed=1),
    "train_test_split": lambda table: table.train_test_split(0.2, seed=0)["train"],
    "filter": lambda table: table.filter(lambda _, i: i % 3 > 0, with_indices=True),
    "sort": lambda table: table.sort(table.column_names[-1]),
    "select": lambda table: table.select([700, 3, 3, 2100]),
    "part": lambda table: table.select(range(700, 2100)),
    "joined": lambda table: datasets.concatenate_datasets([table.select(range(9)), table]),
}


@pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")  # Arrow's, by sort
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["torch", "numpy", None])
def test_rows_are_those_of_the_datasets_own_batches(way, kind, saved):
    for table in saved if kind else saved[:1]:
        table = WAYS[way](table).with_format(kind)  # noqa: PLW2901
        rows = [0, len(table) - 1, 1, 2, 1, len(table) // 2 + 1][: len(table)]
        rows = [row % len(table) for row in rows]
        expected = default_collate(table.__getitems__(rows))
        assert_same(gather(columns_of_table(table, MAX_BYTES), rows), expected)


FORMATS = {
    "some columns": {"type": "torch", "columns": ["label", "fixed"]},
    "others beside": {"type": "torch", "columns": ["label"], "output_all_columns": True},
    "doubles": {"type": "torch", "columns": ["large", "label"], "dtype": torch.float64},
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_decides_on_columns_and_dtypes(name, saved):
    table = saved[1].select_columns(["fixed", "large", "label"]).with_format(**FORMATS[name])
    columns = columns_of_table(table, MAX_BYTES)
    if name == "others beside":  # as lists of Python
        assert columns == "the Hugging Face dataset has a column 'fixed' " + PLAIN
    else:
        assert_same(gather(columns, [5, 0]), default_collate(table.__getitems__([5, 0])))


PLAIN = "of no plain numbers, or of lists without with_format"
LENGTHS = "a column 'x' of nulls, of several lengths, or converted on its way"
OTHERS = {
    "texts": ("a column 'x' " + PLAIN, ["a", "b"] * 5, "torch"),
    "float16": (LENGTHS, np.ones(10, np.float16), "torch"),
    "uint64": (LENGTHS, np.arange(10, dtype=np.uint64), "torch"),
    "dates": ("no batch: ", np.arange(10).astype("M8[s]"), "numpy"),
    "structs": ("a column 'x' " + PLAIN, [{"a": 1}] * 10, "torch"),
    "nulls": (LENGTHS, [1.5, None, 2.5, 1.5, 1.5], "torch"),
    "nulls in lists": (LENGTHS, [[1, 2], [1, None], [1, 2], [1, 2], [1, 2]], "torch"),
    "several lengths": (LENGTHS, [[1], [1, 2], [1], [1], [1]], "torch"),
    "no list in lists": (LENGTHS, [[1], None, [1], [1], [1]], "torch"),
    "empty lists": ("a column 'x' " + PLAIN, [[]] * 10, "torch"),
    "lists": ("a column 'x' " + PLAIN, [[1, 2]] * 10, None),
    "arrow": ("the format arrow", [1] * 10, "arrow"),
}


@pytest.mark.parametrize(("reason", "column", "kind"), OTHERS.values(), ids=OTHERS)
def test_what_is_not_of_fixed_width_is_left_to_the_dataset(reason, column, kind):
    table = datasets.Dataset.from_dict({"x": column}).with_format(kind)
    found = columns_of_table(table, MAX_BYTES)
    assert found.startswith(f"the Hugging Face dataset has {reason}")
    ours, torchs = (
        loader(table, 1, shuffle=True, generator=generator(3))
        for loader in (fastamp.DataLoader, DataLoader)
    )
    assert found in str(ours)
    try:
        expected = list(torchs)
    except Exception as error:  # noqa: BLE001 - which one is what is compared
        with pytest.raises(type(error)):
            list(ours)
    else:
        assert_same(list(ours), expected)


def test_transforms_devices_and_sizes_are_left_to_the_dataset():
    table = datasets.Dataset.from_dict({"x": np.arange(10), "y": np.arange(10) / 3})
    for other, why in {
        "the format custom": table.with_transform(lambda batch: {"x": torch.tensor(batch["x"])}),
        "no rows": table.select([]),
        PLAIN: table.with_format("torch", requires_grad=True, columns=["y"]),
        "no batch: ": table.with_format("torch", dtype="nothing"),
        "converted on its way": table.with_format("torch", dtype=torch.bfloat16),
    }.items():
        assert other in columns_of_table(why, MAX_BYTES)
    found = columns_of_table(table.with_format("torch"), 119)
    assert found.endswith("has 120 bytes of numbers, more than max_bytes (119)")
    assert len(columns_of_table(table.with_format("torch"), 120).arrays) == 2


@pytest.mark.parametrize(
    "wrap", [lambda table: table, lambda table: Subset(table, [5, 2299, 0, 5])]
)
def test_batches_are_gathered_as_torch_loads_them(wrap, saved):
    table = wrap(saved[0].shuffle(seed=3).with_format("torch"))
    ours, torchs = (
        loader(table, 97, shuffle=True, generator=generator(3))
        for loader in (fastamp.DataLoader, DataLoader)
    )
    assert "item by item" not in str(ours)
    assert_same(list(ours), list(torchs))


def test_a_table_is_read_once_until_its_format_changes(saved, monkeypatch):
    reads, read = [], tables_module._read
    monkeypatch.setattr(tables_module, "_read", lambda *args: reads.append(args) or read(*args))
    table = saved[0].select_columns(["int8", "float64"]).shuffle(seed=1)
    for kind in ("torch", None, "torch"):
        table.set_format(kind)
        reads.clear()
        first = columns_of_table(table, MAX_BYTES)
        assert columns_of_table(table, MAX_BYTES) is first
        assert len(reads) == 1
        assert_same(gather(first, [7, 3]), default_collate(table.__getitems__([7, 3])))
    table.set_transform(lambda batch: batch)
    assert columns_of_table(table, MAX_BYTES) == "the Hugging Face dataset has the format custom"


def test_the_memory_goes_with_the_dataset(saved):
    table = saved[0].select_columns("int8").with_format("torch")
    memory = weakref.ref(columns_of_table(table, MAX_BYTES).arrays[0])
    assert memory() is not None
    del table
    gc.collect()
    assert memory() is None
