"""Rows whose numbers lie apart in memory: tables stored by columns, windows, slices, expanded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.loading import assert_same
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Subset, TensorDataset

import fastamp

COUNT = 37
TABLE = np.asfortranarray(np.random.default_rng(0).normal(size=(COUNT, 11)).astype(np.float32))
READ_ONLY = TABLE.view()
READ_ONLY.flags.writeable = False
SERIES = np.arange(200, dtype=np.float32).reshape(100, 2)
TENSOR = torch.from_numpy(TABLE)
SCATTERED = {
    "by columns": TENSOR,
    "bfloat16": TENSOR.to(torch.bfloat16),
    "float8": TENSOR.to(torch.float8_e4m3fn),
    "integers": torch.arange(60).reshape(6, 10).T,
    "some columns": TENSOR[:, ::3],
    "expanded": torch.arange(10.0)[:, None].expand(10, 4),
    "an array": TABLE,
    "a read-only array": READ_ONLY,
    "transposed images": np.arange(2 * 3 * 4 * 5).reshape(5, 4, 3, 2).transpose(0, 3, 1, 2),
    "windows of two series": np.lib.stride_tricks.sliding_window_view(SERIES, 5, axis=0),
}
IN_ORDER = {
    "rows flipped": np.ascontiguousarray(TABLE)[::-1],
    "every other row": np.ascontiguousarray(TABLE)[::2],
    "windows": np.lib.stride_tricks.sliding_window_view(np.arange(50.0), 8),
    "windows of two": np.lib.stride_tricks.sliding_window_view(SERIES, (5, 2))[:, 0],
}


def as_dataset(array):
    return TensorDataset(array) if isinstance(array, torch.Tensor) else fastamp.ArrayDataset(array)


@pytest.mark.parametrize("name", SCATTERED | IN_ORDER)
@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # by torch, for its own
def test_batches_are_torchs(name, subset, backend):
    array = {**SCATTERED, **IN_ORDER}[name]
    dataset = as_dataset(array)
    if subset:
        dataset = Subset(dataset, [4, 0, 2, 2])
    loader = fastamp.DataLoader(dataset, 3)
    assert_same(list(loader), list(TorchDataLoader(dataset, 3)))
    way = loader.stats().path
    assert way.startswith("gathered by")
    assert ("a copy in row order" in way) == (name in SCATTERED)


@pytest.mark.parametrize("array", [np.ascontiguousarray(TABLE)[:, ::-1], TABLE.astype(">f4")])
def test_what_torch_refuses_is_torchs_error(array):
    dataset = fastamp.ArrayDataset(array)
    for make in (fastamp.DataLoader, TorchDataLoader):
        with pytest.raises(
            (ValueError, TypeError), match=r"negative strides|not native|byte order"
        ):
            next(iter(make(dataset, 3)))


def test_what_is_written_between_passes_is_in_the_next_one():
    for array in (TENSOR.clone(), TABLE.copy(order="F")):
        loader = fastamp.DataLoader(as_dataset(array), 5)
        list(loader)
        array[3:] = 7
        assert_same(list(loader), list(TorchDataLoader(as_dataset(array), 5)))


def test_what_is_written_into_a_tensor_during_a_pass_is_in_the_next_batch():
    table = TENSOR.clone()
    assert not table.is_contiguous()
    batches = iter(fastamp.DataLoader(TensorDataset(table), 5))
    next(batches)
    table[5:] = 7
    for (batch,) in batches:
        assert (batch == 7).all()


def test_a_copy_larger_than_max_bytes_is_not_made():
    dataset = TensorDataset(TENSOR)
    fits = fastamp.DataLoader(dataset, 5, max_bytes=TENSOR.nbytes)
    assert str(fits).endswith(f"a copy in row order of {TENSOR.nbytes:,} bytes, made for each pass")
    loader = fastamp.DataLoader(dataset, 5, max_bytes=TENSOR.nbytes - 1)
    assert "item by item: the numbers of a row lie apart, and a copy" in str(loader)
    assert_same(list(loader), list(TorchDataLoader(dataset, 5)))


def test_they_are_resident_without_a_copy_on_the_host():
    loader = fastamp.DataLoader(TensorDataset(TENSOR), 5, device="cpu", resident=True)
    assert_same(list(loader), list(TorchDataLoader(TensorDataset(TENSOR), 5)))
