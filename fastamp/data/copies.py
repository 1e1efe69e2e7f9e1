"""Copies of batches to a device, on a side stream, while the device computes."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import repeat, takewhile
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastamp._ops import untraced
from fastamp.data.items import Made, attempt, change, is_batch
from fastamp.data.passes import LoaderPass, LoaderStats
from fastamp.data.position import Position, has_state
from fastamp.data.runners import in_threads
from fastamp.data.structure import map_tensors

T = TypeVar("T")
_LATE = 32  # batches that a consumer may be ahead of its stream
_sides: dict[torch.device, torch.cuda.Stream] = {}
"""The side stream of each device. torch hands out 32 in turn, and keeps memory for each of them."""


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

    1. Pinned memory is the source's, which may fill it again once the next batch is requested.
    2. Memory that the consumer drops is free only when its stream gets there. If the stream is many
       batches behind, the copying thread waits for it: else these batches would fill the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._reading: torch.cuda.Event | None = None  # ends copies out of the source's memory
        if device == torch.device("cuda"):  # the current one, which is another in other threads
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._taken: deque[torch.cuda.Event] = deque()  # of the last batches
        if device not in _sides:
            _sides[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._side = _sides[device]

    def enter_thread(self) -> None:
        """Set the copying thread's device."""
        torch.cuda.set_device(self._device)

    def settle(self) -> None:
        """Wait until no copy reads memory that may be filled again."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.synchronize()

    def __del__(self) -> None:
        self.settle()

    def take(self, batches: Iterator[Made]) -> Made:
        """Take the next batch, and begin its copy."""
        self.settle()
        made = next(batches)
        with torch.cuda.device(self._device):
            return change(self.start, made)

    def start(self, batch: Any, finish: Callable[[Any], Any] | None = None) -> tuple[Any, _Copied]:
        """Start the copy of a batch, finish it there, and return it as it will be."""
        done, taken = (torch.cuda.Event(blocking=True) for _ in range(2))  # type: ignore[no-untyped-call]
        if len(self._taken) > _LATE + 1:  # one may be ahead
            self._taken.popleft().synchronize()
        copied = _Copied(done, [], [], taken)
        current = torch.cuda.current_stream(self._device)

        def note(tensor: Tensor) -> Tensor:
            copied.tensors.append(tensor)
            return tensor

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
                else:
                    self._reading = done
                target.copy_(tensor, non_blocking=True)
            return note(target)

        with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(self._side):
            try:
                moved = map_tensors(destination, batch, movable=True)
                if finish is not None:
                    moved = finish(moved)
                    copied.tensors.clear()
                    map_tensors(note, moved)
            finally:
                done.record()
        self._taken.append(taken)
        return moved, copied

    def deliver(self, begun: tuple[Any, _Copied]) -> Any:
        """Let the current stream wait for the copy; keep the batch's memory until it is done."""
        batch, copied = begun
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copied.done)
        copied.taken.record(stream)
        for tensor in copied.tensors:
            tensor.record_stream(stream)
        return to_device(self._device, batch) if copied.others else batch


def copy_all(
    batches: Iterator[Made],
    device: torch.device | None,
    *,
    ahead: bool = False,
    thread: bool = False,
) -> Iterator[Made]:
    """Return batches on a device; with `ahead` on the way to CUDA, or `thread`, one is ahead."""
    copies = CudaCopies(device) if device is not None and device.type == "cuda" else None
    grad = torch.is_grad_enabled()
    taken = batches
    if copies is not None:
        taken = iter(partial(copies.take, batches), None)
    elif device is not None:
        taken = map(partial(change, partial(to_device, device)), batches)

    def begin(_number: int) -> Callable[[], Made]:
        torch.set_grad_enabled(grad)
        if copies is not None:
            copies.enter_thread()
        return partial(next, taken)

    if thread:
        batches = in_threads(1, "fastamp", begin, repeat(()), ahead=1)
        made: Iterator[Made] = takewhile(is_batch, batches)
    else:
        made = one_ahead(taken) if ahead and copies is not None else taken
    return made if copies is None else map(partial(change, copies.deliver), made)


def to_device(device: torch.device, batch: Any) -> Any:
    """Return a batch on a device, when its tensors and objects are there."""
    return map_tensors(lambda t: t.to(device), batch, movable=True)


def one_ahead(batches: Iterator[Made]) -> Iterator[Made]:
    """Take each batch before the one in front of it is delivered."""
    taken = deque([attempt(next, (batches,))])
    while is_batch(taken[0]):
        taken.append(attempt(next, (batches,)))
        yield taken.popleft()


def prefetch(
    iterable: Iterable[T], device: torch.device | str | int | None = None, *, thread: bool = False
) -> "Prefetcher[T]":
    """Copy the batches of an iterable to a device while the device computes.

    1. A batch is taken from the iterable in the caller's thread: for a CUDA device one ahead of the
       loop; from an iterable with a `state_dict` only when the loop asks, so that its position is
       that of the batch delivered.
    2. For a CUDA device the tensors are pinned, unless they are, and copied on a side stream.
       Memory that the iterable itself has pinned may be filled again once the next batch is asked
       for.
    3. When the loop asks for the batch, its current stream waits for the copy; the loop does not,
       unless this stream is 32 batches behind. The batch may be dropped at any time.

    Args:
        iterable: of batches: tensors, and objects with a method `to`, in any nesting of dicts,
            lists, tuples and dataclasses. A `fastamp.DataLoader` is read as with its own `device=`.
        device: of the batches; None leaves them where they are.
        thread: run the iterable in a thread, one batch ahead, for slow generators that may run
            there. Draws from the program's global generators are not repeatable there.

    Raises:
        ValueError: `thread` is set for an iterable with a state, as a loader has.

    Returns:
        An iterable with the length, `state_dict` and `load_state_dict` of the one that it wraps.
        Each `iter` begins a new pass.

    Example:
        >>> for batch in fastamp.prefetch([torch.zeros(2), torch.ones(2)], device="cpu"):
        ...     print(batch)
        tensor([0., 0.])
        tensor([1., 1.])
    """
    if thread and has_state(iterable):
        msg = "thread: expected False for an iterable with a state; a loader has workers of its own"
        raise ValueError(msg)
    return Prefetcher(iterable, None if device is None else torch.device(device), thread=thread)


class Prefetcher(Iterable[T], Generic[T]):
    """What `prefetch` returns."""

    def __init__(self, iterable: Any, device: torch.device | None, *, thread: bool) -> None:
        self._iterable, self._device, self._thread = iterable, device, thread
        if has_state(iterable):
            self.state_dict, self.load_state_dict = iterable.state_dict, iterable.load_state_dict

    @untraced
    def __iter__(self) -> Iterator[T]:
        """Begin a pass."""
        begin = getattr(self._iterable, "_begin_on", None)
        own: Iterator[T] | None = begin and begin(self._device)
        if own is not None:
            return own
        # Only copies are worth it: an iterable may write all batches into the same memory.
        ahead = not has_state(self._iterable)
        batches: Iterator[Made] = map(Made, iter(self._iterable))
        batches = copy_all(batches, self._device, ahead=ahead, thread=self._thread)
        return LoaderPass(batches, Position(), LoaderStats(), self.__len__)

    def __len__(self) -> int:
        return len(self._iterable)
