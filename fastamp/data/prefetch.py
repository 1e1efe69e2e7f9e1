"""Batches made ahead of their consumer by a thread, and copied to the device on a side stream."""

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

import torch

from fastamp.data.structure import map_tensors

T = TypeVar("T")
live: "weakref.WeakSet[Any]" = weakref.WeakSet()  # what has threads, with `close`
FORKED = (
    "this iterator was made before the process forked and its thread stayed behind: "
    "call iter() in the child"
)
JOIN_S = 2.0  # a producer that hangs in the user's code is left behind, as a daemon


def prefetch(
    iterable: Iterable[T], device: torch.device | str | int | None = None, depth: int = 2
) -> "Prefetcher[T]":
    """Make the batches of an iterable ahead of the loop that consumes them.

    1. A thread takes batches from the iterable, at most `depth` ahead.
    2. For a CUDA device it pins the tensors that are not, and starts their copy on a side stream.
       The memory comes from the consumer's stream, and the copy waits for the work that this stream
       had before, so that a block that the consumer has dropped is not overwritten while it is
       read.
    3. The consumer's stream waits for the copy; the consumer does not. What it gets is ordinary
       memory of its own stream: nothing is recorded on it, and nothing need be.

    Without a device, or with the CPU, only step 1 happens.

    Args:
        iterable: of batches: tensors, in any nesting of dicts, lists, tuples and dataclasses. It is
            consumed in the thread.
        device: where the batches shall be; None leaves them where they are.
        depth: batches to have ready, at least 1.

    Returns:
        An iterable with the length of the one it wraps. Each `iter` of it begins a new pass, with a
        thread of its own, which ends with the pass, or when the pass is dropped or closed. An
        exception of the iterable is raised where its batch would have come, with the traceback of
        its origin; the pass continues if the iterable does.

    Raises:
        ValueError: `depth` is less than 1.
    """
    if depth < 1:
        msg = f"depth: expected at least 1, got {depth}"
        raise ValueError(msg)
    found = None if device is None else torch.device(device)
    if found == torch.device("cuda"):  # the current device, which is another one in the thread
        found = torch.device("cuda", torch.cuda.current_device())
    return Prefetcher(iterable, found, depth)


@dataclass(eq=False, repr=False)
class Prefetcher(Iterable[T], Generic[T]):
    """What `prefetch` returns."""

    _iterable: Iterable[T]
    _device: torch.device | None
    _depth: int

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

    def __init__(
        self,
        iterable: Iterable[T],
        device: torch.device | None,
        depth: int,
        timeout_s: float = 0,
    ) -> None:
        self._timeout_s = timeout_s or None
        self._copies = CudaCopies(device) if device and device.type == "cuda" else None
        # Batches with the event of their copy's end or None, and errors in place of batches.
        self._ready: SimpleQueue[tuple[Any, Any] | BaseException] = SimpleQueue()
        # Nothing for each batch that there is room for, and anything else at the end.
        self._room: SimpleQueue[Any] = SimpleQueue()
        for _ in range(depth):
            self._room.put(None)
        self._stop = threading.Event()
        self._owner_pid = os.getpid()
        move = self._copies.start if self._copies else partial(_move, device)
        # The thread holds no reference to this object, whose end is what ends the thread.
        grad = torch.is_grad_enabled()
        ended = weakref.ref(self, self._room.put)  # no Python, in which Ctrl-C may come
        shared = (iter(iterable), move, self._ready, self._room, self._stop, grad, ended)
        self._thread = threading.Thread(target=_produce, args=shared, name="fastamp", daemon=True)
        self._thread.start()
        live.add(self)

    def __next__(self) -> T:
        if self._stop.is_set():
            raise StopIteration
        if self._owner_pid != os.getpid():
            raise RuntimeError(FORKED)
        if self._copies:
            self._copies.follow_consumer()
        item = self._ready.get(timeout=self._timeout_s)
        self._room.put(None)
        if isinstance(item, BaseException):
            if is_last(item):
                self.close()
            try:
                raise item
            finally:
                del item  # whose traceback refers to this frame
        batch, copied = item
        if copied is not None:
            copied.wait()
        return cast("T", batch)

    def close(self) -> None:
        """End the pass and its thread; what was ready is dropped."""
        self._stop.set()
        if self._owner_pid != os.getpid():
            return
        self._room.put("end")
        # While the interpreter ends, no other thread runs.
        if self._thread is not threading.current_thread() and not sys.is_finalizing():
            join(self._thread)
        if self._copies:
            self._copies.finish()

    def __del__(self) -> None:
        if hasattr(self, "_thread"):
            self.close()


def join(thread: threading.Thread) -> None:
    """Wait for a thread's end, if it began: Ctrl-C may have come in between."""
    with contextlib.suppress(RuntimeError):
        thread.join(JOIN_S)


@atexit.register
def _close_live() -> None:
    """End all passes before the interpreter ends, which aborts on a thread that computes."""
    for owner in list(live):
        owner.close()


def is_last(error: BaseException) -> bool:
    """Say whether the pass ends with it, as it does not with a batch that cannot be made."""
    return isinstance(error, StopIteration) or not isinstance(error, Exception)


def _produce(
    iterator: Iterator[Any],
    move: Callable[[Any], tuple[Any, Any]],
    ready: SimpleQueue[tuple[Any, Any] | BaseException],
    room: SimpleQueue[Any],
    stop: threading.Event,
    grad: bool,  # noqa: FBT001 - a thread's argument
    _ended: object,
) -> None:
    torch.set_grad_enabled(grad)  # of this thread
    while True:
        if room.get() is not None or stop.is_set():
            break
        try:
            batch = next(iterator)
            ready.put(move(batch))
            del batch  # held no longer than the consumer holds it
        except BaseException as error:  # noqa: BLE001 - raised where the consumer is
            ready.put(error)
            if is_last(error):
                break
    close = getattr(iterator, "close", None)  # a generator ends in the thread that ran it
    if close is not None:
        close()


def _move(device: torch.device | None, batch: Any) -> tuple[Any, None]:
    moved = batch if device is None else map_tensors(lambda tensor: tensor.to(device), batch)
    return moved, None


class CudaCopies:
    """Copies batches to a CUDA device on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._last: torch.cuda.Event | None = None
        self.follow_consumer()

    def follow_consumer(self) -> None:
        """Take memory from the stream that is current in the calling thread from now on."""
        self._consumer = torch.cuda.current_stream(self._device)

    def start(self, batch: Any) -> tuple[Any, torch.cuda.Event]:
        """Start the copy of a batch; return its tensors on the device, and the event of its end."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

        def destination(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
                return tensor.to(self._device)
            pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
            pairs.append((torch.empty_like(tensor, device=self._device), pinned))
            return pairs[-1][0]

        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.no_grad(), torch.cuda.stream(self._consumer):
            moved = map_tensors(destination, batch)
            # Whoever had this memory before launched all of its work before dropping it.
            dropped = torch.cuda.Event()  # type: ignore[no-untyped-call]
            dropped.record()
        with torch.no_grad(), torch.cuda.stream(self._side):
            dropped.wait()
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            done.record()
        self._last = done
        return moved, done

    def finish(self) -> None:
        """Let the consumer's stream wait for the copies into memory that is not delivered."""
        if self._last is not None:
            self._consumer.wait_event(self._last)
