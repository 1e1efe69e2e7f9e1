"""Plain numbers and strings in samples, as tables of Python objects give them."""

from __future__ import annotations

import pytest
import torch
from support.loading import assert_same
from torch.utils.data import default_collate

import fastamp

COLUMNS = {
    "integers": [3, -1, 2**62],
    "floats": [0.5, float("inf"), -0.0],
    "booleans": [True, False],
    "an integer and a float": [1, 2.5],
    "a float and an integer": [0.5, 7],
    "an integer and a boolean": [1, True],
    "an integer and an array": [1, torch.tensor(2)],
}


@pytest.mark.parametrize("name", COLUMNS)
def test_numbers_are_those_of_default_collate(name):
    samples = [{"x": value, "row": [value, 1], "s": "text"} for value in COLUMNS[name]]
    assert_same(fastamp.BatchCollator()(samples), default_collate(samples))


def test_numbers_follow_the_default_device():
    with torch.device("meta"):
        assert fastamp.BatchCollator()([1, 2]).is_meta


def test_an_integer_beyond_64_bits_gets_torchs_error():
    with pytest.raises((RuntimeError, ValueError, OverflowError)) as expected:
        default_collate([1, 2**70])
    with pytest.raises(expected.type, match=str(expected.value)):
        fastamp.BatchCollator()([1, 2**70])


def test_a_column_of_numbers_is_converted_at_once(monkeypatch):
    """torch.tensor takes each of them by itself: that was most of a table's batch."""
    samples = [{"ids": [i, i + 1], "label": float(i)} for i in range(4)]
    expected = default_collate(samples)
    monkeypatch.setattr(torch, "tensor", None)
    assert_same(fastamp.BatchCollator()(samples), expected)
