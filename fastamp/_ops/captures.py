"""Threads that keep out of the CUDA graphs that other threads capture."""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, cast

import torch

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


@contextmanager
def apart_from_captures() -> Iterator[None]:
    """Let this thread allocate and query while another one captures a CUDA graph.

    torch captures in global mode, in which such a call of any thread breaks the capture, unless
    that thread is in thread-local mode. This sets the mode, as torch's NCCL watchdog does.
    """
    exchange = _exchange() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    mode = ctypes.c_int(_THREAD_LOCAL)
    failed = exchange is None or exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        if exchange is not None and not failed:
            exchange(ctypes.byref(mode))


@cache
def _exchange() -> Callable[..., Any] | None:
    """Return the driver's function that swaps a thread's capture mode for another one."""
    with suppress(OSError, AttributeError):  # no driver, or one without this function
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        return cast("Callable[..., Any]", driver.cuThreadExchangeStreamCaptureMode)
    return None
