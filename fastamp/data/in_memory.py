"""`fastamp.in_memory`: a dataset whose items are read once, and gathered from then on.

With a path its columns lie in a folder: a `.npy` file for each leaf of an item, and `layout.json`,
which says what they were made of. The folder is written under another name and renamed, so it is
whole or not there, and nothing here writes into it again.
"""

import json
import os
import random
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from math import prod
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_map,
    tree_unflatten,
)
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from fastamp._files import create, sync
from fastamp._progress import progress
from fastamp.data.arrays import as_tensor, plain_dtype, torch_dtype
from fastamp.data.checks import as_integer, check_worker
from fastamp.data.datasets import ArrayDataset, by_name
from fastamp.data.items import find_together, note_index
from fastamp.data.loader import DataLoader
from fastamp.data.sample_rng import generators_kept
from fastamp.data.tokens import TokenDataset

_GATHERED = (Tensor, np.ndarray, np.memmap, TensorDataset, TokenDataset, ArrayDataset)
_CHUNK_ROWS, _CHUNK_NBYTES = 1024, 1 << 20  # few: a worker hands chunks on in /dev/shm
_PROBED, _PROBES = 8, 4  # items that are read again, and how often
_Workers: TypeAlias = tuple[int, str | None]  # number and kind
_RANDOM = "is random: two reads of it differ, so that it cannot be read once"
_HINT = "remove the folder, or give another path"


def in_memory(
    dataset: Any,
    path: str | os.PathLike[str] | None = None,
    *,
    num_workers: int = 0,
    worker: str | None = None,
    max_bytes: int | None = None,
    key: str | None = None,
) -> Any:
    """Read every item of a deterministic dataset once; return a dataset that is gathered.

    For a map-style dataset whose `__getitem__` gives the same item each time: tensors on the CPU,
    NumPy arrays and numbers, alone or nested in dicts, lists and tuples, of the same structure,
    shapes and dtypes in all items. Batches of the result are bit-identical to those of torch's
    DataLoader over `dataset`. Its items are equal up to collation: arrays and numbers are tensors
    (an int is a 0-dim int64 tensor), and an outermost list is a tuple.

    1. Item 0 is read. From it follow the layout, and the size of all items.
    2. Eight items are read four times each, under 32 different seeds of torch, NumPy and Python.
       They must be equal. This is a probe: a dataset that is rarely random is not noticed.
    3. All items are read, with a progress bar if stderr is a terminal and tqdm is installed.

    The program's random generators are left as they were. An ArrayDataset, TensorDataset,
    TokenDataset, array, or Subset of one is returned unchanged if there is no `path`.

    Args:
        dataset: the dataset, with `__getitem__` and `__len__`.
        path: a folder for the items, which is made; None keeps them in memory. If the folder is
            there, it is mapped, not read, after steps 1 and 2: its length, layout, class name, key
            and the items of step 2 must be the dataset's. What the program writes into the mapped
            tensors stays in its memory. If several processes make one folder at once, each reads
            all items and the first one's folder stays: let one rank call before the others.
        num_workers: processes or threads that read the items; 0 reads them in this thread.
        worker: None or "process" for torch's worker processes, or "thread" for threads.
        max_bytes: the most bytes that the items may take. None is half of the free memory; with a
            `path`, whose free disk space is a limit in any case, no other limit.
        key: names the version of the data in the folder, for what the items of step 2 do not show.

    Returns:
        An `ArrayDataset` of tensors, or one tensor if the items are bare leaves.

    Raises:
        TypeError: `dataset` is not map-style; a leaf is not of these kinds, or differs in type,
            shape or dtype from item 0 (the message names item and leaf); or batches of such
            containers could not equal those of `default_collate`.
        ValueError: the dataset is empty, is random, or takes more than `max_bytes` or the free
            disk; or the folder was not made of this dataset (the message names the file).
        OSError: the folder cannot be written.

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
    max_bytes = as_integer("max_bytes", max_bytes, least=1)
    num_workers = as_integer("num_workers", num_workers, least=0, optional=False)
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):
        kind = type(dataset).__name__
        msg = f"dataset: expected a map-style dataset, with __getitem__ and __len__, got {kind}"
        raise TypeError(msg)
    worker = check_worker(worker, dataset, None)
    if type(key) not in (str, type(None)):
        msg = f"key: expected a string or None, got {key!r}"
        raise TypeError(msg)
    dataset = by_name(dataset)
    folder = None if path is None else Path(path).expanduser().absolute()
    if folder is None and _is_gathered(dataset):
        return dataset
    if not len(dataset):
        msg = "dataset: expected at least one item, got an empty dataset"
        raise ValueError(msg)
    with generators_kept():
        return _make(dataset, folder, max_bytes, key, (num_workers, worker))


def _is_gathered(dataset: Any) -> bool:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) in _GATHERED and not getattr(dataset, "augment", ())


def _make(
    dataset: Any, folder: Path | None, max_bytes: int | None, key: str | None, workers: _Workers
) -> Any:
    length = len(dataset)
    layout = _read_layout(_read_items(dataset, [0])[0])
    record = {"version": 2, "class": type(dataset).__qualname__, "key": key, "length": length}
    record["leaves"] = [[name, _describe(kind)] for name, kind in layout.kinds.items()]
    is_made = folder is not None and folder.exists()
    if not is_made:
        _check_size(length * layout.row_nbytes, max_bytes, folder)
    probed = _probe(dataset, layout)
    chunks = _read(dataset, layout, probed, workers)
    if folder is not None:
        if not is_made:
            _write(folder, record, layout, chunks)
        return layout.assemble(_map(folder, record, layout, probed))
    columns = [torch.empty((length, *shape), dtype=dtype) for shape, dtype in layout.rows]
    for rows, parts in chunks:
        for column, part in zip(columns, parts, strict=True):
            column[rows.start : rows.stop] = part
    return layout.assemble(columns)


_Kind: TypeAlias = tuple[type, Any, tuple[int, ...]]
"""Type, dtype and shape of a leaf."""


class _Layout(NamedTuple):
    """How items become rows of columns, one for each leaf."""

    spec: TreeSpec
    kinds: dict[str, _Kind]
    """What each leaf is, by its place in an item, such as "[0]['x']"."""
    rows: list[tuple[tuple[int, ...], torch.dtype]]
    """The shape and the dtype of a row of each column."""

    @property
    def row_nbytes(self) -> int:
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.rows)

    def collate(self, rows: Sequence[int], items: list[Any]) -> list[Tensor]:
        """Return the items as rows of each column, or raise a TypeError that names an item."""
        expected, found = [*self.kinds.values()], []
        for row, item in zip(rows, items, strict=True):
            leaves, spec = tree_flatten(item)
            if [*map(_find_kind, leaves)] != expected or spec != self.spec:
                raise self._error(row, item)
            found.append(leaves)
        columns = [_collate(leaves) for leaves in zip(*found, strict=True)]
        for name, column in zip(self.kinds, columns, strict=True):
            if plain_dtype(column) is None:  # some leaf requires grad, is sparse, ...
                msg = f"dataset[{rows[0]}] to dataset[{rows[-1]}]: {name} is not always plain"
                raise TypeError(msg)
        return columns

    def _error(self, row: int, item: Any) -> TypeError:
        kinds = _find_kinds(item)
        for name in {**self.kinds, **kinds}:
            here, first = (_describe(each.get(name)) for each in (kinds, self.kinds))
            if here != first:
                return TypeError(f"dataset[{row}]{name}: is {here}, in dataset[0] {first}")
        return TypeError(f"dataset[{row}]: has other containers, or another order, than dataset[0]")

    def assemble(self, columns: list[Tensor]) -> Any:
        """Return the dataset of the columns."""
        tree = tree_unflatten(columns, self.spec)
        if isinstance(tree, Tensor):
            return tree
        return ArrayDataset(*tree) if type(tree) in (tuple, list) else ArrayDataset(tree)


def _collate(leaves: Sequence[Any]) -> Tensor:
    """Return leaves of one place as default_collate does, read-only arrays without a warning."""
    is_array = isinstance(leaves[0], np.ndarray)
    column: Tensor = default_collate([*map(as_tensor, leaves)] if is_array else [*leaves])
    return column


def _find_kind(leaf: Any) -> _Kind:
    return type(leaf), getattr(leaf, "dtype", None), getattr(leaf, "shape", ())


def _find_kinds(item: Any) -> dict[str, _Kind]:
    return {keystr(path): _find_kind(leaf) for path, leaf in tree_flatten_with_path(item)[0]}


def _describe(kind: _Kind | None) -> str:
    if kind is None:
        return "missing"
    return kind[0].__name__ + (f" of {kind[1]}, shape {tuple(kind[2])}" if kind[1] else "")


def _is_plain(leaf: Any) -> bool:
    if isinstance(leaf, np.number | np.bool_):
        return torch_dtype(leaf.dtype) is not None
    if type(leaf) in (Tensor, np.ndarray, np.memmap):
        return plain_dtype(leaf) is not None
    return type(leaf) in (bool, int, float)


def _read_layout(first: Any) -> _Layout:
    """Return the layout of the first item, or raise a TypeError if it cannot be gathered."""
    for path, leaf in tree_flatten_with_path(first)[0]:
        if not _is_plain(leaf):
            got = _describe(_find_kind(leaf))
            if isinstance(leaf, Tensor):
                got += f" on {leaf.device}, {leaf.layout}" + ", requires_grad" * leaf.requires_grad
            msg = f"dataset[0]{keystr(path)}: expected a plain tensor on the CPU, a NumPy array or "
            msg += f"a number, got {got}"
            raise TypeError(msg)
    kinds, (leaves, spec) = _find_kinds(first), tree_flatten(first)
    columns = [_collate([leaf]) for leaf in leaves]
    layout = _Layout(spec, kinds, [(tuple(column.shape[1:]), column.dtype) for column in columns])
    made = layout.assemble(columns) if kinds else None
    built: Any = made.columns() if isinstance(made, ArrayDataset) else None
    found = tree_flatten(built.build(columns) if built else made)[1]
    expected = tree_flatten(default_collate([tree_map(lambda _: 0, first)]))[1] if kinds else None
    if found != expected:
        got = type(first).__name__ + (f" with the leaves {', '.join(kinds)}" if kinds else "")
        msg = f"dataset[0]: expected numbers in dicts, lists and tuples, or a bare one, got {got}"
        raise TypeError(msg)
    return layout


def _check_size(nbytes: int, max_bytes: int | None, folder: Path | None) -> None:
    """Raise a ValueError if the items take too much."""
    limits = {} if max_bytes is None else {f"max_bytes={max_bytes}": max_bytes}
    if folder is not None:
        parent = next(parent for parent in folder.parents if parent.exists())
        limits[f"what is free in {parent}"] = shutil.disk_usage(parent).free
    elif max_bytes is None:
        limits["half of the free memory, see max_bytes"] = _free_memory() // 2
    for name, limit in limits.items():
        if nbytes > limit:
            msg = f"dataset: its items take {nbytes:,} bytes, more than {name} ({limit:,} bytes)"
            raise ValueError(msg)


def _free_memory() -> int:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable:"))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # macOS has no MemAvailable


def _probe(dataset: Any, layout: _Layout) -> dict[int, list[Tensor]]:
    """Return some items, or raise a ValueError if one is random: each read has its own seed."""
    last = len(dataset) - 1
    probed: dict[int, list[Tensor]] = {}
    rows = sorted({0, min(1, last), *(last * part // (_PROBED - 2) for part in range(_PROBED - 1))})
    for seed, row in enumerate(rows * _PROBES):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - what datasets draw from
        torch.default_generator.manual_seed(seed)
        item = layout.collate([row], _read_items(dataset, [row]))
        _check_equal(probed.setdefault(row, item), item, f"dataset[{row}]: {_RANDOM}")
    return probed


def _check_equal(one: list[Tensor], other: list[Tensor], message: str) -> None:
    """Raise a ValueError unless two items have the same bits."""
    if not all(_as_bytes(a).equal(_as_bytes(b)) for a, b in zip(one, other, strict=True)):
        raise ValueError(message)


def _as_bytes(rows: Tensor) -> Tensor:
    """Return the memory of rows as uint8, with one more dimension."""
    return rows.contiguous().unsqueeze(-1).view(torch.uint8)


def _read_items(dataset: Any, rows: Sequence[int]) -> list[Any]:
    """Return items, read as torch's loader reads them; an error says which item has raised it."""
    together = find_together(dataset)
    if together is not None:
        return list(together([*rows]))
    items = []
    for row in rows:
        try:
            items.append(dataset[row])
        except Exception as error:  # noqa: PERF203
            note_index(error, row, "fastamp.in_memory")
            raise
    return items


class _Chunks(Dataset[Any]):
    """The chunks of a dataset, made in the process or thread that reads their items."""

    def __init__(self, dataset: Any, layout: _Layout) -> None:
        self.dataset, self.layout = dataset, layout

    def __getitem__(self, rows: range) -> list[Tensor]:
        return self.layout.collate(rows, _read_items(self.dataset, rows))


def _read(
    dataset: Any, layout: _Layout, probed: dict[int, list[Tensor]], workers: _Workers
) -> Iterator[tuple[range, list[Tensor]]]:
    """Yield all items in chunks, with a progress bar; compare those that were probed."""
    length, (num_workers, worker) = len(dataset), workers
    size = max(1, min(_CHUNK_ROWS, _CHUNK_NBYTES // max(1, layout.row_nbytes)))
    ranges = [range(begin, min(begin + size, length)) for begin in range(0, length, size)]
    kind: Any = partial(DataLoader, worker="thread") if worker == "thread" else TorchDataLoader
    chunks = kind(_Chunks(dataset, layout), None, sampler=ranges, num_workers=num_workers)
    with progress(length) as tick:
        for rows, parts in zip(ranges, chunks, strict=True):
            for row in probed.keys() & {*rows}:
                item = [part[row - rows.start :][:1] for part in parts]
                _check_equal(probed[row], item, f"dataset[{row}]: {_RANDOM}")
            yield rows, parts
            tick(len(rows))


def _stored(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and dtype in a file: bytes for dtypes that NumPy lacks."""
    try:
        return shape, torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return (*shape, dtype.itemsize), np.dtype(np.uint8)


def _write(
    folder: Path,
    record: dict[str, Any],
    layout: _Layout,
    chunks: Iterator[tuple[range, list[Tensor]]],
) -> None:
    """Write the folder under another name and rename it, unless another process was faster."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    part.mkdir()
    try:
        with ExitStack() as stack:
            files = []
            for place, (shape, dtype) in enumerate(layout.rows):
                files.append(stack.enter_context(create(part / f"{place}.npy")))
                stored, kind = _stored((record["length"], *shape), dtype)
                header = {"descr": npy.dtype_to_descr(kind), "fortran_order": False}
                npy.write_array_header_1_0(files[-1], {**header, "shape": stored})
            for _, parts in chunks:
                for file, rows in zip(files, parts, strict=True):
                    file.write(memoryview(_as_bytes(rows).numpy()))  # type: ignore[arg-type]
        with create(part / "layout.json") as file:
            file.write(json.dumps(record, indent=1).encode())
        sync(part)
        try:
            part.rename(folder)
        except OSError:
            if not folder.exists():
                raise
        sync(folder.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _map(
    folder: Path, record: dict[str, Any], layout: _Layout, probed: dict[int, list[Tensor]]
) -> list[Tensor]:
    """Map the columns of a folder, or raise a ValueError if it was not made of this dataset."""
    file = folder / "layout.json"
    try:
        found = dict(json.loads(file.read_bytes()))
    except (FileNotFoundError, NotADirectoryError, TypeError, ValueError) as error:
        msg = f"{file}: expected a folder that fastamp.in_memory has made, or none; {_HINT}"
        raise ValueError(msg) from error
    for name, value in record.items():
        if found.get(name) != value:
            old, new = (shorten(json.dumps(each), 300) for each in (found.get(name), value))
            msg = f"{file}: has {name} {old}, this dataset {new}; {_HINT}"
            raise ValueError(msg)
    columns = []
    for place, (shape, dtype) in enumerate(layout.rows):
        file = folder / f"{place}.npy"
        try:
            column = torch.from_numpy(np.load(file, mmap_mode="c"))
            columns.append(column.view(dtype).view(record["length"], *shape))
        except (OSError, ValueError, EOFError, RuntimeError) as error:
            msg = f"{file}: cannot be mapped: {error}; {_HINT}"
            raise ValueError(msg) from error
    for row, item in probed.items():
        msg = f"{folder}: is of another dataset: its row {row} is not dataset[{row}]; {_HINT}"
        _check_equal(item, [column[row : row + 1] for column in columns], msg)
    return columns
