"""Datasets of arrays: rows by number, and what is refused by its name."""

from __future__ import annotations

import re

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
