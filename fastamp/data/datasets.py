"""Datasets that lie in memory or in a mapped file, whose batches are gathered without Python."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from fastamp._ops import Column, index_error
from fastamp.data.position import as_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt
    from torch import Tensor

__all__ = ["ArrayDataset", "Gatherable", "TokenDataset", "is_arrays", "make_gatherable"]

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

    def __reduce__(self) -> tuple[type[TokenDataset], tuple[Any, ...]]:
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
    """Tensors and NumPy arrays in a dict or tuple, nested or not, as a dataset of their rows."""

    def __init__(self, arrays: dict[Any, Any] | tuple[Any, ...]) -> None:
        self.arrays = arrays
        lengths = {path: len(array) for path, array in _leaves(arrays, "dataset")}
        first, self._length = next(iter(lengths.items()))
        for path, length in lengths.items():
            if length != self._length:
                msg = f"{path}: has {length} rows, and {first} has {self._length}"
                raise ValueError(msg)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return _map(self.arrays, lambda array: array[index])


def is_arrays(dataset: object) -> bool:
    """Say whether a DataLoader's argument is a dict or tuple of arrays, nested or not."""
    if type(dataset) not in (dict, tuple) or not dataset:
        return False
    leaves = [array for _, array in _leaves(dataset, "")]
    return all(isinstance(array, torch.Tensor | np.ndarray) and array.ndim for array in leaves)


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if type(tree) in (dict, tuple):
        for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _leaves(child, f"{path}[{key!r}]")
    else:
        yield path, tree


def _map(tree: Any, function: Callable[[Any], Any], make: type = tuple) -> Any:
    """Replace the arrays; `make` makes what stands for tuples."""
    if type(tree) is dict:
        return {key: _map(child, function, make) for key, child in tree.items()}
    if type(tree) is tuple:
        return make(_map(child, function, make) for child in tree)
    return function(tree)


class Gatherable(NamedTuple):
    """A dataset as columns, out of which the core gathers batches."""

    columns: list[Column]
    build: Callable[[list[Tensor]], Any]
    """Makes the batch, as default_collate would, out of one tensor for each column."""
    rows: Tensor | None
    """int64: the row that an index means, for a subset."""


def make_gatherable(dataset: object) -> Gatherable | None:
    """Return the columns of a dataset in memory; None for any other dataset.

    Batches have the values, types and dtypes that default_collate gives them.
    """
    if type(dataset) is Subset:
        inner, rows = make_gatherable(dataset.dataset), as_rows(dataset.indices)
        if inner is None or rows is None:
            return None
        return inner._replace(rows=rows if inner.rows is None else inner.rows[rows])
    if type(dataset) is TokenDataset:
        columns = [Column(part, torch.int64) for part in (dataset.x, dataset.y)]
        return Gatherable(columns, list, None)
    tree: Any = dataset
    if type(dataset) is TensorDataset:
        tree = dataset.tensors
    elif type(dataset) is ArrayDataset:
        tree = dataset.arrays
    arrays = [array for _, array in _leaves(tree, "")]
    columns = [column for column in map(_column, arrays) if column is not None]
    if not columns or len(columns) < len(arrays):
        return None
    if type(tree) is tuple and not any(type(child) in (dict, tuple) for child in tree):
        return Gatherable(columns, list, None)

    def build(tensors: list[Tensor]) -> Any:
        """Put the tensors where the arrays are; default_collate makes lists of tuples."""
        remaining = iter(tensors)
        return _map(tree, lambda _: next(remaining), list)

    return Gatherable(columns, build, None)


def _column(array: Any) -> Column | None:
    """Return an array as a column; None if its rows are not plain memory."""
    if type(array) in (np.ndarray, np.memmap):
        return _numpy_column(array)
    if type(array) is not torch.Tensor or array.ndim == 0 or array.requires_grad:
        return None
    plain = array.layout is torch.strided and array.device.type == "cpu"
    if not plain or array.is_conj() or array.is_neg() or not array[:1].is_contiguous():
        return None
    return Column(array, array.dtype)


def _numpy_column(array: npt.NDArray[Any]) -> Column | None:
    if array.ndim == 0 or array.dtype.kind not in "biufc" or not array.dtype.isnative:
        return None
    if not array[:1].flags.c_contiguous:
        return None
    try:
        sample = default_collate([np.ones((1, *array.shape[1:]), array.dtype)[0]])
    except TypeError:  # a dtype that torch does not have
        return None
    column = Column(array, sample.dtype)
    same = torch.from_numpy(np.empty(0, array.dtype)).dtype == sample.dtype
    return column if same else None
