"""Batches made ahead of their consumer by a thread, and copied to the device on a side stream."""

import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from fastamp._ops import apart_from_captures, untraced
from fastamp.data.checks import as_integer
from fastamp.data.own_threads import join, live, start
from fastamp.data.position import mark_undelivered
from fastamp.data.structure import map_tensors

T = TypeVar("T")
Taken: TypeAlias = tuple[Any, BaseException | None, Callable[[], object]]
"""A batch, or the error in its place, and what to call when it is delivered."""
FORKED = (
    "this iterator was made before the process forked and its thread stayed behind: "
    "call iter() in the child"
)
_LATE = 32  # batches that a consumer may be ahead of its stream


def prefetch(
    iterable: Iterable[T], device: torch.device | str | int | None = None, depth: int = 2
) -> "Prefetcher[T]":
    """Make the batches of an iterable ahead of the loop that consumes them.

    1. A thread takes batches from the iterable, at most `depth` ahead. Its Python code runs in that
       thread: draws from the program's global generators are not repeatable there.
    2. For a CUDA device it pins the tensors that are not pinned, and starts their copy on a side
       stream, which also allocates their memory. The copy does not wait for the consumer's stream.
       Memory that the iterable itself has pinned may be filled again: before the thread takes the
       next batch, it waits for copies out of it.
    3. When the consumer asks for the batch, its current stream waits for the copy; the consumer
       does not. The batch is recorded on this stream (`Tensor.record_stream`), so that it may be
       dropped at any time. To use it on another stream, treat it as a tensor made on this one. If
       this stream falls 32 batches behind, the thread waits for it.

    Without a device, or with the CPU, only step 1 happens.

    Args:
        iterable: of batches: tensors, in any nesting of dicts, lists, tuples and dataclasses. It is
            consumed in the thread.
        device: of the batches; None leaves them where they are.
        depth: batches to have ready, at least 1.

    Returns:
        An iterable with the length of the one it wraps. Each `iter` of it begins a new pass, with a
        thread of its own, which ends with the pass, or when the pass is dropped or closed. An
        exception of the iterable is raised where its batch would have come, with the traceback of
        its origin; the pass continues if the iterable does.

    Raises:
        ValueError: `depth` is not an integer of at least 1.

    Example:
        >>> for batch in fastamp.prefetch([torch.zeros(2), torch.ones(2)], device="cpu"):
        ...     print(batch)
        tensor([0., 0.])
        tensor([1., 1.])
    """
    depth = as_integer("depth", depth, least=1, optional=False)
    return Prefetcher(iterable, None if device is None else torch.device(device), depth)


@dataclass(eq=False, repr=False)
class Prefetcher(Iterable[T], Generic[T]):
    """What `prefetch` returns."""

    _iterable: Iterable[T]
    _device: torch.device | None
    _depth: int

    @untraced
    def __iter__(self) -> "Pass[T]":
        """Begin a pass."""
        return Pass(self._iterable, self._device, self._depth)

    def __len__(self) -> int:
        if not isinstance(self._iterable, Sized):
            msg = f"{type(self._iterable).__name__} has no length"
            raise TypeError(msg)
        return len(self._iterable)


class Pass(Iterator[T], Generic[T]):
    """One pass over an iterable, with the thread that runs ahead."""

    def __init__(self, iterable: Iterable[T], device: torch.device | None, depth: int) -> None:
        source = iter(iterable)
        # A loader's own pass says when its position moves: when a batch is delivered.
        take = source.take_ahead() if hasattr(source, "take_ahead") else partial(_take, source)
        self._copies = make_copies(device, depth, keeps=True)
        # Batches with their copies, or errors, and what to call at the delivery.
        self._ready: SimpleQueue[Taken] = SimpleQueue()
        # None for each batch that there is room for, and anything else at the end.
        self._room: SimpleQueue[Any] = SimpleQueue()
        for _ in range(depth):
            self._room.put(None)
        self._stopped: list[bool] = []  # is empty until the end
        self._owner_pid = os.getpid()
        # The thread holds no reference to this object, whose end ends the thread.
        grad = torch.is_grad_enabled()
        ended = weakref.ref(self, self._room.put)  # no Python code, which Ctrl-C could interrupt
        shared = source, take, self._copies, self._ready, self._room, self._stopped, grad, ended
        self._thread = threading.Thread(target=_produce, args=shared, name="fastamp", daemon=True)
        start(self._thread)
        live.add(self)

    @untraced
    def __next__(self) -> T:
        if self._stopped:
            raise StopIteration
        if self._owner_pid != os.getpid():
            raise RuntimeError(FORKED)
        try:
            begun, error, delivered = self._ready.get()
        except RuntimeError as died:  # of torch's signal handler
            raise mark_undelivered(died)  # noqa: B904 - the same error
        self._room.put(None)
        delivered()
        if error is not None:
            if is_last(error):
                self.close()
            try:
                raise error
            finally:
                del error  # whose traceback refers to this frame
        return cast("T", self._copies.deliver(*begun))

    def close(self) -> None:
        """End the pass and its thread; what was ready is dropped."""
        self._stopped.append(True)
        if self._owner_pid != os.getpid():
            return
        self._room.put("end")
        self._ready.put((None, StopIteration(), bool))  # for another thread that waits for a batch
        # While the interpreter ends, no other thread runs.
        if self._thread is not threading.current_thread() and not sys.is_finalizing():
            join(self._thread)

    def __del__(self) -> None:
        if hasattr(self, "_thread"):
            self.close()


def is_last(error: BaseException) -> bool:
    """Say whether an error ends the pass; a batch that cannot be made does not."""
    return isinstance(error, StopIteration) or not isinstance(error, Exception)


def _take(iterator: Iterator[Any]) -> Taken:
    return next(iterator), None, bool


def _produce(
    iterator: Iterator[Any],
    take: Callable[[], Taken],
    copies: "CudaCopies | Moves",
    ready: SimpleQueue[Taken],
    room: SimpleQueue[Any],
    stopped: list[bool],
    grad: bool,  # noqa: FBT001 - a thread's argument
    _ended: object,
) -> None:
    torch.set_grad_enabled(grad)  # of this thread
    with copies.thread():
        while True:
            if room.get() is not None or stopped:
                break
            delivered: Callable[[], object] = bool
            try:
                copies.settle()
                batch, error, delivered = take()
                begun = copies.start(batch) if error is None else None
                ready.put((begun, error, delivered))
                del batch, begun  # held no longer than the consumer holds it
                if error is not None and is_last(error):
                    break
                del error
            except BaseException as failed:  # noqa: BLE001 - raised where the consumer is
                ready.put((None, failed, delivered))
                if is_last(failed):
                    break
        try:
            copies.settle()
        finally:
            close = getattr(iterator, "close", None)  # a generator ends in the thread that ran it
            if close is not None:
                close()
            # Errors in `ready` refer to this frame: a cycle, which would keep the iterator alive.
            del ready, iterator, take, close, delivered


class Moves:
    """Moves batches to a device that is not CUDA, or leaves them where they are."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self.thread = nullcontext

    def settle(self) -> None:
        """Wait for nothing: a move has ended when it returns."""

    def start(self, batch: Any) -> tuple[Any, None]:
        """Return a batch on the device."""
        device = self._device
        return batch if device is None else map_tensors(lambda t: t.to(device), batch), None

    def deliver(self, batch: Any, copied: None) -> Any:
        """Return a batch as it is."""
        del copied
        return batch


def make_copies(device: torch.device | None, ahead: int, *, keeps: bool) -> "CudaCopies | Moves":
    """Return what brings batches to a device; see `CudaCopies`."""
    if device is None or device.type != "cuda":
        return Moves(device)
    if device == torch.device("cuda"):  # the current device, which is another one in another thread
        device = torch.device("cuda", torch.cuda.current_device())
    return CudaCopies(device, ahead, keeps=keeps)


class _Copied(NamedTuple):
    """A batch that is copied to the device, and its events."""

    done: torch.cuda.Event
    tensors: list[Tensor]
    left: list[Tensor]
    """Tensors of other layouts and of subclasses, which are not copied yet."""
    taken: torch.cuda.Event
    """Recorded on the consumer's stream when it takes the batch."""


class CudaCopies:
    """Copies batches to a CUDA device on a stream of its own.

    1. `keeps` says that the source keeps the memory of a batch, and may fill it again once the next
       batch is requested.
    2. Memory that the consumer drops is free only when its stream gets there. If the stream is many
       batches behind, the copying thread waits for it: else these batches would fill the device.
    """

    def __init__(self, device: torch.device, depth: int, *, keeps: bool) -> None:
        self._device, self._keeps, self._most = device, keeps, depth + _LATE
        self._taken: deque[torch.cuda.Event] = deque()  # of the last batches
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._reading: torch.cuda.Event | None = None  # ends copies out of kept memory

    @contextmanager
    def thread(self) -> Iterator[None]:
        """Set the copying thread's device, and keep it out of CUDA graph captures of others."""
        torch.cuda.set_device(self._device)
        with apart_from_captures():
            yield

    def settle(self) -> None:
        """Wait until no copy reads memory that may be filled again."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.synchronize()

    def start(self, batch: Any) -> tuple[Any, _Copied]:
        """Start the copy of a batch, and return it as it will be."""
        done, taken = (torch.cuda.Event(blocking=True) for _ in range(2))  # type: ignore[no-untyped-call]
        if len(self._taken) == self._most:
            self._taken.popleft().synchronize()
        copied = _Copied(done, [], [], taken)
        current = torch.cuda.current_stream(self._device)

        def destination(tensor: Tensor) -> Tensor:
            is_own = type(tensor) not in (Tensor, torch.nn.Parameter)  # `to` keeps a subclass
            if is_own or tensor.layout is not torch.strided or tensor.is_nested:
                copied.left.append(tensor)
                return tensor
            if tensor.device.type != "cpu":
                self._side.wait_stream(current)  # which has made it
                target = tensor.to(self._device)
            else:
                target = torch.empty_like(tensor, device=self._device)
                if tensor.stride() != target.stride() or not tensor.is_pinned():
                    # A tensor with gaps would go through a copy that is not pinned.
                    tensor = torch.empty_like(target, device="cpu", pin_memory=True).copy_(tensor)
                elif self._keeps:
                    self._reading = done
                target.copy_(tensor, non_blocking=True)
            copied.tensors.append(target)
            return target

        with torch.no_grad(), torch.cuda.stream(self._side):
            try:
                moved = map_tensors(destination, batch)
            finally:
                done.record()
        self._taken.append(taken)
        return moved, copied

    def deliver(self, batch: Any, copied: _Copied) -> Any:
        """Let the current stream wait for the copy; keep the batch's memory until it is done."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copied.done)
        copied.taken.record(stream)
        for tensor in copied.tensors:
            tensor.record_stream(stream)
        return map_tensors(lambda t: t.to(self._device), batch) if copied.left else batch
