"""`fastamp.in_memory`: a dataset whose items are read once, and gathered from then on."""

import os
import random
import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from filelock import FileLock
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset

from fastamp._progress import progress
from fastamp.data.checks import as_integer, check_worker
from fastamp.data.datasets import by_name
from fastamp.data.item_folder import describe, map_columns, write
from fastamp.data.item_layout import Chunk, Layout, assemble, hash_rows, read_layout
from fastamp.data.items import find_together, hand_on, note_index
from fastamp.data.loader import DataLoader
from fastamp.data.sample_rng import generators_kept
from fastamp.data.sources import find_columns

_CHUNK_ROWS, _CHUNK_NBYTES = 1024, 1 << 20  # few: a worker hands chunks on in /dev/shm


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

    For a map-style dataset whose `__getitem__` gives the same item each time. Its items are tensors
    on the CPU, NumPy arrays and numbers, alone or in dicts, lists and tuples, nested or not. All
    items have the same structure, shapes and dtypes. Batches of the result are bit-identical to
    those of torch's DataLoader over `dataset` with `default_collate`. Its items are equal up to
    collation: arrays and numbers are tensors (an int is a 0-dim int64 tensor, a float float64, a
    bool torch.bool), and an outermost list is a tuple.

    1. Item 0 is read. From it follow the layout, and the size of all items.
    2. Items 0, 1, the middle one and the last are read twice, under different seeds. They must be
       equal. This is a probe: a dataset that is random elsewhere is not noticed.
    3. All items are read, with a progress bar if stderr is a terminal and tqdm is installed.

    The program's random generators are left as they were. A dataset that fastamp.DataLoader gathers
    as it is, such as a TensorDataset, is returned unchanged if there is no `path`.

    Args:
        dataset: the dataset, with `__getitem__` and `__len__`.
        path: a folder for the items, which is made; None keeps them in memory. If the folder is
            there, it is mapped, not read, after steps 1 and 2: its length, layout, class name, key
            and the hashes of the items of step 2 must be the dataset's. What the program writes
            into the mapped tensors stays in its memory. Processes that make the same folder wait
            for the first, by a lock on a file beside it, `.NAME.lock`. With torch.distributed, rank
            0 makes the folder, and the process group's timeout must be long enough for that. Every
            rank has to call, and an error of one is raised on all.
        num_workers: processes or threads that read the items; 0 reads them in this thread.
        worker: None or "process" for torch's worker processes, or "thread" for threads.
        max_bytes: the most bytes that the items may take. None is half of the free memory; with a
            `path`, whose free disk space is a limit in any case, no other limit.
        key: names the version of the data in the folder, for what the hashes do not show.

    Returns:
        An `ArrayDataset` of tensors, or one tensor if the items are bare leaves.

    Raises:
        TypeError: `dataset` is not map-style; a leaf is not of these kinds, or differs in shape or
            dtype from item 0 (the message names item and leaf); or the items' containers are such
            that batches could not equal those of `default_collate`.
        ValueError: the dataset is empty, is random, or takes more than `max_bytes` or the free
            disk; or the folder was not made of this dataset (the message names the file).
        OSError: the folder cannot be written.
        RuntimeError: another rank has failed.

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
    folder = None if path is None else Path(path).absolute()
    if folder is None and find_columns(dataset) is not None:
        return dataset

    def make() -> Any:
        with generators_kept():
            return _make(dataset, folder, (num_workers, worker), max_bytes, key)

    over_ranks = folder is not None and dist.is_available() and dist.is_initialized()
    return _in_turns(make) if over_ranks else make()


def _make(
    dataset: Any,
    folder: Path | None,
    workers: tuple[int, str | None],
    max_bytes: int | None,
    key: str | None,
) -> Any:
    length = len(dataset)
    if length == 0:
        msg = "dataset: expected at least one item, got an empty dataset"
        raise ValueError(msg)
    _seed(0)
    layout = read_layout(_read_items(dataset, [0])[0])
    is_made = folder is not None and folder.exists()
    if not is_made:
        _check_size(length * layout.row_nbytes, max_bytes, folder)
    known = _probe(dataset, layout, sorted({0, min(1, length - 1), length // 2, length - 1}))
    read = _read(_Chunks(dataset, layout), length, workers)
    with closing(_follow(read, length, known)) as chunks:
        if folder is None:
            columns = [torch.empty((length, *shape), dtype=dtype) for shape, dtype in layout.rows]
            for begin, parts in chunks:
                for column, part in zip(columns, parts, strict=True):
                    column[begin : begin + len(part)] = part
            return assemble(columns, layout.like)
        record = describe(dataset, layout, known, key)
        if not is_made:
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock = folder.with_name(f".{folder.name}.lock")
            with FileLock(lock, preserve_lock_file=True):  # one that goes could be locked twice
                if not folder.exists():
                    write(folder, record, layout, chunks)
    return assemble(map_columns(folder, record, layout, known), layout.like)


def _check_size(nbytes: int, max_bytes: int | None, folder: Path | None) -> None:
    """Raise a ValueError if the items take too much."""
    limits = {} if max_bytes is None else {f"max_bytes={max_bytes}": max_bytes}
    if folder is not None:
        there = next(parent for parent in folder.parents if parent.exists())
        limits[f"what is free in {there}"] = shutil.disk_usage(there).free
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
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # macOS tells no more


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - what datasets draw from
    torch.default_generator.manual_seed(seed)


def _probe(dataset: Any, layout: Layout, rows: list[int]) -> dict[int, str]:
    """Return the hash of each of these items, or raise a ValueError if one is random."""
    known: dict[int, str] = {}
    for seed, row in ((seed, row) for seed in (0, 1) for row in rows):
        _seed(seed)
        found = hash_rows(layout.collate([row], _read_items(dataset, [row])))
        if known.setdefault(row, found) != found:
            raise _is_random(row)
    return known


def _is_random(row: int) -> ValueError:
    msg = f"dataset[{row}]: is random: two reads of it differ, so that it cannot be read once"
    return ValueError(msg)


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
    """The chunks of a dataset, made in the process that reads their items."""

    def __init__(self, dataset: Any, layout: Layout) -> None:
        self._dataset, self._layout = dataset, layout

    @property
    def size(self) -> int:
        return max(1, min(_CHUNK_ROWS, _CHUNK_NBYTES // max(1, self._layout.row_nbytes)))

    def __getitem__(self, rows: range) -> Chunk:
        return rows.start, self._layout.collate(rows, _read_items(self._dataset, rows))


def _read(
    chunks: _Chunks, length: int, workers: tuple[int, str | None]
) -> Generator[Chunk, None, None]:
    """Yield all chunks in order, read by this many workers of this kind."""
    num_workers, worker = workers
    size = chunks.size
    ranges = [range(begin, min(begin + size, length)) for begin in range(0, length, size)]
    kind: Any = partial(DataLoader, worker="thread") if worker == "thread" else TorchDataLoader
    yield from kind(chunks, None, sampler=ranges, num_workers=num_workers, collate_fn=hand_on)


def _follow(
    chunks: Generator[Chunk, None, None], length: int, known: dict[int, str]
) -> Generator[Chunk, None, None]:
    """Yield the chunks with a progress bar, and compare the items that are known."""
    with closing(chunks), progress(length) as tick:
        for begin, parts in chunks:
            for row, expected in known.items():
                here = [part[row - begin :][:1] for part in parts if row >= begin]
                if here and len(here[0]) and hash_rows(here) != expected:
                    raise _is_random(row)
            yield begin, parts
            tick(len(parts[0]))


def _in_turns(make: Callable[[], Any]) -> Any:
    """Call `make` on rank 0, then on the others; raise an error of one rank on all."""
    rank, made = dist.get_rank(), None
    for turn in (rank == 0, rank != 0):
        error: Exception | None = None
        texts: list[str | None] = [None] * dist.get_world_size()
        try:
            made = make() if turn else made
        except Exception as raised:  # noqa: BLE001 - raised below, on all ranks
            error = raised
        dist.all_gather_object(texts, error and f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = [f"rank {other} has failed: {text}" for other, text in enumerate(texts) if text]
        if failed:
            raise RuntimeError(failed[0])
    return made
