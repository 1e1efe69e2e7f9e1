"""What a batch may be: tensors in nested dicts, lists, tuples, namedtuples and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["count_nbytes", "map_tensors"]


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:  # noqa: PLR0911 - kinds
    """Return the batch with every tensor replaced; types and everything else stay."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        mapped = {key: map_tensors(function, value) for key, value in batch.items()}
        if isinstance(batch, MutableMapping):  # it may have more than its items
            clone = copy.copy(batch)
            clone.update(mapped)
            return clone
        return type(batch)(mapped)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(function, value) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        made = copy.copy(batch)
        for field in dataclasses.fields(batch):
            value = map_tensors(function, getattr(batch, field.name))
            object.__setattr__(made, field.name, value)  # also where it is frozen
        return made
    return batch


def count_nbytes(batch: Any) -> int:
    """Return the bytes of all tensors in a batch."""
    total = 0

    def add(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.nbytes if tensor.layout is torch.strided else 0
        return tensor

    map_tensors(add, batch)
    return total
