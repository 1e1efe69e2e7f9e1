"""Memory for batches: fresh, shared between processes, pinned, or leased buffers that return."""

import ctypes
import math
import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.utils.data import get_worker_info

# From this size on fresh memory costs more than a lease: the C library gives freed pages back to
# the system, and the next batch faults them in again, as images of 9.6 MB a batch showed.
LEASED_NBYTES = 1 << 20
_CPU = torch.device("cpu")


def can_pin() -> bool:
    """Say whether torch pins memory here: not without an accelerator, nor on Apple's GPUs."""
    kind = getattr(torch.accelerator.current_accelerator(), "type", None)
    return torch.accelerator.is_available() and kind != "mps"


class Memory:
    """Gives out memory for the tensors of batches and takes it back when they are gone.

    Large tensors are leased: a buffer is free again when the last tensor in it, or the last
    autograd graph that saved one, has died; never earlier. When none is free, one is made.
    """

    def __init__(self, *, pinned: bool = False, max_bytes: int = 1 << 30) -> None:
        """Keep four buffers, of at most `max_bytes` together, for the next batches."""
        self.pinned, self._max_bytes = pinned, max_bytes
        self.free: deque[_Lease] = deque(maxlen=4)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised, contiguous tensor on the CPU."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes and get_worker_info() is not None:  # shared with the parent, as in torch
            storage = torch.UntypedStorage._new_shared(nbytes)  # type: ignore[no-untyped-call]
        elif LEASED_NBYTES <= nbytes <= self._max_bytes and not self.pinned:
            storage = self._lease(nbytes)
        else:  # torch keeps a freed pinned block until the copies from it are done
            return torch.empty(shape, dtype=dtype, device=_CPU, pin_memory=self.pinned)
        # A tensor of its own, contiguous: a view could not be detached in place.
        empty: Any = torch.empty(0, dtype=dtype, device=_CPU)
        return empty.set_(storage, 0, shape)  # type: ignore[no-any-return]

    def _lease(self, nbytes: int) -> torch.UntypedStorage:
        """Return the memory of a buffer of this size or somewhat more; drop what is too much."""
        memory, held = None, 0
        with suppress(IndexError):  # another thread may take one meanwhile: each call is atomic
            for _ in range(len(self.free)):
                lease = self.free.pop()  # the last one, which may still be in the caches
                size = lease.memory.nbytes
                if memory is None and nbytes <= size <= nbytes + nbytes // 2:
                    memory = lease.memory
                elif held + size <= self._max_bytes:
                    held += size
                    self.free.appendleft(lease)
        if memory is None:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=_CPU)
        # torch keeps the buffer's owner alive as long as the storage.
        owner: Any = (ctypes.c_char * nbytes).from_address(memory.data_ptr())
        owner.lease = lease = _Lease(owner, self.free.append)
        lease.memory = memory
        return torch.frombuffer(owner, dtype=torch.uint8).untyped_storage()

    def __reduce__(self) -> Any:
        """Pickle without the buffers."""
        return partial(Memory, pinned=self.pinned, max_bytes=self._max_bytes), ()


class _Lease(weakref.ref[Any]):
    """Holds a buffer's memory. The buffer's owner holds it, and at its death calls `free.append`.

    No Python code runs then, in any thread: a KeyboardInterrupt raised there would be lost.
    """

    __slots__ = ("memory",)
    memory: torch.Tensor
