"""A checkpoint's file: a state of tensors and plain values, with sums; reading it runs no code."""

import errno
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import torch

from fastamp._files import create

_FORMAT = "fastamp.train 7"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be resumed; the message names it.

    Example:
        >>> issubclass(fastamp.CheckpointError, RuntimeError)
        True
    """


class DamagedError(CheckpointError):
    """A checkpoint that cannot be read: the one before it can be resumed."""


def write_file(path: Path, state: dict[str, Any]) -> None:
    """Write a state to the disk, and check that `read_file` takes the objects in it."""
    try:
        with create(path) as file:
            torch.save({"format": _FORMAT, **state}, file)
        _load(path)
    except (pickle.PickleError, AttributeError, TypeError) as error:  # pickle raises each of them
        msg = f"nothing is saved: {_explain(error)}"
        raise CheckpointError(msg) from error
    except RuntimeError as error:  # torch raises it in place of an OSError
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def read_file(path: Path, *, compares_sums: bool = True) -> dict[str, Any]:
    """Return the state in a file; a DamagedError says that it is not whole."""
    try:
        state = _load(path, compares_sums=compares_sums)
    except Exception as error:  # unpickling a damaged file can raise anything
        is_of_machine = isinstance(error, OSError) and error.errno != errno.EIO
        if is_of_machine or isinstance(error, MemoryError):
            msg = f"{path}: cannot be read: {error}"
            raise CheckpointError(msg) from error
        msg = f"{path}: is damaged: {_explain(error)}"
        raise DamagedError(msg) from error
    found = state.get("format") if isinstance(state, dict) else None
    if found != _FORMAT:
        msg = f"{path}: expected {_FORMAT!r}, got {found!r}"
        raise CheckpointError(msg)
    return state  # type: ignore[no-any-return]


def _load(path: Path, *, compares_sums: bool = False) -> Any:
    if compares_sums:  # torch.load does not
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            msg = f"the sum of {damaged} is wrong"
            raise zipfile.BadZipFile(msg)
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _explain(error: Exception) -> str:
    """Say what is wrong with an object that pickle refuses."""
    kind = re.search(r"GLOBAL (\S+)", str(error))
    problem = "it holds an object of {}, which is neither a tensor nor a plain value"
    return problem.format(kind[1]) if kind else str(error)
