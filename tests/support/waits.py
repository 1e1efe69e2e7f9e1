"""Contexts in which a wait is an error: the host may not read what the device has."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastamp import _ops

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def sync_refused(device: str = "cuda") -> Iterator[None]:
    """Raise an error wherever the host waits for a GPU; on a CPU, do nothing."""
    if device == "cpu":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode calls itself a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


READS = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero"}


class ReadsRefused(TorchDispatchMode):
    """Raises wherever a value of a tensor comes to the host, or a tensor leaves its device.

    Steps stay native: fastamp would leave them to torch, so that a mode sees the operators.
    """

    def __enter__(self):
        self._patch = mock.patch.object(_ops, "in_dispatch_mode", return_value=0)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self._patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name in READS:
            message = f"{name} reads a value"
            raise AssertionError(message)
        return func(*args, **(kwargs or {}))
