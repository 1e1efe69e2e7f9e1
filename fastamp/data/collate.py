"""A collate_fn with default_collate's results and one copy per byte.

The structure of a sample becomes a tree of nodes, kept for as long as the first sample of a batch
fits it. As in torch, the first sample decides how a batch is collated, and what the core does not
support goes to torch's own collate function.
"""

import contextlib
import functools
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data._utils import collate as torch_collate

from fastamp import _ops
from fastamp.data.arrays import torch_dtype
from fastamp.data.checks import as_integer
from fastamp.data.memory import LEASED_NBYTES, Memory
from fastamp.data.structure import contents_of, rebuild

# The types that the core stacks, by torch's collate function for them.
_STACKED: dict[Callable[..., Any], tuple[type, ...]] = {
    torch_collate.collate_tensor_fn: (torch.Tensor, torch.nn.Parameter),
    torch_collate.collate_numpy_array_fn: (np.ndarray, np.memmap),
}
# The NumPy type of plain numbers, by torch's collate function for them.
_NUMBERS: dict[Callable[..., Any], type] = {
    torch_collate.collate_int_fn: np.int64,
    torch_collate.collate_float_fn: np.float64,
}
_CPU = torch.device("cpu")

Pad: TypeAlias = float | Mapping[Any, Any] | None
_Keys: TypeAlias = tuple[Any, ...]
_Node: TypeAlias = "_Leaf | _Container"
_Allocate: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]


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
            the keys, the index of the sample and both shapes.

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
        self._memory = Memory()

    def with_memory(self, memory: Memory) -> "BatchCollator":
        """Return a collator with the same options that allocates its batches there."""
        made = BatchCollator(self.pad, pad_multiple=self.pad_multiple)
        made._memory = memory
        return made

    @_ops.untraced
    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch of at least one sample."""
        first = samples[0]
        plan = self._plan
        registered = torch_collate.default_collate_fn_map
        if plan is None or plan[1] != registered or not plan[0].fits(first):
            plan = self._plan = (self._plan_node(first, (), self.pad), dict(registered))
        return plan[0].collate(samples, _ops.core_for(_CPU))

    def _plan_node(self, first: Any, keys: _Keys, pad: Pad) -> _Node:
        """Return the node for samples like this one."""
        function = _registered(first)
        inner = pad if isinstance(pad, Mapping) else {}
        number = None if isinstance(pad, Mapping) else pad
        items = _items_of(first) if function is None and number is None else None
        if items is not None:
            for key in inner:
                if key not in items:
                    msg = f"pad has the key {key!r} for {_place(0, keys)}, which has {list(items)}"
                    raise ValueError(msg)
            children = {k: self._plan_node(v, (*keys, k), inner.get(k)) for k, v in items.items()}
            return _Container(first, children, keys)
        if inner and function:
            msg = f"pad for {_place(0, keys)}: expected a number, got {pad!r}"
            raise TypeError(msg)
        if isinstance(first, Tensor) and first.is_nested:
            return _Leaf(first, keys)
        if number is not None or (function and type(first) in _STACKED.get(function, ())):
            return _TensorLeaf(first, keys, self._memory.allocate, number, self.pad_multiple)
        plain = function in _NUMBERS and type(first) in (int, float)
        return _NumberLeaf(first, keys) if plain else _Leaf(first, keys)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the plan, whose types may not be picklable."""
        return {**vars(self), "_plan": None}


class _Container:
    """Samples that are mappings, sequences, namedtuples or dataclasses."""

    def __init__(self, first: Any, children: dict[Any, _Node], keys: _Keys) -> None:
        self._type, self._children, self._keys = type(first), children, keys
        self._names = tuple(children)
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
        columns = self._columns(samples, core)
        batch = {}
        for (name, child), column in zip(self._children.items(), columns, strict=False):
            # As in torch, functions that the user has registered get a mapping's values as a list.
            as_list = self._is_mapping and type(child) is _Leaf
            batch[name] = child.collate([*column] if as_list else column, core)
        return list(batch.values()) if self._is_list else rebuild(samples[0], batch)

    def _columns(self, samples: Sequence[Any], core: ModuleType | None) -> Iterable[Sequence[Any]]:
        """Return the values of all samples for each child, in torch's containers."""
        if self._is_mapping:
            found: Any = core and core.columns(tuple(samples), self._names)
            return found or (list(map(operator.itemgetter(name), samples)) for name in self._names)
        if not issubclass(self._type, Sequence):  # a dataclass
            return [list(map(operator.attrgetter(name), samples)) for name in self._names]
        length = len(self._names)
        for index, sample in enumerate(() if self._is_named else samples):
            if len(sample) != length:
                msg = (
                    f"{_place(index, self._keys)} has length {len(sample)}, "
                    f"{_place(0, self._keys)} has length {length}: each element in list of batch "
                    f"should be of equal size; if they are lists of numbers, {_hint(self._keys)}"
                )
                raise RuntimeError(msg)
        return zip(*samples, strict=False)


class _Leaf:
    """Values that torch's own function collates."""

    def __init__(self, first: Any, keys: _Keys) -> None:
        self._type, self._keys = type(first), keys
        self._function = _registered(first) or torch_collate.collate  # which raises torch's error

    def fits(self, sample: Any) -> bool:
        return type(sample) is self._type

    def collate(self, samples: Sequence[Any], core: ModuleType | None) -> Any:
        del core
        return self._function(samples, collate_fn_map=torch_collate.default_collate_fn_map)


class _NumberLeaf(_Leaf):
    """Plain integers or floats, which torch would convert one by one."""

    def collate(self, samples: Sequence[Any], core: ModuleType | None) -> Any:
        # The device of an empty tensor takes a quarter of the time of get_default_device.
        if {*map(type, samples)} == {self._type} and torch.empty(0).device == _CPU:
            with contextlib.suppress(OverflowError):  # raised by torch below, in its own words
                return torch.from_numpy(np.array(samples, _NUMBERS[self._function]))
        return super().collate(samples, core)


class _TensorLeaf(_Leaf):
    """Tensors, arrays or lists of numbers, of one shape or padded to one.

    Args:
        first: a sample.
        keys: where it lies in the sample that the collator was given.
        allocate: gives memory on the CPU for a shape and a dtype.
        pad: the number that fills ragged dimensions; None refuses them.
        multiple: ragged dimensions, and that of vectors, are rounded up to a multiple of this.
    """

    def __init__(
        self, first: Any, keys: _Keys, allocate: _Allocate, pad: float | None, multiple: int
    ) -> None:
        super().__init__(first, keys)
        self._allocate, self._pad, self._multiple = allocate, pad, multiple
        self._is_list = not isinstance(first, torch.Tensor | np.ndarray)

    def collate(self, samples: Sequence[Any], core: ModuleType | None) -> Any:
        if self._is_list:
            samples = self._arrays(samples)
        dtype = samples[0].dtype
        if not isinstance(dtype, torch.dtype):
            # torch makes tensors of arrays on the default device.
            on_cpu = self._pad is not None or torch.get_default_device().type == "cpu"
            dtype = torch_dtype(dtype) if on_cpu else None
        out = None if dtype is None else self._stack(samples, dtype, core)
        if out is not None:
            return out
        try:
            return super().collate(samples, core)
        except RuntimeError as error:
            shapes: list[Any] = [getattr(sample, "shape", None) for sample in samples]
            index = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None)
            # torch refuses sparse tensors, and what has no shape, for what they are.
            if index is None or None in shapes or "sparse" in str(error):
                raise
            msg = f"{_place(index, self._keys)} has shape {tuple(shapes[index])}, "
            msg += f"{_place(0, self._keys)} has shape {tuple(shapes[0])}: "
            ragged = "padding needs the same number of dimensions"
            msg += _hint(self._keys) if self._pad is None else ragged
            raise RuntimeError(msg) from error

    def _stack(
        self, samples: Sequence[Any], dtype: torch.dtype, core: ModuleType | None
    ) -> Tensor | None:
        """Copy samples into one tensor of this dtype; None where torch's own function has to."""
        pad = None if self._pad is None else self._element(self._pad, dtype)
        if core is not None:
            out: Tensor | None = core.stack(samples, dtype, self._allocate, pad, self._multiple)
            if out is not None:
                return out
        if pad is None:
            return None
        # Gradients flow through these copies, and dtypes may differ.
        rows = [torch.as_tensor(sample) for sample in samples]
        shapes = [row.shape for row in rows]
        if len({*map(len, shapes)}) > 1:
            return None
        longest = []
        for lengths in zip(*shapes, strict=True):
            is_ragged = len(shapes[0]) == 1 or len({*lengths}) > 1
            step = self._multiple if is_ragged else 1
            longest.append(-(-max(lengths) // step) * step)
        dtype = functools.reduce(torch.promote_types, [row.dtype for row in rows])
        padded = self._allocate((len(rows), *longest), dtype).to(rows[0].device).copy_(pad)
        for i, row in enumerate(rows):
            padded[i][tuple(slice(length) for length in row.shape)].copy_(row)
        return padded

    def _arrays(self, samples: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
        """Turn lists of numbers into arrays of one dtype; an empty list fits any."""
        try:
            arrays = [np.asarray(sample) for sample in samples]
            dtype = np.result_type(*[a for a in arrays if a.size] or [np.asarray(self._pad)])
        except (TypeError, ValueError):  # lists of several lengths or depths
            dtype = np.dtype(object)
        if dtype.kind not in "biuf":
            msg = (
                f"pad={self._pad!r} for {_place(0, self._keys)}: expected a tensor, an array or a "
                f"list of numbers of one depth, got {self._type.__name__} with {dtype} elements"
            )
            raise TypeError(msg)
        return [array.astype(dtype, copy=False) for array in arrays]

    def _element(self, pad: float, dtype: torch.dtype) -> Tensor:
        """Return the padding as an element of the leaf."""
        try:
            element = torch.tensor(pad, dtype=dtype, device=_CPU)
            if dtype.is_floating_point or dtype.is_complex:
                holds = bool(element.isfinite()) or not math.isfinite(pad)
            else:
                holds = element.item() == pad
        except (RuntimeError, TypeError, ValueError, OverflowError):
            holds = False
        if not holds:
            msg = f"pad={pad!r} for {_place(0, self._keys)}: {dtype} does not hold it"
            raise ValueError(msg)
        return element


def _registered(sample: Any) -> Callable[..., Any] | None:
    """Return torch's collate function for a sample, found as torch finds it."""
    functions = torch_collate.default_collate_fn_map
    own = functions.get(type(sample))
    return own or next((f for types, f in functions.items() if isinstance(sample, types)), None)


def _items_of(sample: Any) -> dict[Any, Any] | None:
    items = contents_of(sample)
    return dict(enumerate(sample)) if items is None and isinstance(sample, Sequence) else items


def _place(index: int, keys: _Keys) -> str:
    """Say where in a batch something lies."""
    return f"samples[{index}]" + "".join(f"[{key!r}]" for key in keys)


def _hint(keys: _Keys) -> str:
    """Say how to pad a leaf."""
    pad: Any = 0
    for key in reversed(keys):
        pad = {key: pad}
    return f"BatchCollator(pad={pad!r}) pads it"


def _check_pad(pad: Any, name: str) -> None:
    """Raise an error unless it is a number, None, or a mapping of these, nested or not."""
    if isinstance(pad, Mapping):
        for key, value in pad.items():
            _check_pad(value, f"{name}[{key!r}]")
    elif not (pad is None or isinstance(pad, numbers.Real)):
        msg = f"{name}={pad!r}: expected a number, or a mapping in the structure of a sample"
        raise TypeError(msg)


class FasterCollate:
    """torch's default_collate, or the compiled one where that is faster: see docs/how/measured.md.

    Batches from 1 MiB on are stacked into leased or pinned memory; torch makes the others.
    """

    def __init__(self, memory: Memory) -> None:
        self._compiled = BatchCollator().with_memory(memory)
        self._pinned = memory.pinned

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return the batch."""
        first = samples[0] if samples else None
        if self._pinned or _nbytes_of(first) * len(samples) >= LEASED_NBYTES:
            return self._compiled(samples)
        return torch_collate.default_collate(samples)  # type: ignore[no-untyped-call]


def _nbytes_of(sample: Any) -> int:
    """Return about how many bytes the tensors of a sample take."""
    if isinstance(sample, Mapping):
        return sum(map(_nbytes_of, sample.values()))
    if isinstance(sample, list | tuple):
        return sum(map(_nbytes_of, sample))
    nbytes = getattr(sample, "nbytes", 0)
    return nbytes if isinstance(nbytes, int) else 0
