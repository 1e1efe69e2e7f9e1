"""Datasets in memory or in a mapped file: rows of arrays, and windows of tokens."""

import os
from collections.abc import Callable
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.format import open_memmap
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map
from torch.utils.data import Dataset

from fastamp._ops import Images, index_error
from fastamp.data.augment import Augmentations, read_augment
from fastamp.data.sample_rng import sample_rng

_TOKEN_DTYPES = (np.uint8, np.uint16, np.int32, np.int64)


class TokenDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of a flat sequence of tokens, for a language model.

    Window i is `x = tokens[i * block_size : (i + 1) * block_size]` and `y`, the same shifted by
    one: the next token for each of x. Windows do not overlap, so an epoch reads every token once,
    up to a last piece that is too short.

    Args:
        path_or_array: a file of raw tokens or a `.npy` file, which is mapped, not read; or a
            one-dimensional array or tensor on the CPU, which is shared, not copied.
        block_size: tokens in a window.
        dtype: of the tokens in a raw file: uint8, uint16 (the default), int32 or int64. An array
            and a `.npy` file have their own.

    Items are pairs of int64 tensors of shape (block_size,), batches of shape (batch, block_size).

    Raises:
        OSError: the file cannot be read.
        ValueError: the tokens are too few for one window, of another dtype, or not one-dimensional;
            `block_size` is below 1; or a `.npy` file is damaged.
    """

    def __init__(
        self,
        path_or_array: str | os.PathLike[str] | npt.NDArray[Any] | Tensor,
        block_size: int,
        dtype: npt.DTypeLike | None = None,
    ) -> None:
        size: Any = block_size
        if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
            msg = f"block_size: expected an integer of at least 1, got {block_size!r}"
            raise ValueError(msg)
        self.block_size = block_size
        self._source = (path_or_array, block_size, dtype)
        tokens = _open_tokens(path_or_array, dtype)
        self._length = (len(tokens) - 1) // block_size
        if self._length < 1:
            msg = f"block_size={block_size}: {len(tokens)} tokens are too few for one window"
            raise ValueError(msg)
        end = self._length * block_size
        self.x = tokens[:end].reshape(self._length, block_size)
        self.y = tokens[1 : end + 1].reshape(self._length, block_size)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -self._length <= index < self._length:
            raise index_error(index, self._length)
        x, y = (torch.from_numpy(part[index].astype(np.int64)) for part in (self.x, self.y))
        return x, y

    def __reduce__(self) -> "tuple[type[TokenDataset], tuple[Any, ...]]":
        """Travel to another process as a path, which is mapped there, where there is one."""
        return type(self), self._source


def _open_tokens(
    source: str | os.PathLike[str] | npt.NDArray[Any] | Tensor, dtype: npt.DTypeLike | None
) -> npt.NDArray[Any]:
    wanted = None if dtype is None else _read("dtype", np.dtype, dtype)
    if wanted is not None and wanted not in _TOKEN_DTYPES:
        msg = f"dtype: expected uint8, uint16, int32 or int64, got {dtype!r}"
        raise ValueError(msg)
    if isinstance(source, (str, os.PathLike)):
        tokens = _map(Path(source), wanted)
    else:
        tokens = _read("path_or_array", np.asarray, source)
    if wanted is not None and wanted != tokens.dtype:
        msg = f"dtype={wanted.name}: the tokens are {tokens.dtype.name}"
        raise ValueError(msg)
    if tokens.ndim != 1:
        msg = f"path_or_array: expected one dimension, got shape {tokens.shape}"
        raise ValueError(msg)
    if tokens.dtype not in _TOKEN_DTYPES:
        msg = (
            "path_or_array: expected uint8, uint16, int32 or int64 in this machine's byte order, "
            f"got {tokens.dtype}"
        )
        raise ValueError(msg)
    return tokens


def _map(path: Path, dtype: np.dtype[Any] | None) -> npt.NDArray[Any]:
    nbytes, raw = path.stat().st_size, np.dtype(np.uint16 if dtype is None else dtype)
    if not nbytes:  # cannot be mapped; nor can a FIFO, which would block
        return np.empty(0, raw)
    if path.suffix == ".npy":
        mapped: npt.NDArray[Any] = _read(str(path), open_memmap, path, mode="r")
        return mapped
    if nbytes % raw.itemsize:
        msg = f"dtype={raw.name}: {path} has {nbytes} bytes, no multiple of {raw.itemsize}"
        raise ValueError(msg)
    return np.memmap(path, raw, "r")


def _read(name: str, read: Callable[..., Any], source: Any, **options: Any) -> Any:
    """Let NumPy read something, and name it where NumPy cannot, for whatever reason."""
    try:
        return read(source, **options)
    except OSError:
        raise
    except Exception as error:
        msg = f"{name}: cannot be read: {error}"
        raise ValueError(msg) from error


class ArrayDataset(Dataset[Any]):
    """Rows of tensors, NumPy arrays or memmaps, as TensorDataset has those of tensors.

    `ArrayDataset(x, y)` has the samples `(x[i], y[i])`, and batches as TensorDataset has them.
    `ArrayDataset({"x": x, "y": y})` has the samples `{"x": x[i], "y": y[i]}`, and dicts as batches.
    The arrays may be nested in dicts, lists and tuples. They are shared, not copied.

    Args:
        arrays: with the same first dimension, of any dtype.
        augment: what is done with each image while it is copied, in this order:
            `fastamp.RandomCrop`, `fastamp.RandomHorizontalFlip` and `fastamp.Cutout`, at most 8. A
            list is for the first array; a dict says which array has which list, by its key or its
            place.
        channels_last: images to augment have the shape (height, width, channels), rather than
            (channels, height, width); with neither, (height, width). Has to be said where the last
            dimension is the smallest and 1, 3 or 4.

    What is drawn depends on the loader's `seed`, the epoch and the sample's place in it, as in
    `fastamp.sample_rng`: not on the batch, the workers or the ranks. Arrays of one sample with the
    same augmentations are augmented alike, such as images and their masks.

    Raises:
        TypeError: there is something else than an array with at least one dimension, or than
            augmentations; or an array to augment has no images in plain memory on the CPU.
        ValueError: there is no array, or they differ in length; or the augmentations do not fit.
    """

    def __init__(
        self, *arrays: Any, augment: Augmentations | None = None, channels_last: bool | None = None
    ) -> None:
        alone = len(arrays) == 1 and type(arrays[0]) is dict
        self.arrays: Any = arrays[0] if alone else arrays
        self._length = count_rows(self.arrays, "arrays")
        self._augmented = read_augment(augment or [], self.arrays, channels_last=channels_last)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        sample = tree_map(lambda array: array[index], self.arrays)
        if not self._augmented:
            return sample
        key = sample_rng().take_key()
        parts = sample if isinstance(sample, dict) else list(sample)
        for name, augmented in self._augmented.items():
            parts[name] = augmented.apply(self.arrays[name], index, key)
        return parts if isinstance(sample, dict) else tuple(parts)

    def images(self) -> list[Images | None]:
        """Return how each of the arrays, with those in containers, is augmented."""
        found: list[Images | None] = []
        for name in self.arrays if isinstance(self.arrays, dict) else range(len(self.arrays)):
            array, augmented = self.arrays[name], self._augmented.get(name)
            leaves = len(tree_leaves(array))
            found += [None] * leaves if augmented is None else [augmented.images(array)]
        return found


def is_arrays(tree: object) -> bool:
    """Say whether there are only arrays in a dict or another container, and at least one."""
    leaves = tree_leaves(tree)
    return bool(leaves) and all(map(_has_rows, leaves))


def count_rows(tree: Any, name: str) -> int:
    """Return the length of all arrays in a container, or raise an error that names them."""
    arrays = {name + keystr(path): array for path, array in tree_flatten_with_path(tree)[0]}
    if not arrays:
        msg = f"{name}: expected at least one tensor or NumPy array"
        raise ValueError(msg)
    for path, array in arrays.items():
        if not _has_rows(array):
            kind = f"{type(array).__name__} of shape {tuple(getattr(array, 'shape', ()))}"
            kind = kind if hasattr(array, "shape") else type(array).__name__
            msg = f"{path}: expected a tensor or NumPy array with a first dimension, got {kind}"
            raise TypeError(msg)
    first, length = next((path, len(array)) for path, array in arrays.items())
    for path, array in arrays.items():
        if len(array) != length:
            msg = f"{path}: has {len(array)} rows, and {first} has {length}"
            raise ValueError(msg)
    return length


def _has_rows(array: object) -> bool:
    return isinstance(array, torch.Tensor | np.ndarray) and array.ndim > 0
