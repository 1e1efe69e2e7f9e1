"""The CUDA kernels, compiled as C++ and run on the CPU, as a backend of the tests."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

from support.emulated_build import library

from fastamp import _ops
from fastamp._ops import choose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@cache
def _loaded() -> ctypes.CDLL | None:
    path = library() if "cpu" in choose._tables() else None
    return None if path is None else ctypes.CDLL(str(path))


@cache
def emulated_table() -> choose.Table | None:
    """Return the ops of the emulated kernels; None where they cannot be made."""
    loaded = _loaded()
    if loaded is None:
        return None
    size = ctypes.c_size_t()
    find = loaded.fastamp_emulated_ops
    find.restype = ctypes.c_void_p
    address = find(ctypes.byref(size))
    return _ops.core().OpTable(address, size.value), True


class Launches(NamedTuple):
    """What a call launches."""

    kernels: int
    blocks: int
    nbytes: int
    """Of the arguments of the last kernel."""


def count_launches(call: Callable[[], object]) -> Launches:
    """Return what a call launches."""
    counts = []
    for each in (lambda: None, call):
        each()
        numbers = (ctypes.c_uint * 3)()
        ctypes.CDLL(str(library())).fastamp_emulated_launches(numbers)
        counts.append([*numbers])
    (kernels, blocks, _), after = counts
    return Launches(after[0] - kernels, after[1] - blocks, after[2])


@contextmanager
def use_emulated(table: choose.Table) -> Iterator[None]:
    """Let the emulated kernels, and else the fallback, serve the CPU's tensors."""
    with mock.patch.object(choose, "_tables", return_value={"cpu": table}), _ops.use_only("cpu"):
        yield
