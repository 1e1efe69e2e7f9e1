"""Datasets of arrays, also of kinds of one's own: rows, columns to gather, and what is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import sliding_window_view
from support.gathering import gather
from support.loading import assert_same, make_array
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, Subset, TensorDataset

import fastamp
from fastamp.data import sources
from fastamp.data.arrays import columns_of, in_row_order

N = 600
X = make_array(torch.float32, N, 5)
Y = torch.arange(N)
MAX_BYTES = 1 << 30


def test_an_array_dataset_is_a_dataset_of_its_rows():
    pairs = fastamp.ArrayDataset(X, Y.numpy())
    assert isinstance(pairs, Dataset)
    assert len(pairs) == N
    assert_same(pairs[-1], (X[-1], Y.numpy()[-1]))
    nested = {"x": X, "y": (Y, [X[:, 0]])}
    expected = {"x": X[3], "y": (Y[3], [X[3, 0]])}
    assert_same(fastamp.ArrayDataset(nested)[3], expected)
    with pytest.raises(IndexError):
        pairs[N]


@pytest.mark.parametrize("pair", [(X, Y), [X, Y]], ids=["tuple", "list"])
def test_a_tuple_of_arrays_is_these_arrays(pair):
    dataset = fastamp.ArrayDataset(pair)
    assert_same(dataset[3], (X[3], Y[3]))
    (batch,) = fastamp.DataLoader(dataset, N)
    assert_same(batch, [X, Y])
    assert_same(fastamp.ArrayDataset(pair, [Y])[3], (type(pair)((X[3], Y[3])), [Y[3]]))


@pytest.mark.parametrize("name", [None, "y"])
def test_arrays_that_are_replaced_are_read_from_the_next_pass_on(name):
    dataset = fastamp.ArrayDataset(Y[:4]) if name is None else fastamp.ArrayDataset({"y": Y[:4]})
    loader = fastamp.DataLoader(dataset, 3)
    assert len(list(loader)) == len(loader) == 2
    if name is None:
        dataset.arrays = (Y[:9],)
    else:
        dataset.arrays[name] = Y[:9]
    assert len(dataset) == 9
    assert len(loader) == 3
    parts = [batch[0 if name is None else name] for batch in loader]
    assert torch.cat(parts).tolist() == list(range(9))


def test_arrays_that_are_replaced_by_unequal_ones_are_refused():
    dataset = fastamp.ArrayDataset(X, Y)
    dataset.arrays = (X, Y[:3])
    with pytest.raises(ValueError, match=r"arrays\[1\]: has 3 rows, and arrays\[0\] has 600"):
        dataset.columns()


def test_read_only_arrays_are_gathered_without_a_copy_or_a_warning(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(20.0).reshape(10, 2))
    for array in (np.load(tmp_path / "x.npy", mmap_mode="r"), np.frombuffer(bytes(80))):
        (column,) = columns_of(array).arrays
        assert column.data_ptr() == array.ctypes.data
        assert_same(gather(columns_of(array), [3, 7]), torch.from_numpy(array[[3, 7]]))


class Tagged(torch.Tensor):
    pass


NO_PLAIN_ARRAYS = {
    "grad": torch.ones(3, requires_grad=True),
    "sparse": torch.ones(3).to_sparse(),
    "meta": torch.ones(3, device="meta"),
    "subclass": torch.ones(3).as_subclass(Tagged),
    "conjugate": torch.ones(3, dtype=torch.complex64).conj(),
    "texts": np.array(["a", "b", "c"]),
    "byte order": np.ones(3, ">f4"),
    "masked": np.ma.ones(3),
    "back": np.ones(3)[::-1],
}


@pytest.mark.parametrize("array", NO_PLAIN_ARRAYS.values(), ids=NO_PLAIN_ARRAYS)
def test_what_is_no_plain_array_is_read_item_by_item(array):
    why = "the ArrayDataset holds more than plain arrays in one place"
    assert fastamp.ArrayDataset(array, np.ones(3)).columns() == why


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


def test_a_dict_of_arrays_of_different_lengths_is_refused_by_the_loader():
    with pytest.raises(ValueError, match=r"dataset\['y'\]: has 3 rows, and dataset\['x'\] has 600"):
        fastamp.DataLoader({"x": X, "y": Y[:3]})


TABLE = np.asfortranarray(np.arange(37 * 11, dtype=np.float32).reshape(37, 11))
SERIES = np.arange(200, dtype=np.float32).reshape(100, 2)
WINDOWS = sliding_window_view(TABLE, (8, 11))[:, 0]
# Rows whose numbers lie apart, and the bytes of a copy in row order.
SCATTERED = {
    "by columns": (torch.from_numpy(TABLE), TABLE.nbytes),
    "bfloat16": (torch.from_numpy(TABLE).to(torch.bfloat16), TABLE.nbytes // 2),
    "float8": (torch.from_numpy(TABLE).to(torch.float8_e4m3fn), TABLE.nbytes // 4),
    "some columns": (torch.from_numpy(TABLE)[:, ::3], TABLE.nbytes * 4 // 11),
    "transposed images": (np.arange(120).reshape(5, 4, 3, 2).transpose(0, 3, 1, 2), 960),
    "windows of a table": (WINDOWS, TABLE.nbytes),
    "past of windows": (WINDOWS[:, :5], (37 - 3) * 44),
    "some windows": (WINDOWS[::3], (27 + 8) * 44),
}
IN_ORDER = {
    "rows": X,
    "every other row": SERIES[::2],
    "windows": sliding_window_view(np.arange(50.0), 8),
    "windows of two": sliding_window_view(SERIES, (5, 2))[:, 0],
    "no row": TABLE[:0],
    "expanded": torch.arange(10.0)[:, None].expand(10, 4),  # a copy would be larger
    "windows across": sliding_window_view(SERIES, 5, axis=0),
}


@pytest.mark.parametrize("name", SCATTERED)
def test_scattered_rows_are_copied_once_and_only_the_memory_under_them(name):
    array, nbytes = SCATTERED[name]
    scattered = columns_of(array)
    ordered = in_row_order(scattered, MAX_BYTES)
    rows = list(range(len(array))) * 2
    assert_same(gather(ordered, rows), gather(scattered, rows))
    (copied,) = ordered.arrays
    assert copied.untyped_storage().nbytes() == nbytes
    assert copied.shape == array.shape
    assert copied[:1].is_contiguous()
    (kept,) = in_row_order(scattered, nbytes - 1).arrays
    assert kept is scattered.arrays[0]


@pytest.mark.parametrize("name", IN_ORDER)
def test_rows_in_order_are_not_copied(name):
    columns = columns_of(IN_ORDER[name])
    assert in_row_order(columns, MAX_BYTES).arrays[0] is columns.arrays[0]


def test_the_copies_of_all_columns_stay_below_max_bytes():
    arrays = (TABLE, TABLE.copy(order="F"))
    columns = columns_of(arrays)
    first, second = in_row_order(columns, 2 * TABLE.nbytes - 1).arrays
    assert first is not columns.arrays[0]
    assert second is columns.arrays[1]


def test_a_subset_turns_its_indices_into_an_array_once(monkeypatch):
    made, as_rows = [], sources.as_rows
    monkeypatch.setattr(sources, "as_rows", lambda rows: made.append(type(rows)) or as_rows(rows))
    subset = Subset(TensorDataset(X), [*range(30)])
    loader = fastamp.DataLoader(subset, 10)
    for _ in range(3):
        list(loader)
    assert made.count(list) == 1
    subset.indices = [39]
    assert next(iter(loader))[0].tolist() == X[39:40].tolist()
    subset.indices.append(38)
    assert next(iter(loader))[0].tolist() == X[[39, 38]].tolist()


def test_a_method_set_on_a_dataset_is_called():
    dataset = TensorDataset(X)
    dataset.__getitems__ = lambda indices: [torch.tensor(7)] * len(indices)
    assert next(iter(fastamp.DataLoader(dataset, 2))).tolist() == [7, 7]


class Mapped(fastamp.Source):
    """Memory that is there already."""

    x, y = np.arange(3 * N, dtype=np.float32).reshape(N, 3), torch.arange(N)

    def __len__(self):
        return N

    def columns(self):
        return {"x": self.x, "y": self.y}


def test_columns_are_gathered_and_are_what_torchs_loader_reads(backend):
    loader = fastamp.DataLoader(Mapped(), 8, shuffle=True, seed=1)
    assert loader.stats().path.startswith("gathered")
    order = torch.Generator().manual_seed(1)
    expected = TorchDataLoader(Mapped(), 8, sampler=torch.randperm(N, generator=order).tolist())
    assert_same([*loader], [*expected])


def test_items_of_a_source_are_the_rows_of_its_batches():
    assert_same(Mapped()[-1], {"x": Mapped.x[N - 1], "y": Mapped.y[N - 1]})


def test_a_source_without_a_method_is_told_which_to_write():
    class Nothing(fastamp.Source):
        def __len__(self):
            return 3

    with pytest.raises(NotImplementedError, match=r"Nothing: write columns\(\)"):
        next(iter(fastamp.DataLoader(Nothing(), 2)))
