"""`fastamp.in_memory`: a dataset whose items are read once, and gathered from then on.

With a path the columns lie in a folder: a `.npy` file for each leaf of an item, and `layout.json`,
which says which dataset they are of. The folder is written under another name and renamed.
"""

import errno
import json
import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib import format as npy
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.data import Dataset, IterableDataset, default_collate

from fastamp._files import create
from fastamp.data.arrays import as_tensor, plain_dtype, torch_dtype
from fastamp.data.datasets import ArrayDataset, by_name
from fastamp.data.items import Items, hand_on
from fastamp.data.loader import DataLoader
from fastamp.data.sample_rng import Order, generators_kept
from fastamp.data.sources import find_columns

_CHUNK_ROWS, _CHUNK_NBYTES = 1024, 1 << 20  # few: a worker hands chunks on in /dev/shm
_PROBED, _PROBES = 8, 4  # items that are read again, and how often


def in_memory(
    dataset: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    num_workers: int = 0,
    worker: str | None = None,
) -> Any:
    """Read every item of a deterministic dataset once; return a dataset that is gathered.

    For a map-style dataset whose items are tensors on the CPU, NumPy arrays and numbers, alone or
    nested in dicts, lists and tuples, of the same structure, shapes and dtypes in all items.
    Batches of the result are bit-identical to those of torch's DataLoader over `dataset`. Its items
    are equal up to collation: arrays and numbers are tensors, and an outermost list is a tuple.

    Eight items are read four times each first, under 32 different seeds, and must be equal: a
    dataset that is rarely random is not noticed. The program's random generators are left as they
    were. What a loader gathers already is returned unchanged if there is no `path`.

    Args:
        dataset: the dataset, with `__getitem__` and `__len__`.
        path: a folder for the items, which is made; None keeps them in memory. If the folder is
            there, it is mapped: its length, layout, class name and the eight items must be the
            dataset's; name the version of your data in the path, for what these do not show. What
            the program writes into the mapped tensors stays in its memory. Over ranks, let one rank
            call before the others.
        num_workers: processes or threads that read the items; 0 reads them in this thread.
        worker: None or "process" for torch's worker processes, or "thread" for threads.

    Returns:
        An `ArrayDataset` of tensors, or one tensor if the items are bare leaves.

    Raises:
        TypeError: `dataset` is not map-style, or an item is not as described above, or not as item
            0 (the message names its index).
        ValueError: the dataset is empty or random, or the folder was not made of this dataset.
        OSError: the folder cannot be written, or its disk is too small.

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
    columns = find_columns(dataset) if path is None else ""
    if not isinstance(columns, str) and columns.then is None:
        return dataset
    if not len(dataset):
        msg = "dataset: expected at least one item, got an empty dataset"
        raise ValueError(msg)
    with generators_kept():
        items = _Items(dataset)
        probed = _probe(items)
        if path is None:
            arrays = [np.empty((len(items), *a.shape[1:]), a.dtype) for a in items.arrays]
            _fill(arrays, items, num_workers, worker)
            return items.assemble(arrays)
        folder = Path(path).expanduser().absolute()
        record = {"class": kind, "length": len(items), "item": items.layout}
        if not folder.exists():
            _write(folder, record, items, num_workers, worker)
        arrays = _map(folder, record, len(items.first))
    for row, item in probed.items():
        if not _are_equal(item, [array[row : row + 1] for array in arrays]):
            msg = f"{folder}: is not of this dataset: row {row} is not dataset[{row}]; remove it"
            raise ValueError(msg)
    return items.assemble(arrays)


class _Items(Dataset[Any]):
    """The leaves of a dataset's items. Each item has to be like the first one."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        item = Items(dataset, hand_on, single=True).make(0, Order(0), 0).batch
        leaves, self._spec = _flatten(item)
        self._kinds = [*map(_find_kind, leaves)]
        if None in self._kinds or not leaves:
            msg = "dataset[0]: expected plain tensors on the CPU, NumPy arrays or numbers, also in "
            raise TypeError(msg + f"dicts, lists and tuples, got {item!r:.300}")
        self.first = stack([self._check(0, item)])
        self.arrays = [*map(_as_array, self.first)]
        names = [f"{column.dtype} {list(column.shape[1:])}" for column in self.first]
        self.layout = str(tree_unflatten(names, self._spec))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> list[Any]:
        return self._check(index, self.dataset[index])

    def _check(self, index: int, item: Any) -> list[Any]:
        """Return the leaves of an item, or raise a TypeError that names it."""
        leaves, spec = _flatten(item)
        if spec != self._spec or [*map(_find_kind, leaves)] != self._kinds:
            msg = f"dataset[{index}]: expected containers, types, dtypes and shapes of dataset[0]"
            raise TypeError(msg + f", {self._kinds}, got {item!r:.300}")
        return [as_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]

    def assemble(self, arrays: list[npt.NDArray[Any]]) -> Any:
        """Return the dataset of the columns."""
        columns = [
            torch.from_numpy(array).view(row.dtype).view(len(array), *row.shape[1:])
            for array, row in zip(arrays, self.first, strict=True)
        ]
        tree = tree_unflatten(columns, self._spec)
        if isinstance(tree, Tensor):
            return tree
        dataset = ArrayDataset(columns[0])
        dataset.arrays = tree if isinstance(tree, dict) else tuple(tree)
        return dataset


def _flatten(item: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of an item, where all but plain dicts, lists and tuples is a leaf."""
    return tree_flatten(item, lambda part: type(part) not in (dict, list, tuple))


def _find_kind(leaf: Any) -> tuple[str, Any, tuple[int, ...]] | None:
    """Return type, dtype and shape of a number or a plain array; None for anything else."""
    kind, name = type(leaf), type(leaf).__name__
    if kind in (bool, int, float):
        return name, name, ()
    is_array = kind in (Tensor, np.ndarray, np.memmap)
    is_number = isinstance(leaf, np.number | np.bool_)
    dtype = plain_dtype(leaf) if is_array else torch_dtype(leaf.dtype) if is_number else None
    return None if dtype is None else (name, dtype, tuple(leaf.shape))


def stack(items: list[list[Any]]) -> list[Tensor]:
    """Return the leaves of items as rows of columns, as default_collate makes them."""
    return [default_collate([*leaves]) for leaves in zip(*items, strict=True)]


def _probe(items: _Items) -> dict[int, list[npt.NDArray[Any]]]:
    """Return some items, or raise a ValueError if one is random: each read has its own seed."""
    last = len(items) - 1
    probed: dict[int, list[npt.NDArray[Any]]] = {}
    rows = sorted({0, min(1, last), *(last * part // (_PROBED - 2) for part in range(_PROBED - 1))})
    for seed, row in enumerate(rows * _PROBES):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - what datasets draw from
        torch.default_generator.manual_seed(seed)
        item = Items(items, hand_on, single=True).make(row, Order(seed), 0).batch
        arrays = [*map(_as_array, stack([item]))]
        if not _are_equal(probed.setdefault(row, arrays), arrays):
            msg = f"dataset[{row}]: is random: two reads of it differ, so it cannot be read once"
            raise ValueError(msg)
    return probed


def _are_equal(one: list[npt.NDArray[Any]], other: list[npt.NDArray[Any]]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def _as_array(rows: Tensor) -> npt.NDArray[Any]:
    """Return rows as an array; as bytes if NumPy does not have their dtype."""
    try:
        return rows.contiguous().numpy()
    except TypeError:
        return rows.contiguous().unsqueeze(-1).view(torch.uint8).numpy()


def _fill(
    arrays: Sequence[npt.NDArray[Any]], items: _Items, num_workers: int, worker: str | None
) -> None:
    """Read all items into the columns."""
    row_nbytes = sum(array.nbytes for array in items.arrays)
    size = max(1, min(_CHUNK_ROWS, _CHUNK_NBYTES // max(1, row_nbytes)))
    options: Any = {"num_workers": num_workers, "worker": worker, "collate_fn": stack}
    begins = range(0, len(items), size)
    for begin, parts in zip(begins, DataLoader(items, size, **options), strict=True):
        for array, part in zip(arrays, map(_as_array, parts), strict=True):
            array[begin : begin + size] = part


def _write(folder: Path, record: dict[str, Any], items: _Items, *workers: Any) -> None:
    """Write the folder under another name and rename it, unless another process was faster."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    nbytes = len(items) * sum(array.nbytes for array in items.arrays)
    if nbytes > shutil.disk_usage(folder.parent).free:  # to write beyond it would end the process
        raise OSError(errno.ENOSPC, f"no space for {nbytes:,} bytes", str(folder))
    with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as outer:
        part = Path(outer) / folder.name
        part.mkdir()
        files = [
            npy.open_memmap(part / f"{place}.npy", "w+", row.dtype, (len(items), *row.shape[1:]))
            for place, row in enumerate(items.arrays)
        ]
        _fill(files, items, *workers)
        for file in files:
            file.flush()
        with create(part / "layout.json") as record_file:
            record_file.write(json.dumps(record, indent=1).encode())
        try:
            part.rename(folder)
        except OSError:
            if not folder.exists():
                raise


def _map(folder: Path, record: dict[str, Any], count: int) -> list[npt.NDArray[Any]]:
    """Map the columns of a folder, or raise a ValueError if it was not made of this dataset."""
    try:
        found = json.loads((folder / "layout.json").read_bytes())
        if found == record:
            return [np.load(folder / f"{place}.npy", mmap_mode="c") for place in range(count)]
    except (OSError, ValueError) as error:
        found = error
    msg = f"{folder}: expected a folder that fastamp.in_memory made of {record}, got {found}: "
    raise ValueError(msg + "remove it, or give another path")
