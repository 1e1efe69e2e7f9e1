"""A model of torch.cuda that finds what nothing orders: reads, writes and reuse of memory.

Devices, streams, events, both caching allocators, pinned memory, copies and captures, under threads
that take turns as a seed says. Each thread and each stream has a vector clock: what it knows to
have happened. An access is reported if the one before it is not among that. Tensors are torch's
own, on the CPU; which device they play is known by their storage. torch.cuda.stream and
torch.cuda.device are torch's own classes, on top of the model.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fastamp._ops import captures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Clock = dict[str, int]
READS = ("item", "tolist", "equal", "__bool__", "__float__", "__int__")


def join(clock: Clock, other: Clock) -> None:
    for name, time in other.items():
        if clock.get(name, 0) < time:
            clock[name] = time


def is_before(clock: Clock, other: Clock) -> bool:
    return all(other.get(name, 0) >= time for name, time in clock.items())


class Deadlock(BaseException):
    """No thread can go on."""


@dataclass(eq=False)
class Block:
    """Memory of an allocator, over all the tensors that it serves one after the other."""

    name: str
    device: int | None  # None: pinned memory of the host
    stream: Stream | None
    write: tuple[str, int] | None = None
    reads: Clock = field(default_factory=dict)
    is_filled: bool = False
    users: dict[str, Stream] = field(default_factory=dict)
    freed: Clock = field(default_factory=dict)


class Stream:
    """A stream of a device; in place of torch.cuda.Stream."""

    model: Model

    def __init__(self, device: Any = None, name: str = "") -> None:
        index = self.model.index_of(device)
        self.device, self.device_index = torch.device("cuda", index), index
        self.model.contexts.add(index)
        self.cuda_stream = self.stream_id = len(self.model.streams)
        self.name = name or f"cuda:{index} stream {self.cuda_stream}"
        self.clock: Clock = {}
        self.model.streams.append(self)

    def enqueue(self) -> Clock:
        """Give the stream something to do, after all that it has and the thread has done."""
        model, me = self.model, self.model.current
        model.switch()
        if model.captures.get(self, me) is not me:
            model.report(f"work on {self.name}, which another thread captures")
        model.contexts.add(self.device_index)
        join(self.clock, me.clock)
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.clock

    def wait_event(self, event: Event) -> None:
        self.enqueue()
        join(self.clock, event.clock or {})

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or self.model.Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return self is other


class Event:
    """In place of torch.cuda.Event."""

    model: Model

    def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
        self.clock: Clock | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or self.model.current_stream()).enqueue())

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.model.current_stream()).wait_event(self)

    def query(self) -> bool:
        self.model.unsafe("an event's query")
        if self.clock is None:
            return True
        if not is_before(self.clock, self.model.done) and self.model.rng.random() < 0.5:
            return False
        self.model.see(self.clock)
        return True

    def synchronize(self) -> None:
        self.model.unsafe("an event's synchronize")
        self.model.see(self.clock or {})

    def elapsed_time(self, end: Event) -> float:
        return 1.0


class Thread:
    """In place of threading.Thread: runs while it has the turn."""

    model: Model

    def __init__(self, target: Callable[..., None], args: Any = (), **_: Any) -> None:
        model = self.model
        self.name, self._target, self._args = f"thread {len(model.threads)}", target, args
        self.clock: Clock = {}
        self.device, self.mode = 0, 0  # global
        self.streams: dict[int, Stream] = {}
        self.weight = model.rng.choice((0.1, 1.0, 1.0, 5.0))
        self.turn, self.alive, self.native_id = threading.Semaphore(0), False, 0
        self.ready: Callable[[], bool] = lambda: True
        model.threads.append(self)

    def start(self) -> None:
        self.alive, self.clock = True, dict(self.model.current.clock)
        threading.Thread(target=self._run, daemon=True).start()
        self.model.switch()

    def _run(self) -> None:
        self.turn.acquire()
        with contextlib.suppress(Deadlock), self.model:
            try:
                self._target(*self._args)
            except BaseException as error:  # noqa: BLE001 - a thread that dies is a fault
                self.model.report(f"{self.name} ended with {error!r}")
            self._target = self._args = None  # dies in its turn
        self.alive = False
        self.model.hand_on(self)

    def join(self, timeout: float | None = None) -> None:
        self.model.switch(lambda: not self.alive)
        join(self.model.current.clock, self.clock)

    def is_alive(self) -> bool:
        return self.alive


class Primitive:
    """What threads wait for each other with: a queue, a semaphore, an event, a lock."""

    model: Model

    def __init__(self, value: int = 0) -> None:
        self.clock: Clock = {}
        self.value, self.items, self.owner = value, [], None

    def put(self, item: Any) -> None:
        self.items.append(item)
        self.release()

    def get(self, timeout: float | None = None) -> Any:
        self.acquire()
        return self.items.pop(0)

    def release(self) -> None:
        join(self.clock, self.model.current.clock)
        self.value += 1
        self.model.switch()

    def acquire(self) -> None:
        self.model.switch(lambda: self.value > 0)
        self.value -= 1
        join(self.model.current.clock, self.clock)

    def set(self) -> None:
        self.release()

    def is_set(self) -> bool:
        self.model.switch()
        if self.value:
            join(self.model.current.clock, self.clock)
        return self.value > 0

    def __enter__(self) -> None:  # an RLock
        me = self.model.current
        self.model.switch(lambda: self.owner in (None, me))
        self.owner, self.value = me, self.value + 1
        join(me.clock, self.clock)

    def __exit__(self, *_: object) -> None:
        join(self.clock, self.model.current.clock)
        self.value -= 1
        if not self.value:
            self.owner = None


def _record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    stream.model.switch()
    stream.model.block_of(tensor).users[stream.name] = stream


class Model(TorchFunctionMode):
    """The machine: devices, threads that take turns, memory, and what was found."""

    def __init__(self, seed: int, num_devices: int = 2) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.found: list[str] = []
        self.contexts: set[int] = set()
        self.streams: list[Stream] = []
        self.threads: list[Thread] = []
        self.blocks: dict[int, Block] = {}
        self.pools: dict[Any, list[Block]] = {}
        self.pending: list[tuple[Block, list[Clock]]] = []
        self.captures: dict[Stream, Thread] = {}
        self.consumers: set[str] = set()
        """Streams for whose work no copy may wait."""
        self.done: Clock = {}
        self.num_blocks = self.num_staged = self.num_allocated = 0
        self.dead = False
        kinds = (Stream, Event, Thread, Primitive)
        self.Stream, self.Event, self.Thread, self.Primitive = (
            type(kind.__name__, (kind,), {"model": self}) for kind in kinds
        )
        self.current = self.Thread(lambda: None)
        self.current.alive = True
        self.defaults = [self.Stream(index, f"cuda:{index}") for index in range(num_devices)]
        self.contexts.clear()
        # Compared by value: each look at a descriptor makes another wrapper.
        self._handlers: dict[Any, Callable[..., Any]] = {
            torch.Tensor.device.__get__: self._device,
            torch.Tensor.is_cuda.__get__: lambda tensor: self._device(tensor).type == "cuda",
            torch.Tensor.is_cpu.__get__: lambda tensor: self._device(tensor).type == "cpu",
            torch.Tensor.is_pinned: self._is_pinned,
            torch.Tensor.pin_memory: lambda t: self._copy(self._make("pinned", t), t),
            torch.Tensor.to: self._to,
            torch.Tensor.copy_: self._copy,
            torch.empty: self._empty,
            torch.empty_like: self._empty_like,
        }

    # Threads

    def switch(self, ready: Callable[[], bool] | None = None) -> None:
        """Let another thread go on, perhaps; and this one when it is ready."""
        me = self.current
        if ready is None:
            if len(self.threads) == 1 or self.rng.random() < 0.5:
                return
            ready = bool
            me.ready = lambda: True
        else:
            me.ready = ready
        self.hand_on(me)

    def hand_on(self, me: Thread) -> None:
        able = [thread for thread in self.threads if thread.alive and thread.ready()]
        if not able:
            self.dead = True
            for thread in self.threads:
                thread.turn.release()
        else:
            (self.current,) = self.rng.choices(able, [thread.weight for thread in able])
            if self.current is me:
                return
            self.current.turn.release()
        if me.alive:
            me.turn.acquire()
            if self.dead:
                raise Deadlock

    def report(self, fault: str) -> None:
        if fault not in self.found:
            self.found.append(fault)

    # Devices and streams

    def index_of(self, device: Any) -> int:
        index = device if isinstance(device, int | None) else torch.device(device).index
        return self.current.device if index is None else index

    def set_device(self, device: Any) -> int:
        before, index = self.current.device, self.index_of(device)
        if index != before:  # CUDA 12 makes a context here
            self.contexts.add(index)
            self.current.device = index
        return before

    def maybe_set_device(self, index: int) -> int:
        before, self.current.device = self.current.device, index
        return before

    def current_stream(self, device: Any = None) -> Stream:
        index = self.index_of(device)
        return self.current.streams.get(index, self.defaults[index])

    def set_stream(self, stream: Stream) -> None:
        self.set_device(stream.device_index)
        self.current.streams[stream.device_index] = stream

    def synchronize(self, device: Any = None) -> None:
        self.unsafe("synchronize")
        if any(stream.device_index == self.index_of(device) for stream in self.captures):
            self.report("a capture is broken by a wait for its device")
        for stream in self.streams:
            if stream.device_index == self.index_of(device):
                self.see(stream.clock)

    def see(self, clock: Clock) -> None:
        """Let the thread know that this has happened."""
        join(self.done, clock)
        join(self.current.clock, clock)
        self.switch()

    # Captures

    def is_capturing(self) -> bool:
        return self.current_stream() in self.captures

    def exchange_mode(self, mode: Any) -> None:
        """Play the driver's function, which gets a pointer to an integer."""
        mine, self.current.mode = self.current.mode, mode._obj.value
        mode._obj.value = mine

    def unsafe(self, call: str) -> None:
        """Make a call that a capture refuses to its own thread, and to those in global mode."""
        self.switch()
        owners = self.captures.values()
        if self.current in owners or (owners and self.current.mode == 0):
            self.report(f"a capture is broken by {call}")

    @contextlib.contextmanager
    def capture(self, stream: Stream) -> Iterator[None]:
        self.captures[stream] = self.current
        with torch.cuda.stream(stream):
            yield
            for _ in range(4):
                self.switch()
        del self.captures[stream]

    # Memory

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        if tensor.layout is not torch.strided:
            return None
        return self.blocks.get(tensor.untyped_storage().data_ptr())

    def access(self, block: Block, clock: Clock, name: str, *, write: bool) -> None:
        kind = "a write" if write else "a read"
        before = [("write", *block.write)] if block.write else []
        before += [("read", *read) for read in block.reads.items()] if write else []
        for what, other, time in before:
            if clock.get(other, 0) < time:
                self.report(f"{kind} of {block.name} by {name} after a {what} by {other}")
        if write:
            block.write, block.reads, block.is_filled = (name, clock[name]), {}, True
        else:
            block.reads[name] = clock[name]
            if not block.is_filled:
                self.report(f"a read of {block.name} by {name} before it was written")

    def by_host(self, tensor: torch.Tensor, *, write: bool) -> None:
        """Read or write memory in the thread itself."""
        block, me = self.block_of(tensor), self.current
        if block is not None:
            me.clock[me.name] = me.clock.get(me.name, 0) + 1
            self.access(block, me.clock, me.name, write=write)

    def kernel(self, *reads: torch.Tensor, writes: Any = (), stream: Stream | None = None) -> None:
        """Read and write tensors on a stream."""
        tensors = [*reads, *writes]
        stream = stream or self.current_stream(self.block_of(tensors[0]).device)
        clock = stream.enqueue()
        for tensor in tensors:
            block = self.block_of(tensor)
            if block is not None:
                write = any(tensor is other for other in writes)
                self.access(block, clock, stream.name, write=write)

    def _allocate(self, device: int | None) -> Block:
        stream = None if device is None else self.current_stream(device)
        me = self.current
        if device is None or not self.captures:
            for block, clocks in [*self.pending]:
                is_done = all(is_before(clock, self.done) for clock in clocks)
                if block.device != device or not (is_done or self.rng.random() < 0.5):
                    continue
                if device is None:
                    self.unsafe("an event's query, for pinned memory")
                if (block, clocks) not in self.pending:
                    continue  # another thread has
                self.pending.remove((block, clocks))
                for clock in clocks:
                    join(self.done, clock)
                    join(me.clock, clock)
                block.freed = dict(me.clock)
                self.pools.setdefault(block.stream, []).append(block)
        pool = self.pools.setdefault(stream, [])
        if pool and me not in self.captures.values() and self.rng.random() < 0.9:
            block = pool.pop(self.rng.randrange(len(pool)))
            join(me.clock, block.freed)
        else:
            if me not in self.captures.values():  # else torch relaxes its own mode for it
                self.unsafe("an allocation")
            self.num_blocks += 1
            kind = "pinned" if device is None else f"cuda:{device}"
            block = Block(f"{kind} block {self.num_blocks}", device, stream)
            if device is not None:
                self.contexts.add(device)
        block.users, block.is_filled = {}, False
        self.num_allocated += 1
        return block

    def _free(self, block: Block, address: int) -> None:
        self.blocks.pop(address, None)
        block.freed = dict(self.current.clock)
        clocks = []
        for stream in block.users.values():
            if stream is not block.stream:
                join(stream.clock, self.current.clock)
                clocks.append(dict(stream.clock))
        if clocks:
            self.pending.append((block, clocks))
        else:
            self.pools.setdefault(block.stream, []).append(block)

    def _make(self, device: Any, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the shape and strides of one, in pinned or a device's memory."""
        block = self._allocate(None if device == "pinned" else self.index_of(device))
        shape, strides = like.shape, like.stride()
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        owner: Any = (ctypes.c_char * max(extent * like.itemsize, 1))()
        flat = torch.frombuffer(owner, dtype=torch.uint8)
        self.blocks[ctypes.addressof(owner)] = block
        weakref.finalize(owner, self._free, block, ctypes.addressof(owner)).atexit = False
        if not like.numel():
            return flat[:0].view(like.dtype).view(shape)
        return flat.view(like.dtype).as_strided(shape, strides)

    # What torch's functions do

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = self._handlers.get(func, None)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        return self._account(func, args, kwargs or {})

    def _account(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function of torch, and say what it reads and writes, and where."""
        result, name = func(*args, **kwargs), getattr(func, "__name__", "")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is torch.Tensor]
        known = [tensor for tensor in tensors if self.block_of(tensor) is not None]
        if not known:
            return result
        device = next((d for t in known if (d := self.block_of(t).device) is not None), None)
        in_place = name == "__setitem__" or (name[-1:] == "_" and name[-2:] != "__")
        changed = tensors[:1] if in_place or name == "numpy" else []
        if kwargs.get("out") is not None:
            changed = [kwargs["out"]]
        elif not changed and type(result) is torch.Tensor and self.block_of(result) is None:
            if device is not None:
                plain, result = result, self._make(device, result)
                result.copy_(plain)
                changed = [result]
        elif not changed and name not in READS:  # a view, or a look at a shape
            return result
        reads = [t for t in known if not any(t is other for other in changed)]
        if device is None:
            for tensor in (*reads, *changed):
                self.by_host(tensor, write=any(tensor is other for other in changed))
            return result
        stream = self.current_stream(device)
        self.kernel(*reads, writes=changed, stream=stream)
        if name in READS:
            stream.synchronize()
        return result

    def _copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        non_blocking: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> torch.Tensor:
        target.copy_(source)
        ends = [(tensor, self.block_of(tensor)) for tensor in (target, source)]
        far = [block.device for _, block in ends if block and block.device is not None]
        if not far:
            self.by_host(source, write=False)
            self.by_host(target, write=True)
            return target
        stream, me = self.current_stream(far[0]), self.current
        for name in self.consumers if ends[0][1] and ends[0][1].device is not None else ():
            if stream.clock.get(name, 0) > me.clock.get(name, 0) and name != stream.name:
                self.report(f"a copy waits for work on {name}")
        self.kernel(source, writes=[target], stream=stream)
        for tensor, block in ends:
            if block and block.device is not None:
                continue
            staged = tensor.numel() > 0 and (not block or target.stride() != source.stride())
            self.num_staged += staged
            if block:  # as torch's host allocator does
                block.users[stream.name] = stream
            if staged or not non_blocking:
                stream.synchronize()
        return target

    def _device(self, tensor: torch.Tensor) -> torch.device:
        block = self.block_of(tensor)
        is_near = block is None or block.device is None
        return tensor.device if is_near else torch.device("cuda", block.device)

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        block = self.block_of(tensor)
        return block is not None and block.device is None

    def _place(self, made: torch.Tensor, device: Any, *, pinned: bool) -> torch.Tensor:
        device = torch.device(device or "cpu")
        if not pinned and device.type == "cpu":
            return made
        return self._make("pinned" if pinned else device, made)

    def _empty(self, *args: Any, pin_memory: bool = False, device: Any = None, **kw: Any) -> Any:
        return self._place(torch.empty(*args, **kw), device, pinned=pin_memory)

    def _empty_like(
        self, like: torch.Tensor, *, pin_memory: bool = False, device: Any = None, **kw: Any
    ) -> torch.Tensor:
        device = device or self._device(like)
        return self._place(torch.empty_like(like, **kw), device, pinned=pin_memory)

    def _to(self, tensor: torch.Tensor, *args: Any, non_blocking: bool = False, **kw: Any) -> Any:
        ours = self._device(tensor)
        device = kw.pop("device", None)
        if args and isinstance(args[0], torch.device | str | int):
            device, args = args[0], args[1:]
        device = ours if device is None else torch.device(device)
        if device == ours:
            return self._account(torch.Tensor.to, (tensor, *args), kw)
        pinned = device.type == "cpu" and non_blocking
        made = self._place(torch.empty_like(tensor), device, pinned=pinned)
        return self._copy(made, tensor, non_blocking=non_blocking)

    @contextlib.contextmanager
    def installed(self, *modules: Any) -> Iterator[pytest.MonkeyPatch]:
        """Play torch.cuda, and the threads of these modules."""
        primitive = self.Primitive
        threads = SimpleNamespace(
            Thread=self.Thread,
            Semaphore=primitive,
            Event=primitive,
            RLock=primitive,
            current_thread=lambda: self.current,
            get_native_id=threading.get_native_id,
        )
        cuda = {
            "Stream": self.Stream,
            "Event": self.Event,
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: len(self.defaults),
            "current_device": lambda: self.current.device,
            "current_stream": self.current_stream,
            "set_stream": self.set_stream,
            "set_device": self.set_device,
            "_exchange_device": self.set_device,
            "_maybe_exchange_device": self.maybe_set_device,
            "synchronize": self.synchronize,
            "is_current_stream_capturing": self.is_capturing,
        }
        with pytest.MonkeyPatch.context() as patch, self:
            for name, fake in cuda.items():
                patch.setattr(torch.cuda, name, fake)
            patch.setattr(captures, "_exchange", lambda: self.exchange_mode)
            # Its arguments are looked at before a mode is asked.
            patch.setattr(torch.Tensor, "record_stream", _record_stream)
            patch.setattr(torch.accelerator, "is_available", lambda: True)
            fakes = {"threading": threads, "SimpleQueue": primitive, "Lock": primitive}
            for module in modules:
                for name in fakes.keys() & vars(module).keys():
                    patch.setattr(module, name, fakes[name])
            yield patch
