"""What refuses to wait: a block in which the host may not synchronize with the GPU."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING

import torch

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
