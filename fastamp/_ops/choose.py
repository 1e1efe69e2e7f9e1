"""Which backend serves which tensor.

The choice follows the tensor's device: compiled CUDA code for CUDA, compiled CPU code for the CPU,
the pure-Python fallback for every other device and for every tensor that compiled code cannot
handle (float64, complex, sparse, with gaps in its memory). `FASTAMP_BACKEND` narrows the choice to
one backend and the fallback.
"""

import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from fastamp._ops.fallback import FallbackOps
from fastamp._ops.host_types import HostOps

_CPU = torch.device("cpu")
_KNOWN = ("cuda", "cpu", "fallback")  # best first
FALLBACK = FallbackOps()  # takes every tensor, and samples of every kind


def _is_installed() -> bool:
    return importlib.util.find_spec("fastamp._native") is not None


def _load() -> dict[str, HostOps] | str:
    """Return the compiled backends that can run here, best first, or why none can."""
    if not _is_installed():
        return "fastamp was installed without its compiled code"
    try:
        from fastamp._ops import compiled  # noqa: PLC0415 - it needs the extension
    except ImportError as error:
        return f"fastamp's compiled code cannot be loaded ({error})"
    needed = f"fastamp's compiled code needs torch 2.10 or later, this is {torch.__version__}"
    found: dict[str, HostOps] = {**compiled.available()}
    return found or needed


@cache
def _backends() -> dict[str, HostOps]:
    """Return the backends that can run here, best first."""
    found = _load()
    if not isinstance(found, str):
        return {**found, "fallback": FALLBACK}
    if _is_installed() and os.environ.get("FASTAMP_BACKEND") != "fallback":
        warnings.warn(f"{found}: the slower pure-Python fallback is used", stacklevel=2)
    return {"fallback": FALLBACK}


def _check_available(name: str, source: str) -> str:
    """Return the name of an available backend, or raise an error that lists what there is."""
    if name not in _backends():
        why = "is not available here" if name in _KNOWN else "is not a backend"
        msg = f"{source}={name!r} {why}; available: {', '.join(_backends())}"
        raise RuntimeError(msg)
    return name


_only: str | None = None
if os.environ.get("FASTAMP_BACKEND"):
    try:
        _only = _check_available(os.environ["FASTAMP_BACKEND"], "FASTAMP_BACKEND")
    except RuntimeError as error:
        if sys.argv[:1] != ["-m"]:  # "-m" while `python -m` imports the package: no traceback
            raise
        print(error, file=sys.stderr)  # noqa: T201
        raise SystemExit(2) from None


@contextmanager
def use_only(name: str) -> Iterator[None]:
    """Narrow the choice to one backend and the fallback, as FASTAMP_BACKEND does, in a block."""
    global _only  # noqa: PLW0603 - one setting for the process, like the environment variable
    before, _only = _only, _check_available(name, "backend")
    try:
        yield
    finally:
        _only = before


def is_chosen(name: str) -> bool:
    """Say whether FASTAMP_BACKEND, or a block of `use_only`, names a backend."""
    return _only == name


def backends() -> list[str]:
    """Return the backends that fastamp uses here, best first.

    Returns:
        A list out of "cuda", "cpu" and "fallback". "fallback" is pure Python and always there. With
        the environment variable FASTAMP_BACKEND set, only that backend and the fallback.

    Example:
        >>> "fallback" in fastamp.backends()
        True
    """
    return [name for name in _backends() if _only in (None, name) or name == "fallback"]


def why_fallback(device: torch.device) -> str | None:
    """Say why the fallback serves a device, and how to change that; None if compiled code does."""
    if _only not in (None, device.type):
        return f"FASTAMP_BACKEND={_only} is set"
    if device.type not in {"cpu", "cuda"}:
        return "compiled code is for the CPU and for CUDA"
    if not _is_installed():
        needed = "a C++ compiler" + " and nvcc" * (device.type == "cuda")
        return f"{_load()}; install it again with {needed} on the PATH"
    if "cpu" not in _backends():
        return str(_load())
    if device.type == "cpu":
        return None
    from fastamp._ops import compiled  # noqa: PLC0415 - it needs the extension

    return compiled.fault_of(device.index or 0)


@cache
def _cuda_ops(index: int) -> HostOps:
    """Return the backend that serves a CUDA device; warn once if that is the fallback."""
    found = _backends()
    why = why_fallback(torch.device("cuda", index))
    if why is None:
        return found.get("cuda", FALLBACK)
    if "cpu" in found or not _is_installed():  # else `_backends` has warned
        message = (
            f"gradients on cuda:{index} get the slower pure-Python fallback: {why}. "
            "(FASTAMP_BACKEND=fallback chooses it without this warning.)"
        )
        warnings.warn(message, stacklevel=2)
    return FALLBACK


def ops_for(device: torch.device) -> HostOps:
    """Return the backend that serves a device."""
    kind = device.type
    if _only in (None, kind):
        if kind == "cuda" and device.index is not None:
            return _cuda_ops(device.index)
        return _backends().get(kind, FALLBACK)
    return FALLBACK


def host_ops() -> HostOps:
    """Return the backend that collates samples on the host."""
    return ops_for(_CPU)
