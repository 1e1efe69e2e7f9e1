"""A dataset of the windows of a sequence of tokens, in files or in memory."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.format import open_memmap
from torch import Tensor
from torch.utils.data import Dataset

from fastamp.data.checks import as_integer
from fastamp.data.columns import Windows, index_error
from fastamp.data.sample_rng import mix, mix_all, sample_rng

_Source: TypeAlias = str | os.PathLike[str] | npt.NDArray[Any] | Tensor
_DTYPES = (np.uint8, np.uint16, np.uint32, np.int32, np.int64)
_NAMES = "uint8, uint16, uint32, int32 or int64"


class TokenDataset(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a flat sequence of tokens, for a language model.

    Window i is `x = tokens[i * block_size : (i + 1) * block_size]` and `y`, the same shifted by
    one: the next token for each of x. Windows do not overlap, so an epoch reads every token once,
    up to a last piece that is too short.

    Args:
        path_or_array: a file of raw tokens or a `.npy` file, which is mapped, not read; or a
            one-dimensional array or tensor on the CPU, which is shared, not copied, unless it has
            strides. A list of these is one sequence: a window may begin in one and end in the next.
            Each file stays open; other processes open it again by its path.
        block_size: tokens in a window.
        dtype: of the tokens in a raw file: uint8, uint16 (the default), uint32, int32 or int64. An
            array and a `.npy` file have their own.
        header: bytes to skip at the beginning of each raw file.
        random_offsets: let each window begin anywhere, at a place that is drawn for each sample, as
            `fastamp.sample_rng` does: anew in each epoch, and the same in a pass that is resumed,
            with any number of workers. An epoch has as many windows as without.

    Items are pairs of int64 tensors of shape (block_size,), batches of shape (batch, block_size).

    Raises:
        OSError: the file cannot be read.
        ValueError: the tokens are too few for one window, of another dtype, or not one-dimensional;
            `block_size` is below 1; a `.npy` file is damaged; or `header` is more than a file has,
            or is given for anything but raw files.

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
        block_size = as_integer("block_size", block_size, least=1, optional=False)
        header = as_integer("header", header, least=0, optional=False)
        self.block_size, self.random_offsets = block_size, bool(random_offsets)
        parts = _open_all(path_or_array, dtype, header)
        several = isinstance(path_or_array, list | tuple)
        own = [*map(_portable, path_or_array if several else [path_or_array])]  # type: ignore[arg-type]
        self._source = (own if several else own[0], dtype, header)
        self._cut(parts)

    def _cut(self, parts: list[npt.NDArray[Any]]) -> None:
        """Cut files and arrays into windows."""
        parts = [part[:] for part in parts if len(part)]
        count, block_size = sum(map(len, parts)), self.block_size
        self._length = (count - 1) // block_size
        if self._length < 1:
            msg = f"block_size={block_size}: {count} tokens are too few for one window"
            raise ValueError(msg)
        step, windows = block_size, self._length
        if self.random_offsets:
            step, windows = 1, count - block_size
        after = [part for part in (parts[0][1:], *parts[1:]) if len(part)]
        self.x = Windows(parts, step, (windows, block_size))
        self.y = Windows(after, step, (windows, block_size))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -self._length <= index < self._length:
            raise index_error(index, self._length)
        row = int(index) % self._length
        if self.random_offsets:
            row = mix(sample_rng().take_key() + 1) % self.x.shape[0]
        x, y = (torch.from_numpy(part[row].astype(np.int64)) for part in (self.x, self.y))
        return x, y

    def find_starts(self, indices: Tensor, keys: Tensor) -> Tensor:
        """Return the windows that samples with these keys draw."""
        rows = indices.numpy()
        if ((rows < -self._length) | (rows >= self._length)).any():
            raise IndexError  # which __getitem__ explains
        drawn = mix_all(keys + 1).numpy().view(np.uint64) % np.uint64(self.x.shape[0])
        return torch.from_numpy(drawn.astype(np.int64))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the windows: a file as its path, which is mapped again when loaded."""
        return {name: value for name, value in vars(self).items() if name not in ("x", "y")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._cut(_open_all(*self._source))


def _portable(source: Any) -> Any:
    """Return an absolute path, or an array in place of a tensor, which may not be picklable."""
    if isinstance(source, str | os.PathLike):
        return Path(source).absolute()
    return np.asarray(source) if isinstance(source, Tensor) else source


def _open_all(source: Any, dtype: npt.DTypeLike | None, header: int) -> list[npt.NDArray[Any]]:
    """Return the tokens of all files and arrays, which have one dtype."""
    try:
        wanted = None if dtype is None else np.dtype(dtype)
    except (TypeError, ValueError):  # torch's, for one
        wanted = np.dtype(object)
    if wanted is not None and wanted not in _DTYPES:
        msg = f"dtype: expected NumPy's {_NAMES}, got {dtype!r}"
        raise ValueError(msg)
    kinds = (str, os.PathLike, np.ndarray, Tensor)
    several = isinstance(source, list | tuple) and all(isinstance(s, kinds) for s in source)
    sources = source if several else [source]
    names = [f"path_or_array[{i}]" if several else "path_or_array" for i in range(len(sources))]
    parts: list[npt.NDArray[Any]] = []
    for name, one in zip(names, sources, strict=True):
        parts.append(_open(name, one, wanted, header))
        if parts[-1].dtype != parts[0].dtype:
            msg = f"{name}: its tokens are {parts[-1].dtype}, those before it {parts[0].dtype}"
            raise ValueError(msg)
    return parts


def _open(name: str, source: _Source, dtype: np.dtype[Any] | None, header: int) -> npt.NDArray[Any]:
    path = Path(source) if isinstance(source, str | os.PathLike) else None
    if header and (path is None or path.suffix.lower() == ".npy"):
        kind = "an array" if path is None else "a .npy file"
        msg = f"header={header}: expected 0 where {name} is {kind}, not a file of raw tokens"
        raise ValueError(msg)
    tokens = _read(name, np.asarray, source) if path is None else _map(path, dtype, header)
    if dtype is not None and dtype != tokens.dtype:
        msg = f"dtype={dtype.name}: the tokens of {name} are {tokens.dtype.name}"
        raise ValueError(msg)
    if tokens.ndim != 1:
        msg = f"{name}: expected one dimension, got shape {tokens.shape}"
        raise ValueError(msg)
    if tokens.dtype not in _DTYPES:
        msg = f"{name}: expected {_NAMES} in this machine's byte order, got {tokens.dtype}"
        raise ValueError(msg)
    return np.ascontiguousarray(tokens) if tokens.strides != (tokens.itemsize,) else tokens


def _map(path: Path, dtype: np.dtype[Any] | None, header: int) -> npt.NDArray[Any]:
    nbytes, raw = path.stat().st_size, np.dtype(np.uint16 if dtype is None else dtype)
    if nbytes < header:
        msg = f"header={header}: {path} has only {nbytes} bytes"
        raise ValueError(msg)
    if nbytes == header:  # cannot be mapped; nor can a FIFO, which would block
        return np.empty(0, raw)
    if path.suffix.lower() == ".npy":
        mapped: npt.NDArray[Any] = _read(str(path), open_memmap, path, mode="r")
        return mapped
    if (nbytes - header) % raw.itemsize:
        behind = " behind the header" if header else ""
        msg = f"dtype={raw.name}: {path} has {nbytes - header} bytes{behind}, no multiple of "
        raise ValueError(msg + str(raw.itemsize))
    return np.memmap(path, raw, "r", offset=header)


def _read(name: str, read: Callable[..., Any], source: Any, **options: Any) -> Any:
    """Read something with NumPy; a ValueError names it if NumPy cannot, for whatever reason."""
    try:
        return read(source, **options)
    except OSError:
        raise
    except Exception as error:
        msg = f"{name}: cannot be read: {error}"
        raise ValueError(msg) from error
