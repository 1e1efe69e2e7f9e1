"""A collate_fn with default_collate's results and one copy per byte.

The structure of a sample becomes a tree of nodes, kept for as long as the first sample of a batch
fits it. As in torch, the first sample decides how a batch is collated.
"""

import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate

from fastamp import _ops
from fastamp.data.checks import as_integer
from fastamp.data.host import columns_of, find_core
from fastamp.data.leaves import NUMBERS, Keys, Leaf, NumberLeaf, TensorLeaf, hint, place, registered
from fastamp.data.slots import Slots
from fastamp.data.structure import contents_of, rebuild

# The types that backends stack, by torch's collate function for them.
_STACKED: dict[Callable[..., Any], tuple[type, ...]] = {
    torch_collate.collate_tensor_fn: (torch.Tensor, torch.nn.Parameter),
    torch_collate.collate_numpy_array_fn: (np.ndarray, np.memmap),
}

Pad = float | Mapping[Any, Any] | None
_Node: TypeAlias = "Leaf | _Container"
_Plan = Callable[[Any, Keys, Pad], _Node]


class BatchCollator:
    """Collate samples into a batch as `torch.utils.data.default_collate`, but faster.

    Takes what `default_collate` takes, with the same results: tensors, NumPy arrays and scalars,
    numbers, strings and bytes, nested in mappings, sequences and namedtuples. Takes dataclasses
    too: their fields are collated and their type is kept, without a call of `__init__`.
    The structure is worked out at the first batch, and again when a batch has another one. Memory
    is allocated once for a leaf and every byte copied once; in a worker it is shared memory.

    Args:
        pad: the padding values of leaves whose samples differ in shape, in the structure of a
            sample: `{"input_ids": 0, "labels": -100}`, `{"text": {"ids": 0}}`, the index as key for
            sequences, the name for fields, or a number where a sample is itself the leaf. Such a
            leaf is a tensor, an array, or a list of numbers, which becomes int64, float64 or bool.
            Dimensions are padded at their end to the longest sample.
        pad_multiple: round padded dimensions up to a multiple of this: those that differ within
            the batch, and the only dimension of a vector.

    Raises:
        TypeError: `pad` has something other than a number for a leaf, or a number for a leaf that
            cannot be padded.
        ValueError: `pad_multiple` is below 1; at the first batch, `pad` has a key that the samples
            lack, or a number that the dtype cannot hold.
        RuntimeError: samples differ in shape and `pad` has no number for them: the message names
            the keys, the index of the sample and both shapes. Or they are nested tensors.

    Example:
        >>> collate = fastamp.BatchCollator(pad={"ids": 0})
        >>> collate([{"ids": [5, 6, 7]}, {"ids": [8]}])["ids"].tolist()
        [[5, 6, 7], [8, 0, 0]]
    """

    def __init__(self, pad: Pad = None, *, pad_multiple: int = 1) -> None:
        self.pad_multiple = as_integer("pad_multiple", pad_multiple, least=1, optional=False)
        _check_pad(pad, "pad")
        self.pad = pad
        self._plan: tuple[_Node, dict[Any, Any]] | None = None
        self.lease_from(Slots())

    def lease_from(self, slots: Slots) -> None:
        """Allocate batches from these slots from now on."""
        self.slots, self._plan = slots, None

    @_ops.untraced
    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch of at least one sample."""
        first = samples[0]
        plan = self._plan
        registered = torch_collate.default_collate_fn_map
        if plan is None or plan[1] != registered or not plan[0].fits(first):
            plan = self._plan = (self._plan_node(first, (), self.pad), dict(registered))
        return plan[0].collate(samples, find_core())

    def _plan_node(self, first: Any, keys: Keys, pad: Pad) -> _Node:
        """Return the node for samples like this one."""
        function = registered(first)
        if function in _STACKED and isinstance(first, torch.Tensor) and first.is_nested:
            msg = (
                f"{place(0, keys)}: expected a tensor of one shape, got a nested tensor; these are "
                "not currently supported by the default collate_fn"  # torch's words
            )
            raise RuntimeError(msg)
        inner = pad if isinstance(pad, Mapping) else {}
        number = None if isinstance(pad, Mapping) else pad
        items = _items_of(first) if function is None and number is None else None
        if items is not None:
            return _Container(first, items, keys, inner, self._plan_node)
        if inner and function:
            msg = f"pad for {place(0, keys)}: expected a number, got {pad!r}"
            raise TypeError(msg)
        if number is not None or (function and type(first) in _STACKED.get(function, ())):
            return TensorLeaf(first, keys, self.slots.allocate, number, self.pad_multiple)
        plain = function in NUMBERS and type(first) in (int, float)
        return NumberLeaf(first, keys) if plain else Leaf(first, keys)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the plan, whose types may not be picklable, and the slots."""
        return {name: value for name, value in vars(self).items() if name not in ("_plan", "slots")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.lease_from(Slots())


class _Container:
    """Samples that are mappings, sequences, namedtuples or dataclasses."""

    def __init__(
        self, first: Any, items: dict[Any, Any], keys: Keys, pad: Mapping[Any, Any], plan: _Plan
    ) -> None:
        for key in pad:
            if key not in items:
                msg = f"pad has the key {key!r} for {place(0, keys)}, which has {list(items)}"
                raise ValueError(msg)
        self._children = {k: plan(value, (*keys, k), pad.get(k)) for k, value in items.items()}
        self._type, self._keys, self._names = type(first), keys, tuple(items)
        self._is_named = hasattr(first, "_fields")
        self._is_mapping = isinstance(first, Mapping)
        # torch makes lists of tuples.
        self._is_list = type(first) is list or (isinstance(first, tuple) and not self._is_named)

    def fits(self, sample: Any) -> bool:
        if type(sample) is not self._type:
            return False
        items = sample if self._is_mapping else _items_of(sample) or {}
        if tuple(items) != self._names:
            return False
        for name, child in self._children.items():  # noqa: SIM110 - in half the time
            if not child.fits(items[name]):
                return False
        return True

    def collate(self, samples: Sequence[Any], core: ModuleType | None) -> Any:
        if self._is_mapping:
            columns = columns_of(core, tuple(samples), self._names)
        else:
            columns = self._columns(samples)
        batch = {}
        for (name, child), column in zip(self._children.items(), columns, strict=False):
            # As in torch, functions that the user has registered get a mapping's values as a list.
            as_list = self._is_mapping and type(child) is Leaf
            batch[name] = child.collate([*column] if as_list else column, core)
        return list(batch.values()) if self._is_list else rebuild(samples[0], batch)

    def _columns(self, samples: Sequence[Any]) -> Iterable[Sequence[Any]]:
        """Return the values of all samples for each child, in torch's containers."""
        if not issubclass(self._type, Sequence):  # a dataclass
            return [list(map(operator.attrgetter(name), samples)) for name in self._names]
        length = len(self._names)
        for index, sample in enumerate(() if self._is_named else samples):
            if len(sample) != length:
                msg = (
                    f"{place(index, self._keys)} has length {len(sample)}, "
                    f"{place(0, self._keys)} has length {length}: each element in list of batch "
                    f"should be of equal size; if they are lists of numbers, {hint(self._keys)}"
                )
                raise RuntimeError(msg)
        return zip(*samples, strict=False)


def _items_of(sample: Any) -> dict[Any, Any] | None:
    items = contents_of(sample)
    return dict(enumerate(sample)) if items is None and isinstance(sample, Sequence) else items


def _check_pad(pad: Any, name: str) -> None:
    """Raise an error unless it is a number, None, or a mapping of these, nested or not."""
    if isinstance(pad, Mapping):
        for key, value in pad.items():
            _check_pad(value, f"{name}[{key!r}]")
    elif not (pad is None or isinstance(pad, numbers.Real)):
        msg = f"{name}={pad!r}: expected a number, or a mapping in the structure of a sample"
        raise TypeError(msg)
