"""A dataset of the windows of a sequence of tokens, in files or in memory."""

import os
from bisect import bisect_left, bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.format import open_memmap
from torch import Tensor
from torch.utils.data import Dataset

from fastamp.data.arrays import Columns, as_tensor
from fastamp.data.checks import as_integer
from fastamp.data.sample_rng import Keys, sample_rng

_Source: TypeAlias = str | os.PathLike[str] | npt.NDArray[Any] | Tensor
_DTYPES = (np.uint8, np.uint16, np.uint32, np.int32, np.int64)
_NAMES = "uint8, uint16, uint32, int32 or int64"


class TokenDataset(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a flat sequence of tokens, for a language model.

    Item i is `x = tokens[i * block_size : (i + 1) * block_size]` and `y`, the same shifted by one,
    as int64. Windows do not overlap; a last piece that is too short is left out.

    Args:
        path_or_array: a file of raw tokens or a `.npy` file, which is mapped, or a one-dimensional
            array or tensor on the CPU; a list of these is one sequence, read window by window.
        block_size: tokens in a window.
        dtype: of the tokens in a raw file: uint8, uint16 (the default), uint32, int32 or int64. An
            array and a `.npy` file have their own.
        header: bytes to skip at the beginning of each raw file.
        random_offsets: let each window begin anywhere, at a place that is drawn for each sample, as
            by `fastamp.sample_rng`. An epoch has as many windows as without.

    Raises:
        OSError: there is no such file.
        TypeError: NumPy does not know `dtype`.
        ValueError: a file is empty, damaged or shorter than `header`, which is for raw files alone;
            the tokens are too few for one window, of another dtype, or not one-dimensional.

    Example:
        >>> dataset = fastamp.TokenDataset(np.arange(10, dtype=np.uint16), block_size=4)
        >>> len(dataset)
        2
        >>> dataset[1]
        (tensor([4, 5, 6, 7]), tensor([5, 6, 7, 8]))
    """

    def __init__(
        self,
        path_or_array: _Source | list[_Source],
        block_size: int,
        dtype: npt.DTypeLike | None = None,
        header: int = 0,
        random_offsets: bool = False,  # noqa: FBT001, FBT002 - as in the documentation
    ) -> None:
        self.block_size = as_integer("block_size", block_size, least=1, optional=False)
        self.random_offsets = bool(random_offsets)
        sources: Any = path_or_array if isinstance(path_or_array, list | tuple) else [path_or_array]
        self._sources = [  # a tensor may not be picklable
            Path(source).absolute() if isinstance(source, str | os.PathLike) else np.asarray(source)
            for source in sources
        ]
        self._dtype = None if dtype is None else np.dtype(dtype)
        if dtype is not None and self._dtype not in _DTYPES:
            msg = f"dtype: expected {_NAMES} in this machine's byte order, got {self._dtype!r}"
            raise ValueError(msg)
        self._header = as_integer("header", header, least=0, optional=False)
        self._open()

    def _open(self) -> None:
        """Map the files, and check that all tokens have one dtype."""
        parts: list[npt.NDArray[Any]] = []
        for i, source in enumerate(self._sources):
            try:
                parts.append(part := _open(source, self._dtype, self._header))
            except OSError:
                raise
            except Exception as error:  # NumPy's parser raises errors of many types
                msg = f"path_or_array[{i}]: {source} cannot be read: {error}"
                raise ValueError(msg) from error
            expected = self._dtype or parts[0].dtype
            if part.ndim != 1 or expected not in _DTYPES or part.dtype != expected:
                kind = expected if expected in _DTYPES else _NAMES
                msg = f"path_or_array[{i}]: expected one dimension of {kind} in this machine's "
                raise ValueError(msg + f"byte order, got shape {part.shape} of {part.dtype}")
        self._parts = [part for part in parts if len(part)]
        self._begins: list[int] = [0, *accumulate(map(len, self._parts))]
        self._length: int = (self._begins[-1] - 1) // self.block_size
        if self._length < 1:
            count = self._begins[-1]
            msg = f"block_size={self.block_size}: {count} tokens are too few for one window"
            raise ValueError(msg)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -self._length <= index < self._length:
            msg = f"index {index} is out of bounds for dimension 0 with size {self._length}"
            raise IndexError(msg)
        begin = int(index) % self._length * self.block_size
        if self.random_offsets:
            begin = sample_rng().take_key() % (self._begins[-1] - self.block_size)
        end, begins = begin + self.block_size + 1, self._begins
        parts = range(bisect_right(begins, begin) - 1, bisect_left(begins, end))
        pieces = [self._parts[i][max(begin - begins[i], 0) : end - begins[i]] for i in parts]
        tokens = np.concatenate(pieces)
        x, y = (torch.from_numpy(part.astype(np.int64)) for part in (tokens[:-1], tokens[1:]))
        return x, y

    def columns(self) -> Columns | str:
        """Return the windows for a loader to gather, or why it has to read items."""
        if len(self._parts) > 1:
            return f"the tokens lie in {len(self._parts)} parts"
        tokens, step = as_tensor(self._parts[0]), 1 if self.random_offsets else self.block_size
        pair = [part.unfold(0, self.block_size, step) for part in (tokens[:-1], tokens[1:])]
        count = np.uint64(len(pair[0]))

        def draw(keys: Keys) -> Tensor:
            return torch.from_numpy((keys % count).astype(np.int64))

        return Columns(pair, [torch.int64] * 2, list, starts=draw if self.random_offsets else None)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the tokens: a file as its path, which is mapped again when loaded."""
        return {name: value for name, value in vars(self).items() if name != "_parts"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()


def _open(source: Any, dtype: Any, header: int) -> npt.NDArray[Any]:
    """Return the tokens of an array, or of a file, which is mapped."""
    is_raw = isinstance(source, Path) and source.suffix.lower() != ".npy"
    nbytes = source.stat().st_size if is_raw else 0
    if header > nbytes:
        most = f"at most the file's {nbytes} bytes" if is_raw else "0 for all but raw tokens"
        msg = f"header={header}: expected {most}"
        raise ValueError(msg)
    if is_raw:
        return np.memmap(source, np.uint16 if dtype is None else dtype, "r", offset=header)
    tokens = open_memmap(source, mode="r") if isinstance(source, Path) else source
    return np.ascontiguousarray(tokens) if tokens.strides != (tokens.itemsize,) else tokens
