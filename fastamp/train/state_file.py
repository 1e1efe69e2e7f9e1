"""A checkpoint's file: a state of tensors and plain values, with sums; reading it runs no code."""

import errno
import io
import os
import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastamp._files import create, open_regular

Check: TypeAlias = Callable[[dict[str, Any]], object]
"""Raises a ValueError that says why a state cannot be resumed; the state is a checkpoint's."""

_FORMAT = "fastamp.train 4"
_OURS = _FORMAT.rpartition(" ")[0].encode()  # near the start of every file, of any version
RUN = "run.pt"  # in a folder: everything except the tensors of model and optimizer
# Errors of a damaged path, or of none; others, such as a missing permission, are the machine's.
_DAMAGED = {errno.ENOENT, errno.EINVAL, errno.EIO, errno.ELOOP, errno.ENOTDIR, errno.ENXIO}
# What pickle raises for an object that it cannot write or, with `weights_only`, does not read.
_NOT_PICKLED = (pickle.PickleError, AttributeError, TypeError)
# The types of nearly all that a state holds; whether others can be read is tried.
_PLAIN = {Tensor, nn.Parameter, dict, OrderedDict, list, tuple, str, int, float, bool, type(None)}
_ENTRY_NBYTES = 30  # the least that an archive's entry takes beside its content


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


def is_ours(path: Path) -> bool:
    """Say whether a file or folder carries our format, of any version, damaged or not."""
    file = path / RUN if path.is_dir() else path
    if path.is_symlink() or not file.is_file():  # a FIFO would block
        return False
    with file.open("rb") as opened:
        return _OURS in opened.read(4096)


def write_file(path: Path, state: dict[str, Any]) -> None:
    """Write a state to the disk."""
    with create(path) as file:
        try:
            torch.save({"format": _FORMAT, **state}, file)
        except RuntimeError as error:  # torch raises it in place of an OSError
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def as_plain(entry: Any, *, may_be_sharded: bool = False) -> Any:
    """Return an entry of a state, with Python's numbers in place of NumPy's, as `write_file` takes.

    Nothing is read back later, as that would take the memory of the file once more.

    Raises:
        ValueError: `read_file` would refuse it, because of what it holds.
    """
    versions = getattr(entry, "_metadata", None)  # of a model's modules
    kinds = _find_kinds([entry, versions])
    if any(issubclass(kind, np.generic) for kind in kinds):  # a scheduler's metric, a learning rate
        entry = tree_map_only(np.generic, np.generic.item, entry)
        if versions is not None:
            entry._metadata = versions
    if any(hasattr(kind, "full_tensor") for kind in kinds) and not may_be_sharded:
        msg = "is sharded: only model and optimizer may be"
        raise ValueError(msg)
    if not kinds <= _PLAIN:
        memory = io.BytesIO()
        try:
            torch.save((tree_map_only(Tensor, _left_out, entry), versions), memory)
            memory.seek(0)
            _load(memory)
        except _NOT_PICKLED as error:
            raise ValueError(_explain(error)) from error
    return entry


def _left_out(tensor: Tensor) -> Tensor | None:
    """Return None in place of a tensor that can be read; those of other classes are tried."""
    return None if type(tensor) in _PLAIN or hasattr(tensor, "full_tensor") else tensor


def _find_kinds(state: Any) -> set[type]:
    """Return the types of all that is in a state."""
    found: set[type] = set()
    containers, seen = [state], set[int]()
    while containers:
        one = containers.pop()
        if id(one) in seen:  # a container may hold itself
            continue
        seen.add(id(one))
        inside = [*one, *one.values()] if isinstance(one, dict) else one
        found |= {*map(type, inside)}
        containers += [x for x in inside if isinstance(x, (dict, list, tuple, set))]
    return found


def _load(file: BinaryIO) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, on sparse tensors: no damage
        return torch.load(file, map_location="cpu", weights_only=True)


def _explain(error: Exception) -> str:
    """Say what is wrong with an object that pickle refuses."""
    kind = re.search(r"GLOBAL (\S+)", str(error))
    if not isinstance(error, pickle.UnpicklingError):
        return str(error)
    of_what = f" of {kind[1]}" if kind else ""
    return f"holds an object{of_what}, which is neither a tensor nor a plain value"


def read_file(path: Path, check: Check) -> dict[str, Any]:
    """Return the state in a file, if it is whole and passes the check.

    Raises:
        CheckpointError: it is of another version, or does not pass; a DamagedError if it is not
            whole, or was not written by `write_file`.
    """
    if path.is_dir():
        msg = f"{path}: was written by several ranks: torchrun --nproc-per-node 1 resumes it"
        raise (CheckpointError if is_ours(path) else DamagedError)(msg)
    try:
        with open_regular(path) as file:
            _check_archive(file)
            file.seek(0)
            state = _load(file)
    except pickle.UnpicklingError as error:
        msg = f"{path}: {_explain(error)}"
        raise DamagedError(msg) from error
    except Exception as error:  # unpickling a foreign file can raise anything
        is_of_machine = isinstance(error, OSError) and error.errno not in _DAMAGED
        if is_of_machine or isinstance(error, MemoryError):
            msg = f"{path}: cannot be read: {error}"
            raise CheckpointError(msg) from error
        msg = f"{path}: is damaged or no checkpoint: {error}"
        raise DamagedError(msg) from error
    found = state.get("format") if isinstance(state, dict) else None
    if found != _FORMAT:
        is_other = isinstance(found, str) and found.startswith(_OURS.decode())
        msg = f"{path}: expected {_FORMAT!r}, got {found!r}"
        raise (CheckpointError if is_other else DamagedError)(msg)
    try:
        check(state)
    except ValueError as error:
        msg = f"{path}: {error}"
        raise CheckpointError(msg) from error
    return state  # type: ignore[no-any-return]


def _check_archive(file: BinaryIO) -> None:
    """Compare the checksums, which torch.load does not, and check that nothing in it expands."""
    nbytes = os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        needed = sum(entry.file_size + _ENTRY_NBYTES for entry in entries)
        if needed > nbytes or any(entry.compress_type for entry in entries):
            msg = f"its {len(entries)} entries would be larger than the file"
            raise zipfile.BadZipFile(msg)
        damaged = archive.testzip()
        if damaged is not None:
            msg = f"the sum of {damaged} is wrong"
            raise zipfile.BadZipFile(msg)
