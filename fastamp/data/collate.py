"""A collate_fn with default_collate's results and one copy per byte, by the core or by torch."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data._utils import collate as torch_collate

from fastamp import _ops
from fastamp.data.arrays import torch_dtype
from fastamp.data.memory import Memory
from fastamp.data.structure import contents_of, rebuild

# What torch collates by these, the core stacks.
_STACKED = (torch_collate.collate_tensor_fn, torch_collate.collate_numpy_array_fn)
_CPU = torch.device("cpu")
_REUSED_NBYTES = 32 << 20  # up to here glibc keeps a freed block for the next batch
_ARRAYS_NBYTES = 64 << 10  # in a sample: below, torch's call for each array takes more than a copy

Pad: TypeAlias = float | Mapping[Any, Any] | None


class BatchCollator:
    """Collate samples into a batch as `torch.utils.data.default_collate`, and pad what is ragged.

    Takes what `default_collate` takes, with the same results, and dataclasses: their fields are
    collated and their type is kept, without a call of `__init__`. Padded, pinned and large batches,
    and those of small arrays, are made by one copy; torch makes the others, as it is faster there.

    Args:
        pad: numbers for leaves whose samples differ in shape, in the structure of a sample:
            `{"input_ids": 0, "labels": -100}`, `{"text": {"ids": 0}}`, with indices of sequences
            and names of fields as keys; or one number where a sample is itself the leaf. A leaf is
            a tensor, an array, or a list of numbers, which becomes int64, float64 or bool.
            Dimensions are padded at their end to the longest sample.

    Raises:
        TypeError: `pad` has a mapping for a leaf, or a number for a leaf that cannot be padded.
        ValueError: `pad` has a key that the samples lack, or what the dtype cannot hold.
        RuntimeError: samples differ in shape and `pad` has no number for them, or in their number
            of dimensions. All of these name the keys, at the first batch.

    Example:
        >>> collate = fastamp.BatchCollator(pad={"ids": 0})
        >>> collate([{"ids": [5, 6, 7]}, {"ids": [8]}])["ids"].tolist()
        [[5, 6, 7], [8, 0, 0]]
    """

    def __init__(self, pad: Pad = None) -> None:
        self.pad = pad
        self._memory = Memory()
        self._is_torchs: bool | None = None

    def with_memory(self, memory: Memory) -> "BatchCollator":
        """Return a collator with the same options that allocates its batches there."""
        made = BatchCollator.__new__(BatchCollator)
        vars(made).update(vars(self), _memory=memory, _is_torchs=None)
        return made

    @_ops.untraced
    def __call__(self, samples: Any) -> Any:
        """Return the batch of at least one sample."""
        if self.pad is None and self._is_faster_by_torch(samples):
            try:
                return default_collate(samples)
            except (RuntimeError, TypeError):  # of no place in a sample, or of a dataclass
                self._is_torchs = False
        return self._collate(samples, "samples[i]", self.pad)

    def make_default(self, samples: Any) -> Any:
        """Return the batch as torch's loader, with its errors."""
        return default_collate(samples) if self._is_faster_by_torch(samples) else self(samples)

    def _is_faster_by_torch(self, samples: Any) -> bool:
        """Say who is faster, by the first batch: see measured.md."""
        if self._is_torchs is None:
            leaves = _leaves_of(samples[0])
            nbytes = sum(leaf.nbytes for leaf in leaves)
            has_arrays = any(isinstance(leaf, np.ndarray) for leaf in leaves)
            is_large = nbytes * len(samples) > _REUSED_NBYTES
            is_small = has_arrays and nbytes <= _ARRAYS_NBYTES
            self._is_torchs = not (is_large or is_small or self._memory.pinned)
        return self._is_torchs

    def _collate(self, samples: Any, place: str, pad: Pad) -> Any:
        """Return the batch of what lies at some place of the samples."""
        first = samples[0]
        function = torch_collate.default_collate_fn_map.get(type(first))
        number = None if isinstance(pad, Mapping) else pad
        items = contents_of(first) if function is None and number is None else None
        if items is not None:
            return self._collate_items(samples, [*items], place, pad or {})
        if isinstance(pad, Mapping) and pad:
            msg = f"pad for {place}: expected a number, got {pad!r}"
            raise TypeError(msg)
        is_nested = isinstance(first, Tensor) and first.is_nested
        if is_nested or (number is None and function not in _STACKED):
            return default_collate(samples)
        return self._stack(samples, place, number)

    def _collate_items(self, samples: Sequence[Any], names: list[Any], place: str, pad: Any) -> Any:
        """Return a container of the batches of what containers hold at each name."""
        first = samples[0]
        if not pad.keys() <= {*names}:
            msg = f"pad has the keys {[*pad]} for {place}, which has {names}"
            raise ValueError(msg)
        is_list = isinstance(first, Sequence) and not hasattr(first, "_fields")
        if is_list and len({*map(len, samples)}) > 1:
            msg = f"{place}: each element in list of batch should be of equal size "
            raise RuntimeError(msg + "(BatchCollator takes `pad` for lists of numbers)")
        columns: Any = ([sample[name] for sample in samples] for name in names)
        if isinstance(first, Sequence):
            columns = zip(*samples, strict=False)
        elif not isinstance(first, Mapping):
            columns = ([getattr(sample, name) for sample in samples] for name in names)
        batch = {
            name: self._collate(column, f"{place}[{name!r}]", pad.get(name))
            for name, column in zip(names, columns, strict=False)
        }
        if is_list and (isinstance(first, tuple) or type(first) is list):
            return [*batch.values()]  # as torch, which makes lists of tuples
        return rebuild(first, batch)

    def _stack(self, samples: Any, place: str, pad: float | None) -> Any:
        """Return tensors, arrays or lists of numbers as one tensor, padded to one shape."""
        if pad is not None and not isinstance(samples[0], Tensor | np.ndarray):
            samples = _as_arrays(samples, place, pad)
        dtype = samples[0].dtype
        dtype = dtype if isinstance(dtype, torch.dtype) else torch_dtype(dtype)
        element = None if pad is None or dtype is None else _as_element(pad, dtype)
        if element is None and pad is not None and dtype is not None:
            msg = f"pad={pad!r} for {place}: {dtype} does not hold it"
            raise ValueError(msg)
        out, core = None, _ops.core_for(_CPU)
        if core and dtype is not None:
            out = core.stack(samples, dtype, self._memory.allocate, element)
        if out is None and element is not None:
            out = self._pad(samples, element)
        if out is not None:
            return out
        try:
            return default_collate(samples)
        except RuntimeError as error:
            msg = f"{place}: {error} (BatchCollator takes `pad` for shapes that differ)"
            raise RuntimeError(msg) from error

    def _pad(self, samples: Sequence[Any], pad: Tensor) -> Tensor | None:
        """Pad by torch's operators: gradients flow, and dtypes may differ."""
        rows = [torch.as_tensor(sample) for sample in samples]
        if len({row.ndim for row in rows}) > 1:
            return None
        longest = map(max, zip(*(row.shape for row in rows), strict=True))
        dtype = functools.reduce(torch.promote_types, [row.dtype for row in rows])
        padded = self._memory.allocate((len(rows), *longest), dtype).to(rows[0].device).copy_(pad)
        for i, row in enumerate(rows):
            padded[i][tuple(map(slice, row.shape))].copy_(row)
        return padded


def _as_arrays(samples: Sequence[Any], place: str, pad: float) -> list[np.ndarray[Any, Any]]:
    """Turn lists of numbers into arrays of one dtype; an empty list fits any."""
    try:
        arrays = [np.asarray(sample) for sample in samples]
        dtype = np.result_type(*[a for a in arrays if a.size] or [np.asarray(pad)])
    except (TypeError, ValueError):  # lists of several lengths or depths
        dtype = np.dtype(object)
    if dtype.kind not in "biuf":
        msg = f"pad={pad!r} for {place}: expected a tensor, an array or a list of numbers of one "
        raise TypeError(msg + f"depth, got {type(samples[0]).__name__} with {dtype} elements")
    return [array.astype(dtype, copy=False) for array in arrays]


@functools.lru_cache
def _as_element(pad: float, dtype: torch.dtype) -> Tensor | None:
    """Return the padding as an element of a dtype; None if the dtype does not hold it."""
    try:
        element = torch.tensor(pad, dtype=dtype, device=_CPU)
        if dtype.is_floating_point or dtype.is_complex:
            return element if element.isfinite() or not math.isfinite(pad) else None
        return element if element.item() == pad else None
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return None


def _leaves_of(sample: Any) -> list[Any]:
    """Return the arrays and dense tensors of a sample."""
    if isinstance(sample, Tensor | np.ndarray):
        return [] if getattr(sample, "layout", torch.strided) is not torch.strided else [sample]
    parts = (contents_of(sample) or {}).values()
    return [leaf for part in parts for leaf in _leaves_of(part)]
