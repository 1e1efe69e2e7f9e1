"""How the items of a dataset become rows of columns, and what is refused: what varies, for one."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_unflatten,
)

from fastamp.data.collate import BatchCollator
from fastamp.data.columns import plain_dtype, torch_dtype
from fastamp.data.datasets import ArrayDataset
from fastamp.data.sources import find_columns

Chunk: TypeAlias = tuple[int, list[Tensor]]
"""The first row, and some rows of each column."""


@dataclass
class _Kind:
    """What a leaf is in all items. No tuple: those are containers."""

    name: str
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.name + (f" of {self.dtype}, shape {tuple(self.shape)}" if self.dtype else "")


class Layout(NamedTuple):
    """How items become rows of columns, one for each leaf."""

    like: Any
    """An item, with what each leaf is in its place. A TreeSpec warns where it is unpickled."""
    rows: list[tuple[tuple[int, ...], torch.dtype]]
    """The shape and the dtype of a row of each column."""

    @property
    def kinds(self) -> dict[str, _Kind]:
        """What each leaf is, by its place in an item, such as "[0]['x']"."""
        return {keystr(path): kind for path, kind in tree_flatten_with_path(self.like)[0]}

    @property
    def row_nbytes(self) -> int:
        """The bytes of a row of all columns."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.rows)

    def collate(self, rows: Sequence[int], items: list[Any]) -> list[Tensor]:
        """Return the items as rows of each column, or raise a TypeError that names an item."""
        for row, item in zip(rows, items, strict=True):
            if not _fits(item, self.like):
                self._check(row, item)
        return tree_leaves(BatchCollator()(items))

    def _check(self, row: int, item: Any) -> None:
        kinds, firsts = _find_kinds(row, item), self.kinds
        for name in {**firsts, **kinds}:
            here, first = kinds.get(name, "missing"), firsts.get(name, "missing")
            if here != first:
                msg = f"dataset[{row}]{name}: is {here}, in dataset[0] {first}"
                raise TypeError(msg)
        if tree_flatten(item)[1] != tree_flatten(self.like)[1]:
            msg = f"dataset[{row}]: has other containers, or another order, than dataset[0]"
            raise TypeError(msg)


def _fits(item: Any, expected: Any) -> bool:
    """Say whether an item is as expected; False also for containers that take longer to check."""
    kind = type(expected)
    if kind is _Kind:
        return bool(_find_kind(item) == expected)
    if type(item) is not kind:
        return False
    if kind is dict:
        same = [*item] == [*expected]
        return same and all(map(_fits, item.values(), expected.values()))
    return kind in (list, tuple) and len(item) == len(expected) and all(map(_fits, item, expected))


def _find_kind(leaf: Any) -> _Kind | None:
    """Return what a leaf is; None if it cannot be kept."""
    kind = type(leaf)
    if kind in (bool, int, float):
        return _Kind(kind.__name__)
    if isinstance(leaf, np.number | np.bool_):
        dtype = torch_dtype(leaf.dtype)
        return None if dtype is None else _Kind("NumPy scalar", dtype)
    dtype = plain_dtype(leaf) if kind in (Tensor, np.ndarray, np.memmap) else None
    name = "tensor" if kind is Tensor else "array"
    return None if dtype is None else _Kind(name, dtype, leaf.shape)


def _find_kinds(row: int, item: Any) -> dict[str, _Kind]:
    """Return what each leaf is, or raise a TypeError that names one that cannot be kept."""
    kinds = {}
    for path, leaf in tree_flatten_with_path(item)[0]:
        kind = _find_kind(leaf)
        if kind is None:
            got = type(leaf).__name__ + (f" of {leaf.dtype}" if hasattr(leaf, "dtype") else "")
            if isinstance(leaf, Tensor):
                got += f" on {leaf.device}, {leaf.layout}" + ", requires_grad" * leaf.requires_grad
            msg = f"dataset[{row}]{keystr(path)}: expected a plain tensor on the CPU, a NumPy array"
            msg += f" or a number, got {got}"
            raise TypeError(msg)
        kinds[keystr(path)] = kind
    return kinds


def read_layout(first: Any) -> Layout:
    """Return the layout of the first item, or raise a TypeError if it cannot be gathered."""
    kinds = _find_kinds(0, first)
    batch = BatchCollator()([first]) if kinds else None
    columns = tree_leaves(batch)
    gatherable = find_columns(assemble(columns, first)) if kinds else None
    made = None if gatherable is None else gatherable.build(columns)
    if made is None or tree_flatten(made)[1] != tree_flatten(batch)[1]:
        got = type(first).__name__ + (f" with the leaves {', '.join(kinds)}" if kinds else "")
        msg = f"dataset[0]: expected numbers in dicts, lists and tuples, or a bare one, got {got}"
        raise TypeError(msg)
    like = tree_unflatten(kinds.values(), tree_flatten(first)[1])
    return Layout(like, [(tuple(c.shape[1:]), c.dtype) for c in columns])


def assemble(columns: list[Tensor], like: Any) -> Any:
    """Return the dataset of the columns, whose items have the containers of this one."""
    tree = tree_unflatten(columns, tree_flatten(like)[1])
    if isinstance(tree, Tensor):
        return tree
    return ArrayDataset(*tree) if type(tree) in (tuple, list) else ArrayDataset(tree)


def as_bytes(column: Tensor) -> Any:
    """Return the memory of a column as uint8, with one more dimension."""
    return column.contiguous().unsqueeze(-1).view(torch.uint8).numpy()


def hash_rows(columns: list[Tensor]) -> str:
    """Return a hash of the bits of some rows."""
    return hashlib.sha256(b"".join(as_bytes(column).tobytes() for column in columns)).hexdigest()
