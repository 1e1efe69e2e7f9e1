"""Datasets of arrays and of tokens: rows by number, and what is refused by its name."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
import torch
from support.loading import assert_same, make_array
from torch.utils.data import (
    Dataset,
)

import fastamp

N = 600
X = make_array(torch.float32, N, 5)
Y = torch.arange(N)


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
    make_array("u2", 99).tofile(tmp_path / "tokens.bin")
    dataset = fastamp.TokenDataset(str(tmp_path / "tokens.bin"), 4, dtype="u2")
    assert len(pickle.dumps(dataset)) < 500
    assert_same(pickle.loads(pickle.dumps(dataset))[5], dataset[5])
