"""`fastamp.in_memory`: a dataset whose items are read once, and gathered from then on.

With a path the columns lie in a folder: a `.npy` file for each leaf of an item. The folder is
written under another name and renamed.
"""

import errno
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import IterableDataset, default_collate

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
    bit-identical to those of torch's DataLoader over `dataset`; its items are as collated.

    Eight items are read four times each first, under 32 seeds, and must be equal: a dataset that is
    rarely random is not noticed. Without a `path` a dataset that is gathered already is returned.

    Args:
        dataset: with `__getitem__` and `__len__`.
        path: a folder for the items, which is made; None keeps them in memory. If the folder is
            there, it is mapped: its length, shapes, dtypes and the eight items must be the
            dataset's; name the version of your data in the path, for what these do not show. What
            the program writes into the mapped tensors stays in its memory. Over ranks, let one rank
            call before the others. A `.npy` file cannot hold bfloat16 and 8-bit floats.
        num_workers: processes or threads that read the items; 0 reads them in this thread.
        worker: None or "process" for torch's worker processes, or "thread" for threads.

    Returns:
        An `ArrayDataset` of tensors, or one tensor if the items are bare leaves.

    Raises:
        TypeError: `dataset` is not map-style; items are not as described above, or not as item 0;
            or NumPy lacks a dtype that a folder has to hold.
        ValueError: the dataset is empty or random, or the folder was not made of this dataset.
        OSError: the folder cannot be written, as when another process has made it meanwhile, or its
            disk is too small.

    Example:
        >>> class Squares(torch.utils.data.Dataset):
        ...     def __len__(self):
        ...         return 6
        ...
        ...     def __getitem__(self, index):
        ...         return torch.full((2,), index), index * index
        >>> dataset = fastamp.in_memory(Squares(), "squares")
        >>> next(iter(fastamp.DataLoader(dataset, 3)))[1]
        tensor([0, 1, 4])
    """
    kind = type(dataset).__name__
    is_map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if isinstance(dataset, IterableDataset) or not is_map_style:
        msg = f"dataset: expected a map-style dataset, with __getitem__ and __len__, got {kind}"
        raise TypeError(msg)
    dataset = by_name(dataset)
    found = find_columns(dataset) if path is None else ""
    if not isinstance(found, str) and found.then is None:
        return dataset
    if not len(dataset):
        msg = "dataset: expected at least one item, got an empty dataset"
        raise ValueError(msg)
    with generators_kept():
        probed, spec = _probe(dataset)
        fill = partial(_fill, dataset, probed[0], spec, num_workers=num_workers, worker=worker)
        if path is None:
            columns = [row.new_empty(len(dataset), *row.shape[1:]) for row in probed[0]]
            fill(columns)
        else:
            folder = Path(path).expanduser().absolute()
            if not folder.exists():
                _write(folder, len(dataset), probed[0], fill)
            columns = _map(folder, len(dataset), probed)
    tree = tree_unflatten(columns, spec)
    if isinstance(tree, Tensor):
        return tree
    made = ArrayDataset(columns[0])
    made.arrays = tuple(tree) if type(tree) is list else tree
    return made


def _probe(dataset: Any) -> tuple[dict[int, _Columns], TreeSpec]:
    """Return some items as batches of one, each read with several seeds, and their structure."""
    last, probed = len(dataset) - 1, dict[int, _Columns]()
    rows = sorted({0, min(1, last), *(last * part // (_PROBED - 2) for part in range(_PROBED - 1))})
    items = Items(dataset, default_collate, single=False)
    for seed, row in enumerate(rows * _PROBES):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - what datasets draw from
        torch.default_generator.manual_seed(seed)
        batch = items.make([row], Order(seed), 0).batch
        item = tree_leaves(batch)
        if not item or None in map(plain_dtype, item):
            msg = f"dataset[{row}]: expected plain tensors on the CPU, NumPy arrays or numbers, "
            raise TypeError(msg + f"also in dicts, lists and tuples, got {batch!r:.300}")
        if not _are_equal(probed.setdefault(row, item), item):
            msg = f"dataset[{row}]: is random: two reads of it differ, so it cannot be read once"
            raise ValueError(msg)
        if not seed:
            spec = tree_flatten(batch)[1]
    return probed, spec


def _are_equal(one: _Columns, other: _Columns) -> bool:
    return all(map(torch.equal, map(_bits_of, one), map(_bits_of, other)))


def _bits_of(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)


def _fill(dataset: Any, first: _Columns, spec: TreeSpec, columns: _Columns, **workers: Any) -> None:
    """Read all items into the columns."""
    row_nbytes, kinds = sum(row.nbytes for row in first), [*map(_kind_of, first)]
    size = max(1, min(_CHUNK_ROWS, _CHUNK_NBYTES // max(1, row_nbytes)))
    loader: DataLoader[Any] = DataLoader(dataset, size, **workers)
    for begin, batch in zip(range(0, len(dataset), size), loader, strict=True):
        parts, found = tree_flatten(batch)
        if found != spec or [*map(_kind_of, parts)] != kinds:
            msg = f"dataset[{begin}:{begin + size}]: expected structure, dtypes and shapes of "
            raise TypeError(msg + f"dataset[0], {kinds}, got {batch!r:.300}")
        for column, part in zip(columns, parts, strict=True):
            column[begin : begin + size] = part


def _kind_of(rows: Any) -> tuple[Any, ...]:
    """Return dtype and shape of rows; nothing of anything but plain tensors."""
    dtype = plain_dtype(rows)
    return () if dtype is None else (dtype, *rows.shape[1:])


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
    try:
        files = (np.load(folder / f"{i}.npy", mmap_mode="c") for i in range(len(first)))
        columns = [*map(torch.from_numpy, files)]
        kinds = [(len(column), *_kind_of(column)) for column in columns]
        if kinds != [(length, *_kind_of(row)) for row in first]:
            msg = f"it holds {kinds}"
            raise ValueError(msg)  # noqa: TRY301 - as what NumPy raises
        for row, item in probed.items():
            if not _are_equal(item, [column[row : row + 1] for column in columns]):
                msg = f"row {row} is not dataset[{row}]"
                raise ValueError(msg)  # noqa: TRY301
    except (OSError, ValueError) as error:
        msg = f"{folder}: is not of this dataset: {error}; remove it, or give another path"
        raise ValueError(msg) from error
    return columns
