"""A folder of the items of a dataset: a `.npy` file for each leaf, and `layout.json`.

The layout says what the folder was made of. A folder is written under another name and renamed, so
it is whole or not there. Nothing here writes into one again: only the user knows whether the old
items are still wanted.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from fastamp._files import create, sync
from fastamp.data.item_layout import Chunk, Layout, as_bytes, hash_rows

_VERSION = 1


def describe(
    dataset: Any, layout: Layout, known: dict[int, str], key: str | None
) -> dict[str, Any]:
    """Return what layout.json says."""
    leaves = [
        {"name": name, "file": f"{place}.npy", "dtype": str(dtype), "shape": [*shape]}
        for place, (name, (shape, dtype)) in enumerate(zip(layout.kinds, layout.rows, strict=True))
    ]
    named = {"version": _VERSION, "class": type(dataset).__qualname__, "key": key}
    hashes = {str(row): found for row, found in known.items()}
    return {**named, "length": len(dataset), "leaves": leaves, "items": hashes}


def _stored(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and dtype in a file: bytes for dtypes that NumPy lacks."""
    try:
        return shape, torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return (*shape, dtype.itemsize), np.dtype(np.uint8)


def write(
    folder: Path,
    record: dict[str, Any],
    layout: Layout,
    chunks: Iterator[Chunk],
) -> None:
    """Write the folder under another name and rename it."""
    part = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    part.mkdir()
    try:
        with ExitStack() as stack:
            files = []
            for leaf, (shape, dtype) in zip(record["leaves"], layout.rows, strict=True):
                files.append(stack.enter_context(create(part / leaf["file"])))
                stored, kind = _stored((record["length"], *shape), dtype)
                header = {"descr": npy.dtype_to_descr(kind), "fortran_order": False}
                npy.write_array_header_1_0(files[-1], {**header, "shape": stored})
            for _, parts in chunks:
                for file, rows in zip(files, parts, strict=True):
                    file.write(as_bytes(rows))
        with create(part / "layout.json") as file:
            file.write(json.dumps(record, indent=1).encode())
        sync(part)
        part.replace(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def map_columns(
    folder: Path, record: dict[str, Any], layout: Layout, known: dict[int, str]
) -> list[Tensor]:
    """Map the columns of a folder, or raise a ValueError if it was not made of this dataset."""
    file, hint = folder / "layout.json", "remove the folder, or give another path"
    try:
        found = dict(json.loads(file.read_bytes()))
    except (FileNotFoundError, NotADirectoryError, TypeError, ValueError) as error:
        msg = f"{file}: expected a folder that fastamp.in_memory has made, or none; {hint}"
        raise ValueError(msg) from error
    for name, value in record.items():
        if found.get(name) != value:
            old, new = (shorten(json.dumps(each), 300) for each in (found.get(name), value))
            msg = f"{file}: has {name} {old}, this dataset {new}; {hint}"
            raise ValueError(msg)
    columns = []
    for leaf, (shape, dtype) in zip(record["leaves"], layout.rows, strict=True):
        file, like = folder / leaf["file"], _stored((record["length"], *shape), dtype)
        try:
            array = np.load(file, mmap_mode="c")
        except (OSError, ValueError, EOFError) as error:
            msg = f"{file}: cannot be mapped: {error}; {hint}"
            raise ValueError(msg) from error
        if (array.shape, array.dtype) != like:
            msg = f"{file}: is {array.dtype} of shape {array.shape}, expected {like}; {hint}"
            raise ValueError(msg)
        columns.append(torch.from_numpy(array).view(dtype).view(record["length"], *shape))
    for row, expected in known.items():
        if hash_rows([column[row : row + 1] for column in columns]) != expected:
            msg = f"{folder}: is damaged: its row {row} is not dataset[{row}]; {hint}"
            raise ValueError(msg)
    return columns
