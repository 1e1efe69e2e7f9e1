"""Arrays whose rows become the rows of batches: what a loader gathers instead of reading items."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import default_collate

from fastamp.data.sample_rng import Keys

_KINDS = (Tensor, np.ndarray, np.memmap)


@dataclass
class Columns:
    """The arrays of a dataset, and how a batch is made of their rows."""

    arrays: list[Tensor]
    """Rows along the first dimension; they may overlap. Never written into: see `as_tensor`."""
    dtypes: list[torch.dtype]
    """Of the batch: each array's own, or one that its rows are converted to."""
    build: Callable[[list[Tensor]], Any]
    """Makes the batch, as default_collate would, of one tensor for each array."""
    rows: Tensor | None = None
    """For a subset: the row of each index, int64."""
    starts: Callable[[Keys], Tensor] | None = None
    """Returns the rows to gather, drawn for the keys of the samples; `rows` do not count."""
    then: Callable[[list[Tensor], Keys], list[Tensor]] | None = None
    """Changes the gathered tensors, on their device."""


def columns_of(tree: Any) -> Columns | str:
    """Return the columns of arrays in dicts, lists and tuples; a string says why there are none."""
    leaves = tree_leaves(tree)
    arrays = [array for array in map(_as_column, leaves) if array is not None]
    if not leaves or len(arrays) < len(leaves) or len({array.device for array in arrays}) > 1:
        return f"the {type(tree).__name__} holds more than plain arrays in one place"
    build: Callable[[list[Tensor]], Any] = list
    if isinstance(tree, _KINDS):
        build = itemgetter(0)
    elif type(tree) is not tuple or not all(type(part) in _KINDS for part in tree):
        batch = default_collate([tree_map(lambda _: 0, tree)])  # which makes a list of a tuple
        build = partial(tree_unflatten, treespec=tree_flatten(batch)[1])
    return Columns(arrays, [array.dtype for array in arrays], build)


def _as_column(array: Any) -> Tensor | None:
    """Return an array as a tensor of the same memory; None if a loader has to read its items."""
    dtype = plain_dtype(array, on_host=False) if type(array) in _KINDS else None
    if dtype is None or array.ndim == 0:
        return None
    if isinstance(array, Tensor):
        return array
    with suppress(TypeError, ValueError):  # negative strides; what default_collate refuses
        like = default_collate([np.ones((1, *array.shape[1:]), array.dtype)[0]])
        return as_tensor(array) if like.dtype == dtype else None
    return None


def as_tensor(array: Any) -> Tensor:
    """Return a tensor of an array's memory. One of a read-only array must not be written into."""
    if not array.flags.writeable:  # torch would warn
        memory = {**array.__array_interface__, "data": (array.ctypes.data, False)}
        array = np.asarray(SimpleNamespace(array=array, __array_interface__=memory))
    return torch.from_numpy(array)


@cache
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """Return torch's name for a dtype of NumPy, or None where torch has none."""
    with suppress(TypeError, ValueError):
        return torch.from_numpy(np.empty(0, dtype)).dtype
    return None


def plain_dtype(array: Any, *, on_host: bool = True) -> torch.dtype | None:
    """Return torch's dtype of an array in plain memory, `on_host` only on the CPU; else None."""
    if isinstance(array, np.ndarray):
        return torch_dtype(array.dtype)
    if type(array) is not Tensor or array.layout is not torch.strided or array.is_nested:
        return None
    elsewhere = array.is_meta or (on_host and array.device.type != "cpu")
    odd = array.is_quantized or array.is_conj() or array.is_neg() or array._is_zerotensor()
    return None if elsewhere or odd or array.requires_grad else array.dtype


def in_row_order(columns: Columns, max_bytes: int) -> Columns:
    """Copy arrays whose numbers of a row lie apart, as in a table stored column by column.

    Of windows, whose first two dimensions overlap, the memory that they look into is copied, once.
    What takes more than `max_bytes` in all, or more than its own memory, stays as it is.
    """
    arrays = []
    for array in columns.arrays:
        rows, step = array, 0
        if array.ndim > 2 and 0 < array.stride(0) < array.stride(1) * array.shape[1]:
            step, apart = divmod(array.stride(0), array.stride(1))
            length = (len(array) - 1) * step + array.shape[1]
            if not apart:
                rows = array.as_strided((length, *array.shape[2:]), array.stride()[1:])
        if not array[:1].is_contiguous() and rows.nbytes <= min(
            max_bytes, array.untyped_storage().nbytes()
        ):
            max_bytes -= rows.nbytes
            copied = rows.contiguous()
            steps = (step * copied.stride(0), *copied.stride())
            array = copied if rows is array else copied.as_strided(array.shape, steps)  # noqa: PLW2901
        arrays.append(array)
    return replace(columns, arrays=arrays)
