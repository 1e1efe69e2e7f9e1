"""Threads that keep out of the CUDA graphs that other threads capture."""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


@contextmanager
def apart_from_captures() -> Iterator[None]:
    """Let this thread allocate and query while another one captures a CUDA graph.

    torch captures in global mode, in which such a call of any thread breaks the capture, unless the
    thread has said that only its own captures concern it. torch's NCCL watchdog does the same.
    """
    mode = ctypes.c_int(_THREAD_LOCAL)
    exchange = _exchange()
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@cache
def _exchange() -> Callable[..., Any]:
    """Return the driver's function; one that does nothing where there is no such driver."""
    name = "cuThreadExchangeStreamCaptureMode"
    try:
        return getattr(ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"), name)
    except (OSError, AttributeError):
        return lambda _: None
