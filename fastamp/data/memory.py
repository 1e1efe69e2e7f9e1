"""Keeps a dataset's memory alive during a pass, and notices when others move it or cut its file."""

import mmap
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastamp.data.columns import Windows


class Kept(NamedTuple):
    """The memory that an array had when a pass began."""

    alias: Tensor | npt.NDArray[Any] | Windows
    """A view of the same rows, which stays as it is whatever is done to the array."""
    has_changed: Callable[[], bool] | None = None
    """Says whether the rows lie elsewhere now, or in a file that is too short. None: they cannot
    change."""
    path: str = ""
    """The file that is mapped."""
    owners: tuple[weakref.ref[Any], ...] = ()
    """Weak references, because of which NumPy refuses to resize the arrays."""
    parts: "tuple[Kept, ...]" = ()
    """For windows: the arrays that they lie in."""

    def changes(self) -> list[Callable[[], bool]]:
        """Return the functions that say whether any of it has changed; two that agree are equal."""
        return [kept.has_changed for kept in (self, *self.parts) if kept.has_changed]

    def check_file(self) -> None:
        """Raise an error if the file has become too short."""
        for part in self.parts:
            part.check_file()
        if self.path and self.has_changed and self.has_changed():
            msg = f"dataset: {self.path} was truncated while it is mapped: rows are lost"
            raise RuntimeError(msg)


def keep(array: Tensor | npt.NDArray[Any] | Windows) -> Kept:
    """Keep the memory of a column for as long as the result lives."""
    if isinstance(array, Windows):
        return _keep_windows(array)
    return _keep_tensor(array) if isinstance(array, torch.Tensor) else _keep_array(array)


def _keep_tensor(tensor: Tensor) -> Kept:
    alias, storage = tensor.detach(), tensor.untyped_storage()
    address_of, nbytes_of, looks_into = storage.data_ptr, storage.nbytes, tensor.is_set_to
    address, nbytes = address_of(), nbytes_of()

    def has_changed() -> bool:
        # A storage is resized and shared in place; `set_` gives the tensor another storage.
        return address_of() != address or nbytes_of() != nbytes or not looks_into(alias)

    return Kept(alias, has_changed)


def _keep_array(array: npt.NDArray[Any]) -> Kept:
    owners: list[Any] = []
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owners.append(owner)
        owner = owner.base
    refs, last, file = tuple(map(weakref.ref, owners)), owners[-1], owner
    if not isinstance(last, np.memmap) or not isinstance(file, mmap.mmap):
        return Kept(array.view(), owners=refs)
    is_cut = _IsCut(file, last.offset + last.nbytes)
    return Kept(array.view(), is_cut, str(last.filename), refs)


@dataclass(frozen=True)
class _IsCut:
    file: mmap.mmap
    end: int

    def __call__(self) -> bool:
        return self.file.size() < self.end


def _keep_windows(windows: Windows) -> Kept:
    parts = tuple(map(_keep_array, windows.parts))
    aliases: Any = [part.alias for part in parts]
    return Kept(Windows(aliases, windows.step, windows.shape), parts=parts)
