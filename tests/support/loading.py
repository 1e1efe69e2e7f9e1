"""What the tests of the loader share: datasets, bit-exact comparison, and their own processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from support.bits import bits
from torch.utils.data import Dataset

import fastamp

TESTS = Path(__file__).parents[1]
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


class Finished(NamedTuple):
    """A process that ended, and the processes that it left behind."""

    code: int
    out: str
    err: str
    left: list[str]


def run_python(
    code: str, *arguments: str, timeout_s: float = 90, backend: str = HOST, **env: str
) -> Finished:
    """Run code in a fresh interpreter and a session of its own, which is killed at the end."""
    prelude = f"import sys; sys.path.insert(0, {str(TESTS)!r})\n"
    prelude += "import faulthandler; faulthandler.enable()\n"
    threads = {"OMP_NUM_THREADS": "1", "FASTAMP_BACKEND": backend}
    # Files, not pipes, which a process left behind would keep open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", prelude + code, *arguments],
            cwd=TESTS,
            env={**os.environ, **threads, **env},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # on which it tells where it hangs
            time.sleep(1)
        finally:
            left = _session(process.pid)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            process.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    names = [name for pid, name in left.items() if pid != process.pid]
    return Finished(process.returncode, *texts, names)


def _session(leader: int) -> dict[int, str]:
    """Return the living processes of a session."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text().rpartition(")")
        except OSError:  # it has just ended
            continue
        state, _, _, session = rest.split()[:4]
        if int(session) == leader and state != "Z":
            found[int(folder.name)] = name
    return found


def check(code: str, *arguments: str, **options: Any) -> str:
    """Run code that must succeed and leave nothing behind; return what it printed."""
    done = run_python(code, *arguments, **options)
    assert done.code == 0, done.out + done.err
    assert not done.left
    return done.out
