"""A checkpoint's file: a state of tensors and plain values, with sums; reading it runs no code."""

import errno
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from fastamp._files import create

_FORMAT = "fastamp.train 5"
# What pickle raises for an object that it cannot write or, with `weights_only`, does not read.
_NOT_PICKLED = (pickle.PickleError, AttributeError, TypeError)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be resumed; the message names it.

    Example:
        >>> fastamp.Checkpointer("run", model=torch.nn.Linear(2, 1)).save(1)
        >>> try:
        ...     fastamp.Checkpointer("run", model=torch.nn.Linear(3, 1)).restore()
        ... except fastamp.CheckpointError:
        ...     print("another model")
        another model
    """


class DamagedError(CheckpointError):
    """A checkpoint that cannot be read: the one before it can be resumed."""


def as_plain(state: Any) -> Any:
    """Return a state with Python's numbers in place of NumPy's, which `read_file` would refuse."""
    versions = getattr(state, "_metadata", None)  # of a model's modules
    state = tree_map_only(np.generic, np.generic.item, state)
    if versions is not None:
        state._metadata = versions
    return state


def write_file(path: Path, state: dict[str, Any]) -> None:
    """Write a state to the disk, and check that `read_file` takes the objects in it.

    Raises:
        CheckpointError: it holds an object that is neither a tensor nor a plain value.
    """
    try:
        with create(path) as file:
            torch.save({"format": _FORMAT, **state}, file)
        _load(path)
    except _NOT_PICKLED as error:
        raise _not_saved(error) from error
    except RuntimeError as error:  # torch raises it in place of an OSError
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def check_pickled(state: Any) -> None:
    """Raise a CheckpointError if a state cannot be sent to another rank."""
    try:
        pickle.dumps(state)
    except _NOT_PICKLED as error:
        raise _not_saved(error) from error


def read_file(path: Path, *, compares_sums: bool = True) -> dict[str, Any]:
    """Return the state in a file; its tensors are read from the disk where they are used.

    Raises:
        CheckpointError: it is of another version, or the machine cannot read it; a DamagedError if
            it is not whole.
    """
    try:
        if compares_sums:
            _compare_sums(path)
        state = _load(path)
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


def _load(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, on sparse tensors: no damage
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _compare_sums(path: Path) -> None:
    """Compare the checksums of all entries, which torch.load does not."""
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        msg = f"the sum of {damaged} is wrong"
        raise zipfile.BadZipFile(msg)


def _not_saved(error: Exception) -> CheckpointError:
    return CheckpointError(f"nothing is saved: {_explain(error)}")


def _explain(error: Exception) -> str:
    """Say what is wrong with an object that pickle refuses."""
    if not isinstance(error, pickle.UnpicklingError):
        return str(error)
    kind = re.search(r"GLOBAL (\S+)", str(error))
    of_what = f" of {kind[1]}" if kind else ""
    return f"it holds an object{of_what}, which is neither a tensor nor a plain value"
