"""What a batch may be: tensors in nested mappings, sequences, namedtuples and dataclasses.

To torch's pytree dataclasses are leaves, and for a small batch it takes six times as long.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def contents_of(value: Any) -> dict[Any, Any] | None:
    """Return what a container holds by key, index or name; None for anything else."""
    if isinstance(value, Mapping):
        return {key: value[key] for key in value}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
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


def map_tensors(function: Callable[[Any], Any], batch: Any, *, movable: bool = False) -> Any:
    """Return the batch with every tensor replaced, and if `movable` what moves itself, too.

    Graphs and TensorDicts do; transformers' mappings, too, but in place.
    """
    is_moved = movable and callable(getattr(type(batch), "to", None))
    if isinstance(batch, Tensor) or (is_moved and not isinstance(batch, UserDict | PackedSequence)):
        return function(batch)
    contents = contents_of(batch)
    if contents is None:
        return batch
    stays = "batch_sizes" if isinstance(batch, PackedSequence) else None  # on the host
    mapped = {
        key: value if key == stays else map_tensors(function, value, movable=movable)
        for key, value in contents.items()
    }
    return rebuild(batch, mapped)
