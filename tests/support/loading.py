"""What the tests of the loader share: datasets, bit-exact comparison, and their own processes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from support.bits import bits
from support.processes import run_python
from torch.utils.data import Dataset

import fastamp

HOST = "cpu" if "cpu" in fastamp.backends() else "fallback"


class Rows(Dataset):
    """The map-style dataset of a function: what torch's loader takes in place of nested arrays."""

    def __init__(self, length, get):
        self.length, self.get = length, get

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.get(index)


class Squares(Dataset):
    """A dataset that only Python can read; item `bad` raises."""

    def __init__(self, length=100, bad=None):
        self.length, self.bad = length, bad

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == self.bad:
            msg = f"item {index} is broken"
            raise FileNotFoundError(msg)
        return {"x": torch.full((3,), index), "y": index * index, "name": str(index)}


class Stateful(Squares):
    """A dataset with a state, of which every worker's copy has its own."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def generator(seed):
    return torch.Generator().manual_seed(seed)


def make_array(dtype, *shape, seed=0):
    """Return random bits as an array or tensor; as 0 and 1 for booleans."""
    rng = np.random.default_rng(seed)
    if isinstance(dtype, torch.dtype):
        nbytes = rng.integers(0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), "u1")
        return torch.from_numpy(nbytes).view(dtype).view(shape)
    itemsize = np.dtype(dtype).itemsize
    nbytes = rng.integers(0, 2 if dtype == "?" else 256, (*shape, itemsize), "u1")
    return nbytes.view(dtype).reshape(shape)


class Point(NamedTuple):
    x: Any
    y: Any


def assert_same(actual: Any, expected: Any) -> None:
    """Compare type, dtype, shape and bits, all the way down."""
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        assert actual.shape == expected.shape
        assert actual.device == expected.device
        assert actual.requires_grad == expected.requires_grad
        if not expected.is_meta:
            assert np.array_equal(bits(actual), bits(expected))
    elif isinstance(expected, np.ndarray):
        assert actual.dtype == expected.dtype
        assert actual.tobytes() == expected.tobytes()
    elif isinstance(expected, Mapping):
        assert list(actual) == list(expected)
        for key in expected:
            assert_same(actual[key], expected[key])
    elif isinstance(expected, Sequence) and not isinstance(expected, str | bytes):
        assert len(actual) == len(expected)
        for ours, theirs in zip(actual, expected, strict=True):
            assert_same(ours, theirs)
    else:
        assert actual == expected


def ends(condition):
    """Wait until something that another thread does has happened."""
    deadline_s = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.005)
    return condition()


def check(code: str, *arguments: str, backend: str = HOST) -> str:
    """Run code that must succeed and leave nothing behind; return what it printed."""
    code = f"import warnings; warnings.simplefilter('error')\n{code}"
    done = run_python(code, *arguments, FASTAMP_BACKEND=backend)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.survivors
    return done.stdout
