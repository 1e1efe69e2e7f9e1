"""Which backend serves which tensor, and the handles of the compiled core.

The choice follows the tensor's device: compiled CUDA code for CUDA, compiled CPU code for the CPU,
torch's operators for every other device and for every tensor that compiled code cannot handle
(float64, complex, sparse, with gaps in its memory). `FASTAMP_BACKEND` narrows the choice to one
backend and the fallback.
"""

import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, TypeAlias

import torch

_KNOWN = ("cuda", "cpu", "fallback")  # best first
Table: TypeAlias = tuple[Any, bool]
"""The ops of the core for a type of device, and whether that device is apart from the host."""


def _is_installed() -> bool:
    return importlib.util.find_spec("fastamp._native") is not None


@cache
def _core() -> ModuleType | str:
    """Return the extension, or say why it cannot be used."""
    if not _is_installed():
        return "fastamp was installed without its compiled code"
    try:
        from fastamp import _native  # noqa: PLC0415 - it may be missing
    except ImportError as error:
        return f"fastamp's compiled code cannot be loaded ({error})"
    if not _native.has_exchange_table:
        return f"fastamp's compiled code needs torch 2.10 or later, this is {torch.__version__}"
    return _native


@cache
def _tables() -> Mapping[str, Table]:
    """Return the core's tables that can be used here, best first."""
    core = _core()
    if isinstance(core, str):
        if _is_installed() and os.environ.get("FASTAMP_BACKEND") != "fallback":
            message = f"{core}: the slower pure-Python fallback is used"
            warnings.warn(message, stacklevel=2)
        return {}
    found = {"cpu": (core.cpu_ops, False)}
    if core.built_with_cuda and torch.version.cuda is not None and torch.cuda.is_available():
        found = {"cuda": (core.cuda_ops, True), **found}
    return found


def _check_available(name: str, source: str) -> str:
    """Return the name of an available backend, or raise an error that lists what there is."""
    available = [*_tables(), "fallback"]
    if name not in available:
        why = "is not available here" if name in _KNOWN else "is not a backend"
        msg = f"{source}={name!r} {why}; available: {', '.join(available)}"
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
    _handles.clear()
    try:
        yield
    finally:
        _only = before
        _handles.clear()


def backends() -> list[str]:
    """Return the backends that fastamp uses here, best first.

    Returns:
        A list out of "cuda", "cpu" and "fallback". "fallback" is pure Python and always there. With
        the environment variable FASTAMP_BACKEND set, only that backend and the fallback.

    Example:
        >>> "fallback" in fastamp.backends()
        True
    """
    return [*(name for name in _tables() if _only in (None, name)), "fallback"]


def why_fallback(device: torch.device) -> str | None:  # noqa: PLR0911 - one row a reason
    """Say why the fallback serves a device, and how to change that; None if compiled code does."""
    if _only not in (None, device.type):
        return f"FASTAMP_BACKEND={_only} is set"
    if device.type not in {"cpu", "cuda"}:
        return "compiled code is for the CPU and for CUDA"
    core = _core()
    if isinstance(core, str):
        needed = "a C++ compiler" + " and nvcc" * (device.type == "cuda")
        again = "" if _is_installed() else f"; install it again with {needed} on the PATH"
        return core + again
    if device.type == "cpu":
        return None
    if torch.version.hip is not None:
        return "the compiled code is for NVIDIA GPUs"
    try:
        core.check_device(device.index or 0)
    except RuntimeError as error:
        return str(error)
    return None


_handles: dict[torch.device, Any] = {}


def backend_for(device: torch.device) -> Any:
    """Return the core's `Backend` of a device; None where the fallback serves it."""
    try:
        return _handles[device]
    except KeyError:
        found = _handles[device] = _make_handle(device)
        return found


def _make_handle(device: torch.device) -> Any:
    table = _tables().get(device.type) if _only in (None, device.type) else None
    on_cuda = device.type == "cuda" and _only in (None, "cuda")
    if on_cuda and (why := why_fallback(device)) is not None:
        if not isinstance(_core(), str) or not _is_installed():  # else `_tables` has warned
            message = (
                f"gradients on {device} get the slower pure-Python fallback: {why}. "
                "(FASTAMP_BACKEND=fallback chooses it without this warning.)"
            )
            warnings.warn(message, stacklevel=2)
        return None
    core = _core()
    if table is None or isinstance(core, str):
        return None
    ops, is_apart = table
    return core.Backend(ops, is_apart, device, device.index if on_cuda else None)


def core_for(device: torch.device) -> Any:
    """Return the extension module where it serves a device, or None."""
    return None if backend_for(device) is None else _core()


def core() -> Any:
    """Return the extension module, or None where it cannot be used."""
    found = _core()
    return None if isinstance(found, str) else found
