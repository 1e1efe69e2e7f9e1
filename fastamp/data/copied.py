"""Copies batches to a device as they are taken, on a side stream."""

from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from fastamp.data.gather import GatherSource
from fastamp.data.prefetch import CudaCopies, make_copies

_AHEAD = 2  # gathered batches whose copy begins before the consumer asks for them


class CopiedBatches(Iterator[Any]):
    """Batches on a device, each taken from its source in the consumer's thread.

    A request takes a batch, starts its copy and returns: the consumer's stream waits for the copy,
    the consumer does not. What the core gathers is taken ahead: each request starts the copies of
    all batches that are gathered by then. The user's own code runs only when its batch is due.
    """

    def __init__(self, source: Iterator[Any], device: torch.device, *, keeps: bool) -> None:
        """`keeps`: the source may fill the memory of a batch again once it is asked for another."""
        ahead = 0
        if isinstance(source, GatherSource):
            ahead, self._is_next_ready = _AHEAD, source.is_next_ready
        self._source = source
        self._copies = make_copies(device, ahead, keeps=keeps)
        is_cuda = isinstance(self._copies, CudaCopies)
        self._ahead = ahead if is_cuda else 0
        self._on_device = torch.cuda.device(device) if is_cuda else nullcontext()
        self._begun: deque[Any] = deque()  # batches with the events of their copies, or errors

    def __next__(self) -> Any:
        begun = self._begun
        # An error that is raised here at once is stored nowhere: its traceback refers to this pass,
        # which would live until the garbage collector if Ctrl-C came before the error was raised.
        first = begun.popleft() if begun else self._begin()
        while len(begun) < self._ahead and self._is_next_ready():
            begun.append(self._begin_ahead())
        if isinstance(first, Exception):
            try:
                raise first
            finally:
                del first  # whose traceback refers to this frame
        return self._copies.deliver(*first)

    def _begin(self) -> Any:
        """Begin the copy of the next batch."""
        self._copies.settle()
        batch = next(self._source)
        with self._on_device:
            return self._copies.start(batch)

    def _begin_ahead(self) -> Any:
        try:
            return self._begin()
        except Exception as error:  # noqa: BLE001 - raised where the batch would come
            return error
