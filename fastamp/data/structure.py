"""What a batch may be: tensors in nested mappings, lists, tuples, namedtuples and dataclasses.

torch's pytree does not serve here: dataclasses and most mappings are leaves to it, and it takes six
times as long for a small batch.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_FEW = 16


def contents_of(value: Any) -> dict[Any, Any] | None:
    """Return what a container holds by key, index or name; None for anything else."""
    if isinstance(value, Mapping):
        return {key: value[key] for key in value}
    if isinstance(value, list | tuple):
        names = getattr(value, "_fields", None)
        return dict(enumerate(value) if names is None else zip(names, value, strict=False))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def rebuild(like: Any, contents: dict[Any, Any]) -> Any:
    """Return a container of the same type with other contents, as default_collate makes it."""
    if type(like) is dict:
        return contents
    if hasattr(like, "_fields"):
        return type(like)(*contents.values())
    if not isinstance(like, Mapping | Sequence):  # a dataclass
        clone = copy.copy(like)
        for name, value in contents.items():
            object.__setattr__(clone, name, value)  # also where it is frozen
        return clone
    plain: Any = contents if isinstance(like, Mapping) else list(contents.values())
    try:
        if not isinstance(like, MutableMapping | MutableSequence):
            return type(like)(plain)  # type: ignore[call-arg]
        clone = copy.copy(like)
        for key, value in contents.items():
            clone[key] = value
    except TypeError:
        return plain
    return clone


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Return the batch with every tensor replaced; types and everything else stay."""
    if isinstance(batch, Tensor):
        return function(batch)
    contents = contents_of(batch)
    if contents is None:
        return batch
    stays = "batch_sizes" if isinstance(batch, PackedSequence) else None  # on the host
    return rebuild(
        batch, {k: v if k == stays else map_tensors(function, v) for k, v in contents.items()}
    )


def count_nbytes(batch: Any) -> int:
    """Return the bytes of all tensors in dicts, lists, tuples and dataclasses; 0 if it fails."""
    try:
        return _count_nbytes(batch)
    except Exception:  # noqa: BLE001 - of a container of the user's: nobody has asked for its bytes
        return 0


def _count_nbytes(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return batch.nbytes if batch.layout is torch.strided else 0
    if isinstance(batch, list | tuple):
        # In a long list, such as one entry for each sample or token, all entries are alike.
        many_plain = len(batch) > _FEW and {type(batch[0]), type(batch[-1])} <= _PLAIN
        return 0 if many_plain else sum(map(_count_nbytes, batch))
    if type(batch) is dict:
        return sum(map(_count_nbytes, batch.values()))
    if isinstance(batch, UserDict):
        return _count_nbytes(batch.data)
    if type(batch) in _PLAIN or not dataclasses.is_dataclass(batch):
        return 0  # also of other mappings, which may compute their values when they are read
    return sum(_count_nbytes(getattr(batch, f.name, None)) for f in dataclasses.fields(batch))
