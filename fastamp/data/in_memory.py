"""`fastamp.in_memory`: a dataset whose items are read once, and gathered from then on."""

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.data import default_collate

from fastamp.data.arrays import plain_dtype
from fastamp.data.datasets import ArrayDataset, by_name
from fastamp.data.items import Items
from fastamp.data.loader import DataLoader
from fastamp.data.sample_rng import Order, generators_kept
from fastamp.data.sources import find_columns

_CHUNK_ROWS, _CHUNK_NBYTES = 1024, 1 << 20  # few: a worker hands chunks on in /dev/shm
_PROBED, _PROBES = 8, 4  # items that are read again, and how often
_Columns: TypeAlias = list[Tensor]


def in_memory(
    dataset: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    num_workers: int = 0,
    worker: str | None = None,
) -> Any:
    """Read every item of a deterministic dataset once; return a dataset that is gathered.

    Its items are tensors on the CPU, NumPy arrays and numbers, alone or nested in dicts, lists and
    tuples, of one structure, and of the same shapes and dtypes. Batches of the result are
    bit-identical to those of torch's DataLoader over `dataset`; its items are as collated. Eight
    items are read four times each first, under 32 seeds, and must be equal: a dataset that is
    rarely random is not noticed. Without a `path` a dataset that is gathered already is returned.

    Args:
        dataset: with `__getitem__` and `__len__`.
        path: a folder for the items, which is made, with a `.npy` file for each leaf; None keeps
            them in memory. If the folder is there, it is mapped: its length, shapes, dtypes and the
            eight items must be the dataset's; name the version of your data in the path, for what
            these do not show. What the program writes into the mapped tensors stays in its memory.
            Over ranks, let one rank call before the others.
        num_workers: processes or threads that read the items; 0 reads them in this thread.
        worker: None or "process" for torch's worker processes, or "thread" for threads.

    Returns:
        An `ArrayDataset` of tensors, or one tensor if the items are bare leaves.

    Raises:
        TypeError: `dataset` has no length or items; items are not as described above; or NumPy
            lacks a dtype that a folder has to hold, as bfloat16.
        ValueError: the dataset is empty or random, or the folder was not made of this dataset.
        OSError: the folder cannot be written or read, or its disk is too small.

    Example:
        >>> dataset = fastamp.in_memory([(i, i * i) for i in range(6)], "squares")
        >>> next(iter(fastamp.DataLoader(dataset, 3)))[1]
        tensor([0, 1, 4])
    """
    dataset = by_name(dataset)
    way = find_columns(dataset) if path is None else ""
    if not isinstance(way, str) and way.then is None:
        return dataset
    length = len(dataset)
    if not length:
        msg = "dataset: has no items"
        raise ValueError(msg)
    with generators_kept():
        probed, spec = _probe(dataset, length)
        first = probed[0]
        fill = partial(_fill, dataset, first, spec, num_workers=num_workers, worker=worker)
        if path is None:
            columns = [row.new_empty(length, *row.shape[1:]) for row in first]
            fill(columns)
        else:
            folder = Path(path).expanduser().absolute()
            if not folder.exists():
                _write(folder, length, first, fill)
            columns = _map(folder, length, probed)
    tree = tree_unflatten(columns, spec)
    if isinstance(tree, Tensor):
        return tree
    made = ArrayDataset(columns[0])
    made.arrays = tuple(tree) if type(tree) is list else tree
    return made


def _probe(dataset: Any, length: int) -> tuple[dict[int, _Columns], TreeSpec]:
    """Return some items as batches of one, each read with several seeds, and their structure."""
    last, probed = length - 1, dict[int, _Columns]()
    rows = sorted({0, min(1, last), *(last * part // (_PROBED - 2) for part in range(_PROBED - 1))})
    items = Items(dataset, default_collate, single=False)
    for seed, row in enumerate(rows * _PROBES):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - what datasets draw from
        torch.default_generator.manual_seed(seed)
        batch = items.make([row], Order(seed), 0).batch
        item, spec = tree_flatten(batch)
        if not item or None in map(plain_dtype, item):
            msg = f"dataset[{row}]: expected plain tensors on the CPU, NumPy arrays or numbers, "
            raise TypeError(msg + f"also in dicts, lists and tuples, got {batch!r:.300}")
        if _bytes_of(probed.setdefault(row, item)) != _bytes_of(item):
            msg = f"dataset[{row}]: is random: two reads of it differ, so it cannot be read once"
            raise ValueError(msg)
    return probed, spec


def _bytes_of(rows: Iterable[Tensor]) -> list[bytes]:
    return [row.contiguous().view(torch.uint8).numpy().tobytes() for row in rows]


def _kinds_of(rows: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return dtypes, None for anything but plain tensors, and shapes of rows."""
    return [(plain_dtype(row), *getattr(row, "shape", ())[1:]) for row in rows]


def _fill(dataset: Any, first: _Columns, spec: TreeSpec, columns: _Columns, **workers: Any) -> None:
    """Read all items into the columns."""
    size = min(_CHUNK_ROWS, _CHUNK_NBYTES // max(1, sum(row.nbytes for row in first))) or 1
    loader: DataLoader[Any] = DataLoader(dataset, size, **workers)
    for begin, batch in zip(range(0, len(columns[0]), size), loader, strict=True):
        parts, structure = tree_flatten(batch)
        if structure != spec or _kinds_of(parts) != _kinds_of(first):
            msg = f"dataset[{begin}:{begin + size}]: expected structure, dtypes and shapes of "
            raise TypeError(msg + f"dataset[0], {_kinds_of(first)}, got {batch!r:.300}")
        for column, part in zip(columns, parts, strict=True):
            column[begin : begin + size] = part


def _write(folder: Path, length: int, first: _Columns, fill: Callable[[_Columns], None]) -> None:
    """Write the folder under another name and rename it."""
    dtypes = [row.numpy().dtype for row in first]  # or NumPy has none, and raises
    folder.parent.mkdir(parents=True, exist_ok=True)
    nbytes = length * sum(row.nbytes for row in first)
    if nbytes > shutil.disk_usage(folder.parent).free:  # to write beyond it would end the process
        raise OSError(errno.ENOSPC, f"no space for {nbytes:,} bytes", str(folder))
    with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as outer:
        part = Path(outer) / folder.name
        part.mkdir()
        files = [
            open_memmap(part / f"{i}.npy", "w+", dtype, (length, *row.shape[1:]))
            for i, (row, dtype) in enumerate(zip(first, dtypes, strict=True))
        ]
        fill([*map(torch.from_numpy, files)])
        for file in files:
            file.flush()
        part.rename(folder)


def _map(folder: Path, length: int, probed: dict[int, _Columns]) -> _Columns:
    """Map the columns of a folder, or raise a ValueError if they are not those of the dataset."""
    first = probed[0]
    files = (np.load(folder / f"{i}.npy", mmap_mode="c") for i in range(len(first)))
    columns = [*map(torch.from_numpy, files)]
    kinds = [*map(len, columns)], _kinds_of(columns)
    parts = {row: _bytes_of(column[row : row + 1] for column in columns) for row in probed}
    unequal = [row for row, item in probed.items() if parts[row] != _bytes_of(item)]
    if unequal or kinds != ([length] * len(first), _kinds_of(first)):
        msg = f"{folder}: is not of this dataset: it holds {kinds}; items {unequal} differ; "
        raise ValueError(msg + "remove it, or give another path")
    return columns
