"""Memory for batches: fresh, shared between processes, pinned, or leased from slots that return."""

import ctypes
import math
import os
import weakref
from collections import deque
from contextlib import nullcontext
from threading import Lock
from typing import Any

import torch
from torch.utils.data import get_worker_info

from fastamp._ops import apart_from_captures

DEFAULT_MAX_BYTES = 1 << 30
# From this size on fresh memory costs more than a lease: the C library gives freed pages back to
# the system, and the next batch faults them in again, as the images of `bench loader` show.
_REUSE_NBYTES = 1 << 20
_KNOWN_SHAPES = 64  # of small tensors: ragged batches bring new ones without end
_KEPT_FREE = 4  # of each size

_CPU = torch.device("cpu")


def can_pin() -> bool:
    """Say whether torch pins memory here: not without an accelerator, nor on Apple's GPUs."""
    if not torch.accelerator.is_available():
        return False
    found = torch.accelerator.current_accelerator()
    return found is None or found.type != "mps"


class Slots:
    """Gives out memory for the tensors of batches and takes it back when they are gone.

    1. In a worker process of torch's loader, memory is shared with the parent, as torch's collate
       functions do it, so that a batch is not copied on its way.
    2. Pinned memory, for batches that go to an accelerator, is torch's: its allocator keeps a
       freed block until the copies from it are done.
    3. Large batches are leased: a slot is free again when the last tensor in it, or the last
       autograd graph that saved one, has died; never earlier. When no slot is free, another is
       made, up to `max_bytes` in all; beyond that memory is fresh, and the caller's alone.
    4. Everything else is fresh: the allocator is faster than any ring.
    """

    def __init__(self, *, pinned: bool = False, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.pinned = pinned
        self._max_bytes = max_bytes
        self._lock = Lock()  # several threads may make batches
        self.owner_pid = os.getpid()  # in a forked child the lock may be held forever
        # By size: the slots that came back, and weak references to the memory of all slots.
        self._rings: dict[int, tuple[deque[_Lease], list[weakref.ref[torch.Tensor]]]] = {}
        self._small: dict[tuple[tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised, contiguous tensor on the CPU."""
        like = self._small.get((shape, dtype))
        if like is not None and get_worker_info() is None:
            # empty_like takes half the time of empty with a shape and a dtype.
            return torch.empty_like(like)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _REUSE_NBYTES and not self.pinned and len(self._small) < _KNOWN_SHAPES:
            like = self._small[shape, dtype] = torch.empty(shape, dtype=dtype, device=_CPU)
            like.untyped_storage().resize_(0)
        if nbytes and get_worker_info() is not None:
            storage = torch.UntypedStorage._new_shared(nbytes)  # type: ignore[no-untyped-call]
            flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
            return flat.view(dtype).view(shape)
        if nbytes >= _REUSE_NBYTES and not self.pinned:
            with self._lock:
                memory = self._lease(nbytes)
            if memory is not None:  # a tensor of its own: a view could not be detached in place
                return torch.empty(0, dtype=dtype, device=_CPU).set_(
                    memory, 0, shape, _strides(shape)
                )
        with apart_from_captures() if self.pinned else nullcontext():
            return torch.empty(shape, dtype=dtype, device=_CPU, pin_memory=self.pinned)

    def size(self, nbytes: int) -> int:
        """Return the bytes that an allocation takes; torch pins powers of two."""
        return 1 << (nbytes - 1).bit_length() if self.pinned and nbytes else nbytes

    @property
    def held_nbytes(self) -> int:
        """Bytes of all slots, leased or free."""
        for _, slots in self._rings.values():
            slots[:] = [slot for slot in slots if slot() is not None]
        return sum(nbytes * len(slots) for nbytes, (_, slots) in self._rings.items())

    def _lease(self, nbytes: int) -> torch.UntypedStorage | None:
        """Return the memory of a slot, which comes back when nothing refers to it."""
        # Four sizes for each power of two, so that ragged batches share slots.
        step = 1 << (nbytes.bit_length() - 3)
        size = -(-nbytes // step) * step
        free, slots = self._rings.setdefault(size, (deque(maxlen=_KEPT_FREE), []))
        try:
            memory = free.pop().memory  # the last one, which may still be in the caches
        except IndexError:
            if self.held_nbytes + size > self._max_bytes:
                return None
            memory = torch.empty(size, dtype=torch.uint8, device=_CPU)
            slots.append(weakref.ref(memory))
        # torch keeps the buffer's owner alive as long as the storage.
        owner: Any = (ctypes.c_char * nbytes).from_address(memory.data_ptr())
        owner.lease = lease = _Lease(owner, free.append)
        lease.memory = memory
        return torch.frombuffer(owner, dtype=torch.uint8).untyped_storage()


def _strides(shape: tuple[int, ...]) -> list[int]:
    """Return the strides of a contiguous tensor with dimensions and elements."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * size)
    return strides[::-1]


class _Lease(weakref.ref[Any]):
    """Holds a slot's memory. The buffer's owner holds it, and at its death calls `free.append`.

    No Python code runs then, in any thread: a KeyboardInterrupt raised there would be lost.
    """

    __slots__ = ("memory",)
    memory: torch.Tensor
