"""Memory for batches: fresh, shared between processes, pinned, or leased from slots that return."""

from __future__ import annotations

import ctypes
import math
import queue
import time
import weakref

import torch
from torch.utils.data import get_worker_info

__all__ = ["Slots"]

# From here on the C library maps fresh pages for every allocation, which costs as much as filling
# them; below, its free lists are as fast as ours would be.
_REUSE_NBYTES = 32 << 20
DEFAULT_MAX_BYTES = 1 << 30


class Slots:
    """Gives out memory for the tensors of batches and takes it back when they are gone.

    1. In a worker process of torch's loader, memory is shared with the parent, as torch's collate
       functions do it, so that a batch is not copied on its way.
    2. Pinned memory is torch's: its allocator keeps a freed block until the copies from it are
       done.
    3. Large batches are leased: a slot is free again when the last tensor that looks into it, or
       the last autograd graph that saved one, has died; never earlier. When no slot is free,
       another is made, up to `max_bytes` in all; beyond that memory is fresh, and the caller's
       alone.
    4. Everything else is fresh: the allocator is faster than any ring.

    Args:
        pinned: whether batches go to an accelerator.
        max_bytes: of all slots together.
    """

    def __init__(self, *, pinned: bool = False, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._pinned = pinned
        self._max_bytes = max_bytes
        self._free: dict[int, queue.SimpleQueue[torch.Tensor]] = {}
        self.held_nbytes = 0
        self.wait_s = 0.0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised, contiguous tensor on the CPU."""
        start_s = time.perf_counter()
        tensor = self._allocate(shape, dtype)
        self.wait_s += time.perf_counter() - start_s
        return tensor

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes and get_worker_info() is not None:
            storage = torch.UntypedStorage._new_shared(nbytes)  # type: ignore[no-untyped-call]
            flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
            return flat.view(dtype).view(shape)
        memory = self._take(nbytes) if nbytes >= _REUSE_NBYTES and not self._pinned else None
        if memory is None:
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self._pinned)
        return self._lease(memory, nbytes, dtype).view(shape)

    def _take(self, nbytes: int) -> torch.Tensor | None:
        free = self._free.setdefault(nbytes, queue.SimpleQueue())
        try:
            return free.get_nowait()
        except queue.Empty:
            if self.held_nbytes + nbytes > self._max_bytes:
                return None
            self.held_nbytes += nbytes
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def _lease(self, memory: torch.Tensor, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        # torch keeps the buffer's owner until the storage dies, whoever looks into it last. The
        # queue takes the slot back from whatever thread that is, also in the middle of a `get`.
        owner = (ctypes.c_char * nbytes).from_address(memory.data_ptr())
        weakref.finalize(owner, self._free[nbytes].put, memory).atexit = False
        return torch.frombuffer(owner, dtype=dtype)
