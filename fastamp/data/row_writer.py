"""The rows of a batch, each filled as soon as its sample is made."""

from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from fastamp.data.columns import plain_dtype
from fastamp.data.slots import Slots

_LEAST_NBYTES = 4096  # of a row that is worth a copy of its own
_WHOLE = object()  # the key of a sample that is itself a leaf
Get = Callable[[Any, Tensor | None], Any]
_Spec = tuple[type, tuple[int, ...], torch.dtype]


def find_get(dataset: Any) -> Get:
    """Return the function that makes a sample; an ImageFolder's decodes into the image's row."""
    if type(dataset) is Subset:
        get, rows = find_get(dataset.dataset), dataset.indices
        return lambda index, row: get(rows[index], row)
    return lambda index, _: dataset[index]


class Rows:
    """The tensors of one batch, for the large leaves of its samples.

    A sample is a tensor, an array, or a tuple, list or dict with some of them. The first sample to
    be made decides where the large leaves are, and of what shape. If a sample has the same, they
    are copied out of it, and replaced by a 0.
    """

    def __init__(self, get: Get, slots: Slots, count: int) -> None:
        self._get, self._count, self._slots = get, count, slots
        self._specs: dict[Any, _Spec] | None = None
        self._outputs: dict[Any, Tensor] = {}
        self._written = [False] * count

    def make(self, place: int, index: Any, lock: Lock) -> Any:
        """Make a sample, copy its large leaves into their rows, and return the rest."""
        rows = self._rows_at(place) if self._specs else {}
        sample = self._get(index, rows.get(0))
        items = dict(_items(sample))
        with lock:
            if self._specs is None:
                self._specs = self._plan(items)
        if not self._specs or any(_spec(items.get(k)) != s for k, s in self._specs.items()):
            return sample
        for key, row in (rows or self._rows_at(place)).items():
            value = items[key]
            if not isinstance(value, Tensor):
                row.numpy()[...] = value
            elif value is not row:
                row.copy_(value)
        self._written[place] = True
        return _with(sample, dict.fromkeys(self._specs, 0))

    def _rows_at(self, place: int) -> dict[Any, Tensor]:
        return {key: output[place] for key, output in self._outputs.items()}

    def _plan(self, items: dict[Any, Any]) -> dict[Any, _Spec]:
        """Find the large leaves, and allocate memory for all rows."""
        specs = {}
        for key, value in items.items():
            spec = _spec(value)
            if spec is not None and value.nbytes >= _LEAST_NBYTES:
                specs[key] = spec
                self._outputs[key] = self._slots.allocate((self._count, *spec[1]), spec[2])
        return specs

    def collate(self, samples: list[Any], collate_fn: Callable[[list[Any]], Any]) -> Any:
        """Return the batch made of the rows and the rest of the samples."""
        if all(self._written):
            if _WHOLE in self._outputs:
                return self._outputs[_WHOLE]
            return _with(collate_fn(samples), self._outputs)
        for place, written in enumerate(self._written):
            if written:  # others were not: undo it, and collate whole samples
                rows: dict[Any, Any] = self._rows_at(place)
                for key, (kind, *_) in (self._specs or {}).items():
                    rows[key] = rows[key] if kind is Tensor else rows[key].numpy()
                samples[place] = _with(samples[place], rows)
        return collate_fn(samples)


def _items(sample: Any) -> Iterable[tuple[Any, Any]]:
    if type(sample) is dict:
        return sample.items()
    return enumerate(sample) if type(sample) in (tuple, list) else ((_WHOLE, sample),)


def _with(sample: Any, values: dict[Any, Any]) -> Any:
    """Return a container with other values at some keys, or the value in place of a leaf."""
    if _WHOLE in values:
        return values[_WHOLE]
    if type(sample) is dict:
        return {**sample, **values}
    items = list(sample)
    for key, value in values.items():
        items[key] = value
    return tuple(items) if type(sample) is tuple else items


def _spec(value: Any) -> _Spec | None:
    """Return kind, shape and dtype of plain memory on the CPU; None for anything else."""
    dtype = plain_dtype(value) if type(value) in (Tensor, np.ndarray) else None
    return None if dtype is None else (type(value), tuple(value.shape), dtype)
