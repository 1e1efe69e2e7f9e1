"""The leaves of a batch: how tensors, arrays and lists of numbers become one tensor.

Leaves that the backend does not support go to torch's own collate function.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data._utils import collate as torch_collate

from fastamp.data.host import Allocate, stack

Keys = tuple[Any, ...]

_CPU = torch.device("cpu")

# The NumPy type of plain numbers, by torch's collate function for them.
NUMBERS: dict[Callable[..., Any], type] = {
    torch_collate.collate_int_fn: np.int64,
    torch_collate.collate_float_fn: np.float64,
}


@functools.cache
def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """Return torch's name for a dtype of NumPy, or None where torch has none."""
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):
        return None


def plain_dtype(array: Any, *, on_host: bool = True) -> torch.dtype | None:
    """Return torch's dtype of an array in plain memory, `on_host` only on the CPU; else None."""
    if isinstance(array, np.ndarray):
        return torch_dtype(array.dtype)
    if type(array) is not Tensor or array.requires_grad or array.is_meta:
        return None
    if array.layout is not torch.strided or (on_host and array.device.type != "cpu"):
        return None
    odd = array.is_nested or array.is_quantized or array.is_conj() or array.is_neg()
    return None if odd or array._is_zerotensor() else array.dtype


def place(index: int, keys: Keys) -> str:
    """Say where in a batch something lies."""
    return f"samples[{index}]" + "".join(f"[{key!r}]" for key in keys)


def hint(keys: Keys) -> str:
    """Say how to pad a leaf."""
    pad: Any = 0
    for key in reversed(keys):
        pad = {key: pad}
    return f"BatchCollator(pad={pad!r}) pads it"


def registered(sample: Any) -> Callable[..., Any] | None:
    """Return torch's collate function for a sample, found as torch finds it."""
    functions = torch_collate.default_collate_fn_map
    own = functions.get(type(sample))
    return own or next((f for types, f in functions.items() if isinstance(sample, types)), None)


class Leaf:
    """Values that torch's own function collates."""

    def __init__(self, first: Any, keys: Keys) -> None:
        self._type, self._keys = type(first), keys
        self._function = registered(first) or torch_collate.collate  # which raises torch's error

    def fits(self, sample: Any) -> bool:
        """Say whether the leaf was planned for such a sample."""
        return type(sample) is self._type

    def collate(self, samples: Sequence[Any], core: ModuleType | None) -> Any:
        """Return what `default_collate` makes of the samples."""
        del core
        return self._function(samples, collate_fn_map=torch_collate.default_collate_fn_map)


class NumberLeaf(Leaf):
    """Plain integers or floats, which torch would convert one by one."""

    def collate(self, samples: Sequence[Any], core: ModuleType | None) -> Any:
        """Return a tensor of them, as `default_collate`: int64 or float64."""
        # The device of an empty tensor takes a quarter of the time of get_default_device.
        if {*map(type, samples)} == {self._type} and torch.empty(0).device == _CPU:
            with contextlib.suppress(OverflowError):  # raised by torch below, in its own words
                return torch.from_numpy(np.array(samples, NUMBERS[self._function]))
        return super().collate(samples, core)


class TensorLeaf(Leaf):
    """Tensors, arrays or lists of numbers, of one shape or padded to one."""

    def __init__(
        self, first: Any, keys: Keys, allocate: Allocate, pad: float | None, multiple: int
    ) -> None:
        super().__init__(first, keys)
        self._allocate, self._pad, self._multiple = allocate, pad, multiple
        self._is_list = self._type in (list, tuple)
        if not (isinstance(first, torch.Tensor | np.ndarray) or self._is_list):
            msg = (
                f"pad={pad!r} for {place(0, keys)}: expected a tensor, an array or a list of "
                f"numbers to pad, got {self._type.__name__}"
            )
            raise TypeError(msg)

    def collate(self, samples: Sequence[Any], core: ModuleType | None) -> Any:
        """Return the samples as one tensor, with the dimension of the batch in front."""
        if self._is_list:
            samples = self._arrays(samples)
        dtype = samples[0].dtype
        if not isinstance(dtype, torch.dtype):
            # torch makes tensors of arrays on the default device.
            on_cpu = self._pad is not None or torch.get_default_device().type == "cpu"
            dtype = torch_dtype(dtype) if on_cpu else None
        if dtype is not None:
            pad = None if self._pad is None else self._element(self._pad, dtype)
            out = stack(core, samples, dtype, self._allocate, pad, self._multiple)
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
            msg = f"{place(index, self._keys)} has shape {tuple(shapes[index])}, "
            msg += f"{place(0, self._keys)} has shape {tuple(shapes[0])}: "
            ragged = "padding needs the same number of dimensions"
            msg += hint(self._keys) if self._pad is None else ragged
            raise RuntimeError(msg) from error

    def _arrays(self, samples: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
        """Turn lists of numbers into arrays of one dtype; an empty list fits any."""
        try:
            arrays = [np.asarray(sample) for sample in samples]
            dtype = np.result_type(*[a for a in arrays if a.size] or [np.asarray(self._pad)])
        except (TypeError, ValueError) as error:
            msg = f"{place(0, self._keys)}: expected lists of numbers of one depth; {error}"
            raise TypeError(msg) from error
        if dtype.kind not in "biuf":
            msg = f"{place(0, self._keys)}: expected lists of numbers, got {dtype} elements"
            raise TypeError(msg)
        return [array.astype(dtype, copy=False) for array in arrays]

    def _element(self, pad: float, dtype: torch.dtype) -> Tensor:
        """Return the padding as an element of the leaf."""
        try:
            element = torch.tensor(pad, dtype=dtype, device=_CPU)
        except (RuntimeError, TypeError, ValueError, OverflowError):
            holds = False
        else:
            real = dtype.is_floating_point or dtype.is_complex
            is_kept = bool(element.isfinite()) or not math.isfinite(pad)
            holds = is_kept if real else element.item() == pad
        if not holds:
            msg = f"pad={pad!r} for {place(0, self._keys)}: {dtype} does not hold it"
            raise ValueError(msg)
        return element
