"""Copies batches to a device, in the consumer's thread or in a thread that runs ahead."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from fastamp.data.gather import GatherSource
from fastamp.data.prefetch import CudaCopies, prefetch

_AHEAD = 2  # batches whose copy has begun before the consumer asks for them


def copy_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Return the batches on a device, copied ahead of their consumer.

    Batches that the core gathers need no Python thread beside the consumer's.
    """
    if device.type != "cuda" or not (isinstance(batches, GatherSource) and batches.has_threads):
        return iter(prefetch(batches, device, _AHEAD))
    if device == torch.device("cuda"):
        device = torch.device("cuda", torch.cuda.current_device())
    return CopiedBatches(batches, device)


class CopiedBatches(Iterator[Any]):
    """Gathered batches, copied to a CUDA device on a side stream.

    Each request for a batch starts the copies of all batches that are gathered by then. The
    consumer waits only if its own batch is not gathered yet, and never for a copy.
    """

    def __init__(self, source: GatherSource, device: torch.device) -> None:
        self._source, self._device = source, device
        self._copies = CudaCopies(device, _AHEAD, keeps=False)
        self._begun: deque[Any] = deque()  # batches with the events of their copies, or errors

    def __next__(self) -> Any:
        begun = self._begun
        while not begun or (len(begun) <= _AHEAD and self._source.is_next_ready()):
            begun.append(self._begin())
        first = begun.popleft()
        if isinstance(first, Exception):
            try:
                raise first
            finally:
                del first  # whose traceback refers to this frame
        return self._copies.deliver(*first)

    def _begin(self) -> Any:
        """Begin the copy of the next batch, or return the error that comes in its place."""
        try:
            batch = next(self._source)
            with torch.cuda.device(self._device):
                return self._copies.start(batch)
        except Exception as error:  # noqa: BLE001 - raised where the batch would come
            return error
