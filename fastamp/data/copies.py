"""Copies of batches to a device, on a side stream, while the device computes."""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor

from fastamp._ops import untraced
from fastamp.data.items import Failed, Made, Parts, attempt
from fastamp.data.position import find_save
from fastamp.data.runners import in_box
from fastamp.data.structure import map_tensors

T = TypeVar("T")
_LATE = 32  # batches that a consumer may be ahead of its stream
_sides: dict[torch.device, torch.cuda.Stream] = {}
"""The side stream of each device. torch hands out 32 in turn, and keeps memory for each of them."""


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
        if device is None:
            return batch, None
        return map_tensors(lambda t: t.to(device), batch, movable=True), None

    def deliver(self, batch: Any, copied: None) -> Any:
        """Return a batch as it is."""
        del copied
        return batch


def make_copies(device: torch.device | None, *, keeps: bool) -> "CudaCopies | Moves":
    """Return what brings batches to a device; see `CudaCopies`."""
    if device is None or device.type != "cuda":
        return Moves(device)
    if device == torch.device("cuda"):  # the current device, which is another one in another thread
        device = torch.device("cuda", torch.cuda.current_device())
    return CudaCopies(device, keeps=keeps)


class _Copied(NamedTuple):
    """A batch that is copied to the device, and its events."""

    done: torch.cuda.Event
    tensors: list[Tensor]
    others: list[Any]
    """Tensors of other layouts and of subclasses, and objects, which are not copied yet."""
    taken: torch.cuda.Event
    """Recorded on the consumer's stream when it takes the batch."""


class CudaCopies:
    """Copies batches to a CUDA device on a stream of its own.

    1. `keeps` says that the source keeps the memory of a batch, and may fill it again once the next
       batch is requested.
    2. Memory that the consumer drops is free only when its stream gets there. If the stream is many
       batches behind, the copying thread waits for it: else these batches would fill the device.
    """

    def __init__(self, device: torch.device, *, keeps: bool) -> None:
        self._device, self._keeps = device, keeps
        self._taken: deque[torch.cuda.Event] = deque()  # of the last batches
        if device not in _sides:
            _sides[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._side = _sides[device]
        self._reading: torch.cuda.Event | None = None  # ends copies out of kept memory

    @contextmanager
    def thread(self) -> Iterator[None]:
        """Set the copying thread's device."""
        torch.cuda.set_device(self._device)
        yield

    def settle(self) -> None:
        """Wait until no copy reads memory that may be filled again."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.synchronize()

    def start(self, batch: Any) -> tuple[Any, _Copied]:
        """Start the copy of a batch, and return it as it will be."""
        done, taken = (torch.cuda.Event(blocking=True) for _ in range(2))  # type: ignore[no-untyped-call]
        if len(self._taken) > _LATE + 1:  # one may be ahead
            self._taken.popleft().synchronize()
        copied = _Copied(done, [], [], taken)
        current = torch.cuda.current_stream(self._device)

        def destination(tensor: Any) -> Any:
            is_plain = type(tensor) in (Tensor, torch.nn.Parameter)  # `to` keeps a subclass
            if not is_plain or tensor.layout is not torch.strided or tensor.is_nested:
                copied.others.append(tensor)
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

        with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(self._side):
            try:
                moved = map_tensors(destination, batch, movable=True)
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
        if not copied.others:
            return batch
        return map_tensors(lambda t: t.to(self._device), batch, movable=True)


class Copied(Iterator[Any]):
    """Batches on a device, each taken from its runner, and copied, when it is asked for.

    The consumer's stream waits for the copy, the consumer does not.
    """

    def __init__(
        self, batches: Iterator[Made | Failed], device: torch.device, *, keeps: bool
    ) -> None:
        self._batches, self._copies = batches, make_copies(device, keeps=keeps)
        is_cuda = isinstance(self._copies, CudaCopies)
        self._on_device = torch.cuda.device(device) if is_cuda else nullcontext()

    def __next__(self) -> Made | Failed:
        self._copies.settle()
        made = next(self._batches)
        return made if type(made) is Failed else attempt(self._copy, made)

    def __del__(self) -> None:
        self._copies.settle()

    def _copy(self, batch: Any, *times: float) -> Made:
        with self._on_device:
            begun = self._copies.start(batch)
        return Made(self._copies.deliver(*begun), *times)


def make_ahead(
    make: Callable[..., Made], copies: "CudaCopies", rows: Any, order: Any, number: int
) -> Made:
    """Make a batch in the copying thread, and begin its copy."""
    with copies.thread():
        made = make(rows, order, number)
        if type(made.batch) is not Parts:
            return made._replace(batch=copies.start(made.batch))
        tensors, keys = made.batch
        return made._replace(batch=Parts(copies.start(tensors), keys))


def deliver_ahead(
    finish: Callable[..., Any], copies: "CudaCopies", made: Made | Failed
) -> Made | Failed:
    """Return a batch of `make_ahead` on its device, for the current stream."""
    if type(made) is Failed:
        return made
    return attempt(partial(_deliver, finish, copies), made)


def _deliver(finish: Callable[..., Any], copies: "CudaCopies", batch: Any, *times: float) -> Made:
    if type(batch) is not Parts:
        return Made(copies.deliver(*batch), *times)
    return Made(finish(copies.deliver(*batch.tensors), batch.keys), *times)


def prefetch(
    iterable: Iterable[T], device: torch.device | str | int | None = None, *, thread: bool = False
) -> "Prefetcher[T]":
    """Copy the batches of an iterable to a device while the device computes.

    1. A batch is taken from the iterable in the caller's thread, one ahead of the loop. Iterables
       with a `state_dict`, as a loader's, are asked for a batch when the loop asks: their position
       is always that of the batch delivered.
    2. For a CUDA device the tensors that are not pinned are pinned, and their copy starts on a side
       stream, which also allocates their memory. The copy does not wait for the consumer's stream.
       Memory that the iterable itself has pinned may be filled again: before the next batch is
       taken, copies out of it have ended.
    3. When the loop asks for the batch, its current stream waits for the copy; the loop does not.
       The batch is recorded on this stream (`Tensor.record_stream`), so that it may be dropped at
       any time. To use it on another stream, treat it as a tensor made on this one. If this stream
       falls 32 batches behind, the caller waits for it.

    Without a device, or with the CPU, only the first step happens.

    Args:
        iterable: of batches: tensors, and objects with a method `to`, in any nesting of dicts,
            lists, tuples and dataclasses. A `fastamp.DataLoader` is read as with its own `device=`.
        device: of the batches; None leaves them where they are.
        thread: run the iterable in a thread, one batch ahead, for slow generators that may run
            there. Draws from the program's global generators are not repeatable there.

    Returns:
        An iterable with the length of the one that it wraps, and `state_dict` and `load_state_dict`
        if that has them: the state as of the batch delivered. Each `iter` begins a new pass. An
        exception of the iterable is raised where its batch would have come; the pass continues if
        the iterable does.

    Example:
        >>> for batch in fastamp.prefetch([torch.zeros(2), torch.ones(2)], device="cpu"):
        ...     print(batch)
        tensor([0., 0.])
        tensor([1., 1.])
    """
    return Prefetcher(iterable, None if device is None else torch.device(device), thread)


@dataclass(eq=False, repr=False)
class Prefetcher(Iterable[T], Generic[T]):
    """What `prefetch` returns."""

    _iterable: Any
    _device: torch.device | None
    _thread: bool

    def __post_init__(self) -> None:
        self._pass: Callable[[], PrefetchPass[T] | None] = lambda: None

    @untraced
    def __iter__(self) -> Iterator[T]:
        """Begin a pass."""
        begin_pass = getattr(self._iterable, "_begin_for", None)
        own: Iterator[T] | None = begin_pass and begin_pass(self._device, thread=self._thread)
        if own is not None:
            return own
        begun = PrefetchPass[T](self._iterable, self._device, thread=self._thread)
        self._pass = ref(begun)
        return begun

    def __len__(self) -> int:
        if not isinstance(self._iterable, Sized):
            msg = f"{type(self._iterable).__name__} has no length"
            raise TypeError(msg)
        return len(self._iterable)

    def __getattr__(self, name: str) -> Any:
        """Return the methods of a state, if the iterable has them."""
        if name == "state_dict" and find_save(self._iterable):
            return self._save
        if name == "load_state_dict":
            return self._iterable.load_state_dict
        msg = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(msg)

    def _save(self) -> Any:
        """Return the iterable's state as of the batch delivered."""
        begun = self._pass()
        return self._iterable.state_dict() if begun is None else begun.state()


class _Taken(NamedTuple):
    """A batch whose copy has begun, or an error, and the iterable's state after it."""

    begun: Any
    error: Exception | None
    state: Any


class PrefetchPass(Iterator[T], Generic[T]):
    """One pass over an iterable."""

    def __init__(self, iterable: Any, device: torch.device | None, *, thread: bool) -> None:
        self._copies = make_copies(device, keeps=True)
        save = find_save(iterable)
        # An iterable with a state is read ahead in a thread alone, and then asked after each batch.
        self._is_ahead, self._ended, self._owner_pid = save is None, False, os.getpid()
        self._save, self._state = save, save() if save and thread else None
        self._iterator, self._device = iter(iterable), device
        self._ahead: _Taken | None = None
        self._pool = ThreadPoolExecutor(1, "fastamp") if thread else None
        self._grad = torch.is_grad_enabled()
        if self._pool is not None:
            self._future = self._pool.submit(in_box, self._taker())

    @untraced
    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        if self._owner_pid != os.getpid() and self._pool is not None:
            msg = "this iterator was made before the process forked: call iter() in the child"
            raise RuntimeError(msg)
        taken = self._take_next()
        try:
            if taken.error is not None:
                raise taken.error
            return self._copies.deliver(*taken.begun)  # type: ignore[no-any-return]
        finally:
            del taken  # whose error's traceback refers to this frame

    def _take_next(self) -> _Taken:
        """Return the next batch, and begin the one after it."""
        if self._pool is not None:
            taken = self._future.result().pop()
        else:
            taken, self._ahead = self._ahead or self._taker()(), None
        self._state = taken.state
        self._ended = isinstance(taken.error, StopIteration)
        if self._ended:
            self.close()
        elif self._pool is not None:
            self._future = self._pool.submit(in_box, self._taker())
        elif self._is_ahead:
            try:
                self._ahead = self._taker()()
            except BaseException:  # Ctrl-C: this batch is still to come
                self._ahead = taken
                raise
        return taken

    def _taker(self) -> Callable[[], _Taken]:
        """Return what takes a batch. It holds no reference to the pass, whose end ends a thread."""
        copies: Any = self._copies
        place: Callable[[], Any] = nullcontext
        if self._pool is not None:
            place = copies.thread
        elif isinstance(copies, CudaCopies):
            place = partial(torch.cuda.device, self._device)
        save = self._save if self._pool is not None else None
        return partial(_take, self._iterator, copies, place, save, self._grad)

    def state(self) -> Any:
        """Return the iterable's state as of the batch delivered."""
        return self._state if self._pool is not None or self._save is None else self._save()

    def close(self) -> None:
        """End the pass and its thread; what was taken ahead is dropped."""
        self._ended, self._ahead, pool = True, None, self._pool
        if self._owner_pid != os.getpid() or sys.is_finalizing():
            return
        with suppress(RuntimeError):  # in the thread itself
            if pool is not None and hasattr(self._iterator, "close"):
                pool.submit(self._iterator.close)  # a generator ends in the thread that ran it
            if pool is not None:
                pool.shutdown()
        self._copies.settle()

    def __del__(self) -> None:
        if hasattr(self, "_grad"):
            self.close()


def _take(
    iterator: Iterator[Any],
    copies: CudaCopies | Moves,
    place: Callable[[], Any],
    save: Callable[[], Any] | None,
    grad: bool,  # noqa: FBT001 - of the loop's thread
) -> _Taken:
    """Take a batch, and begin its copy."""
    torch.set_grad_enabled(grad)
    with place():
        copies.settle()
        try:
            begun, error = copies.start(next(iterator)), None
        except Exception as raised:  # noqa: BLE001 - raised where the batch would be delivered
            begun, error = None, raised
        try:
            return _Taken(begun, error, save and save())
        finally:
            del error  # whose traceback refers to this frame
