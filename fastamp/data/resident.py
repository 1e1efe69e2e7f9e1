"""Datasets kept on a device: batches are gathered there, by row numbers from the host."""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fastamp.data.columns import Column, Windows, check_rows, torch_dtype

_CHUNK_NBYTES = 1 << 26  # of an array on its way to the device
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Signed dtypes of the same size: not every device gathers the unsigned ones."""

_copies: Any = WeakTensorKeyDictionary()
"""Of a tensor, by device: its version when it was copied, and a weak reference to the copy."""


def _signed(tensor: Tensor) -> Tensor:
    return tensor.view(_SIGNED.get(tensor.dtype, tensor.dtype))


class DeviceGatherer:
    """Batches gathered on the device of their columns; see `TorchGatherer`.

    Only row numbers are copied there, 8 bytes a sample; nothing waits for them. In place of `Slots`
    it also allocates the batches' memory.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns: list[tuple[Any, torch.dtype]] = [(c.array, c.dtype) for c in columns]
        first = self._columns[0][0]
        self._device, self._num_rows = first.device, first.shape[0]
        self._error: IndexError | None = None

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised, contiguous tensor on the device."""
        return torch.empty(shape, dtype=dtype, device=self._device)

    def size(self, nbytes: int) -> int:
        """Return the bytes that an allocation takes."""
        return nbytes

    def submit(
        self, indices: Tensor, outputs: Sequence[Tensor], keys: Tensor | None = None
    ) -> None:
        """Gather a batch on the current stream."""
        del keys
        try:
            rows = check_rows(indices, self._num_rows)
        except IndexError as error:
            self._error = error
            return
        on_cuda = self._device.type == "cuda"
        rows = (rows.pin_memory() if on_cuda else rows).to(self._device, non_blocking=True)
        for (array, dtype), output in zip(self._columns, outputs, strict=True):
            if on_cuda:
                array.record_stream(torch.cuda.current_stream(self._device))
            if array.dtype == dtype:
                torch.index_select(_signed(array), 0, rows, out=_signed(output))
                continue
            taken = torch.index_select(_signed(array), 0, rows)
            output.copy_(taken)
            if array.dtype in _SIGNED:
                output.bitwise_and_((1 << 8 * array.itemsize) - 1)

    def is_ready(self) -> bool:
        """Return True: the host never waits."""
        return True

    def wait(self) -> float:
        """Return at once, or raise the error of the batch."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        return 0.0


def move(columns: Sequence[Column], device: torch.device) -> list[Column]:
    """Return columns with all their rows on a device.

    Raises:
        ValueError: they do not fit, or have augmentations, which are made on the host.
    """
    if any(column.images is not None for column in columns):
        msg = "resident=True: images are augmented on the host: leave out resident, or augment"
        raise ValueError(msg)
    arrays = [column.array for column in columns]
    parts = {_end(array): getattr(array, "parts", [array]) for array in reversed(arrays)}
    needed = sum(part.nbytes for each in parts.values() for part in each)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if needed > free:
            msg = f"resident=True: the dataset takes {needed} bytes, and {device} has {free} free"
            raise ValueError(msg)
    moved: dict[Any, Tensor] = {}
    return [column._replace(array=_move(column.array, device, moved)) for column in columns]


def _end(array: Any) -> Any:
    """Return a key that columns share if they are windows of one sequence: they end together."""
    if not isinstance(array, Windows):
        return id(array)
    last = array.parts[-1]
    return last.ctypes.data + last.nbytes, last.dtype


def _move(array: Any, device: torch.device, moved: dict[Any, Tensor]) -> Tensor:
    if isinstance(array, Tensor) and not array.is_inference():
        return _move_once(array, device)
    if not isinstance(array, Windows):
        return _copy([array], array.shape, device)
    count = sum(map(len, array.parts))
    flat = moved.get(_end(array))
    if flat is None:
        flat = moved[_end(array)] = _copy(array.parts, (count,), device)
    return flat.as_strided(array.shape, (array.step, 1), len(flat) - count)


def _move_once(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor's copy on a device, one for all loaders, as of the splits of a dataset."""
    known = _copies.setdefault(tensor, {})
    version, find = known.get(device, (None, None))
    copy: Tensor | None = find() if find else None
    if copy is None or version != tensor._version:
        copy = _copy([tensor], tensor.shape, device)
        known[device] = tensor._version, weakref.ref(copy)
    return copy


def _copy(parts: Sequence[Any], shape: Sequence[int], device: torch.device) -> Tensor:
    """Copy arrays end to end, in pieces: a mapped file may be larger than the host's memory."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.empty(shape, dtype=first.dtype, device=device).copy_(first)
    target, begin = torch.empty(shape, dtype=torch_dtype(first.dtype), device=device), 0
    step = max(1, _CHUNK_NBYTES // max(1, first[:1].nbytes))
    for part in parts:
        for start in range(0, len(part), step):
            piece = torch.from_numpy(np.array(part[start : start + step]))
            target[begin : begin + len(piece)].copy_(piece)
            begin += len(piece)
    return target
