"""Datasets in memory or in a mapped file: rows of arrays, and windows of tokens."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map
from torch.utils.data import Dataset

from fastamp._ops import index_error

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
        ValueError: the tokens are too few for one window, of another dtype, or not one-dimensional.
    """

    def __init__(
        self,
        path_or_array: str | os.PathLike[str] | npt.NDArray[Any] | Tensor,
        block_size: int,
        dtype: npt.DTypeLike | None = None,
    ) -> None:
        if block_size < 1:
            msg = f"block_size: expected at least 1, got {block_size}"
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
    if isinstance(source, (str, os.PathLike)) and Path(source).suffix != ".npy":
        tokens = _map_raw(Path(source), np.dtype(np.uint16 if dtype is None else dtype))
    else:
        if isinstance(source, (str, os.PathLike)):
            source = np.load(source, mmap_mode="r")
        tokens = np.asarray(source)
        if dtype is not None and np.dtype(dtype) != tokens.dtype:
            msg = f"dtype={np.dtype(dtype).name}: the tokens are {tokens.dtype.name}"
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


def _map_raw(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    nbytes = path.stat().st_size
    if nbytes % dtype.itemsize:
        msg = f"dtype={dtype.name}: {path} has {nbytes} bytes, no multiple of {dtype.itemsize}"
        raise ValueError(msg)
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, "r") if nbytes else np.empty(0, dtype)


class ArrayDataset(Dataset[Any]):
    """Rows of tensors, NumPy arrays or memmaps, as TensorDataset has those of tensors.

    `ArrayDataset(x, y)` has the samples `(x[i], y[i])`, and batches as TensorDataset has them.
    `ArrayDataset({"x": x, "y": y})` has the samples `{"x": x[i], "y": y[i]}`, and dicts as batches.
    The arrays may be nested in dicts, lists and tuples. They are shared, not copied.

    Raises:
        TypeError: there is something else than an array with at least one dimension.
        ValueError: there is no array, or they differ in length.
    """

    def __init__(self, *arrays: Any) -> None:
        alone = len(arrays) == 1 and type(arrays[0]) is dict
        self.arrays: Any = arrays[0] if alone else arrays
        self._length = count_rows(self.arrays, "arrays")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return tree_map(lambda array: array[index], self.arrays)


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
