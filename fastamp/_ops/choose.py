"""Which backend serves which device, and the handles of the compiled core.

Compiled code serves CUDA and the CPU, and torch's operators every other device, and each tensor
that is float64, complex, sparse, or has gaps in its memory.
"""

import importlib.util
import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, TypeAlias

import torch

try:
    from fastamp._build import NO_CUDA
except ImportError:  # the folder of the sources
    NO_CUDA = "nothing was built"

Table: TypeAlias = tuple[Any, bool]  # the core's ops, and whether the device is apart from the host
PIP_INSTALL = f"{shlex.quote(sys.executable)} -m pip install"


def install_again() -> str:
    """Return the remedy of building fastamp again, with CUDA code where torch finds a GPU."""
    variable = "FASTAMP_CUDA=ON " if torch.cuda.is_available() else ""
    options = "--force-reinstall --no-deps --no-cache-dir"
    return f". Fix it: {variable}{PIP_INSTALL} {options} FOLDER_OF_ITS_SOURCES"


def _is_installed() -> bool:
    return importlib.util.find_spec("fastamp._native") is not None


@cache
def _core() -> ModuleType | str:
    """Return the extension, or say why it cannot be used."""
    if importlib.util.find_spec("fastamp._build") is None:
        return "this folder has fastamp's sources. Fix it: run Python in another folder, or with -I"
    if not _is_installed():
        return f"fastamp was installed without its compiled code: {NO_CUDA}" + install_again()
    try:
        from fastamp import _native  # noqa: PLC0415 - it may be missing
    except ImportError as error:
        return f"fastamp's compiled code cannot be loaded ({error})" + install_again()
    if not _native.has_exchange_table:
        text = f"fastamp's compiled code needs torch 2.10 or later, this is {torch.__version__}"
        return f"{text}. Fix it: {PIP_INSTALL} --upgrade 'torch>=2.10'"
    return _native


@cache
def _warn_of(why: str) -> None:
    """Warn once that the fallback is used, for this reason."""
    message = "the slower pure-Python fallback is used "
    message += f"(FASTAMP_BACKEND=fallback chooses it without this warning): {why}"
    warnings.warn(message, stacklevel=3)


@cache
def _tables() -> Mapping[str, Table]:
    """Return the core's tables that can be used here, best first."""
    core = _core()
    if isinstance(core, str):
        is_pure = not _is_installed() and importlib.util.find_spec("fastamp._build") is not None
        if not is_pure and os.environ.get("FASTAMP_BACKEND") != "fallback":
            _warn_of(core)
        return {}
    tables = {"cpu": (core.cpu_ops, False)}
    if core.built_with_cuda and torch.version.cuda is not None and torch.cuda.is_available():
        return {"cuda": (core.cuda_ops, True), **tables}
    return tables


def _check_available(name: str, source: str) -> str:
    """Return the name of an available backend, or raise an error that lists what there is."""
    available = [*_tables(), "fallback"]
    if name not in available:
        msg = f"{source}={name!r} is not available here; available: {', '.join(available)}"
        raise RuntimeError(msg)
    return name


_given = os.environ.get("FASTAMP_BACKEND")
_only = _check_available(_given, "FASTAMP_BACKEND") if _given else None


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
        A list out of "cuda", "cpu" and "fallback", which is pure Python and always there. With the
        environment variable FASTAMP_BACKEND only that backend and the fallback. Beside a GPU a
        fastamp that was built without CUDA code warns once.

    Example:
        >>> "fallback" in fastamp.backends()
        True
    """
    names = [*(name for name in _tables() if _only in (None, name)), "fallback"]
    if _only is None and torch.cuda.is_available() and (why := _why_no_cuda_code()) is not None:
        _warn_of(why)
    return names


def _why_no_cuda_code() -> str | None:
    """Say why this installation has no CUDA code, with the build's own reason; None if it has."""
    core = _core()
    if isinstance(core, str):
        return core
    if torch.version.hip is not None:
        return "the compiled code is for NVIDIA GPUs"
    text = f"fastamp was built without CUDA code: {NO_CUDA}"
    return None if core.built_with_cuda else text + install_again()


def warn_of_fallback(device: torch.device) -> None:
    """Warn once that the fallback serves a device, unless it was chosen."""
    if _only != "fallback" and (why := why_fallback(device)) is not None:
        _warn_of(why)


def why_fallback(device: torch.device) -> str | None:
    """Say why the fallback serves a device; None if compiled code does, which is loaded now."""
    if _only not in (None, device.type):
        return f"FASTAMP_BACKEND={_only} is set. Fix it: unset FASTAMP_BACKEND"
    if device.type not in {"cpu", "cuda"}:
        return "compiled code is for the CPU and for CUDA"
    core = _core()
    if isinstance(core, str) or device.type == "cpu":
        return core if isinstance(core, str) else None
    if (why := _why_no_cuda_code()) is not None:
        return why
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        msg = f"the first use of fastamp on {device} is in a graph's capture: make one step before"
        raise RuntimeError(msg)
    try:
        core.check_device(device.index or 0)
    except RuntimeError as error:
        return f"{device}: {error}" + install_again()
    return None


class _Handles(dict[torch.device, Any]):
    def __missing__(self, device: torch.device) -> Any:
        table = _tables().get(device.type)  # warns of an extension that cannot be loaded
        why, handle = why_fallback(device), None
        if why is not None and device.type == "cuda" and _only in (None, "cuda"):
            _warn_of(why)
        if why is None and table is not None:
            index = device.index if device.type == "cuda" else None
            handle = core().Backend(*table, device, index)
        self[device] = handle
        return handle


_handles = _Handles()
backend_for = _handles.__getitem__
"""Returns the core's `Backend` of a device; None where the fallback serves it."""


def core_for(device: torch.device) -> Any:
    """Return the extension module where it serves a device, or None."""
    return None if backend_for(device) is None else _core()


def core() -> Any:
    """Return the extension module, or None where it cannot be used."""
    module = _core()
    return None if isinstance(module, str) else module


def host_core() -> Any:
    """Return the extension module for work on the host beside any device, or None."""
    return core() if _only != "fallback" and _tables() else None
