"""A model of torch.cuda that finds unordered accesses: reads, writes and reuse of memory.

It has devices, streams, events, both caching allocators, pinned memory, copies and captures; its
threads take turns by a seed. Each thread and each stream has a vector clock of what it knows to
have happened. An access is reported if the clock does not include the access before it. Tensors are
torch's own, on the CPU; their storage tells the device that they stand for. torch.cuda.stream and
torch.cuda.device are torch's own classes, on top of the model.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.stream_devices import Devices, Stream
from support.stream_turns import Clock, is_before, join
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

READS = ("item", "tolist", "equal", "__bool__", "__float__", "__int__")


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


def _record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    stream.model.switch()
    stream.model.block_of(tensor).users[stream.name] = stream


class Model(Devices, TorchFunctionMode):
    """The machine: devices, threads that take turns, memory, and what was found."""

    def __init__(self, seed: int, num_devices: int = 2) -> None:
        super().__init__(seed, num_devices)
        self.blocks: dict[int, Block] = {}
        self.pools: dict[Any, list[Block]] = {}
        self.pending: list[tuple[Block, list[Clock]]] = []
        self.consumers: set[str] = set()
        """Streams for whose work no copy may wait."""
        self.num_blocks = self.num_staged = 0
        # Compared by value: each access to a descriptor makes another wrapper.
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
        """Call a function of torch, and record what it reads and writes, and where."""
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
        """Replace torch.cuda, and the threads of these modules, by the model."""
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
            # torch checks its arguments before it calls a mode.
            patch.setattr(torch.Tensor, "record_stream", _record_stream)
            patch.setattr(torch.accelerator, "is_available", lambda: True)
            fakes = {
                "threading": SimpleNamespace(Thread=self.Thread, RLock=self.Lock),
                "ThreadPoolExecutor": self.Pool,
            }
            for module in modules:
                for name in fakes.keys() & vars(module).keys():
                    patch.setattr(module, name, fakes[name])
            yield patch
