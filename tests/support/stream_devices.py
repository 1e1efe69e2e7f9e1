"""Devices, streams, events and captures of the model of streams."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from support.stream_turns import Clock, Thread, Turns, is_before, join

if TYPE_CHECKING:
    from collections.abc import Iterator


class Stream:
    """A stream of a device; in place of torch.cuda.Stream."""

    model: Devices

    def __init__(self, device: Any = None, name: str = "") -> None:
        index = self.model.index_of(device)
        self.device, self.device_index = torch.device("cuda", index), index
        self.model.contexts.add(index)
        self.cuda_stream = self.stream_id = len(self.model.streams)
        self.name = name or f"cuda:{index} stream {self.cuda_stream}"
        self.clock: Clock = {}
        self.model.streams.append(self)

    def enqueue(self) -> Clock:
        """Queue work on the stream, after all of its work and all that the thread knows of."""
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

    model: Devices

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


class Devices(Turns):
    """torch.cuda's functions for devices and streams, and the calls that a capture refuses."""

    def __init__(self, seed: int, num_devices: int) -> None:
        super().__init__(seed)
        self.contexts: set[int] = set()
        self.streams: list[Stream] = []
        self.captures: dict[Stream, Thread] = {}
        self.done: Clock = {}
        self.Stream, self.Event = self.own(Stream), self.own(Event)
        self.defaults = [self.Stream(index, f"cuda:{index}") for index in range(num_devices)]
        self.contexts.clear()

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
        """Add a clock to what the thread knows to have happened."""
        join(self.done, clock)
        join(self.current.clock, clock)
        self.switch()

    # Captures

    def is_capturing(self) -> bool:
        return self.current_stream() in self.captures

    def unsafe(self, call: str) -> None:
        """Make a call that a capture in thread-local mode refuses to its own thread."""
        self.switch()
        if self.current in self.captures.values():
            self.report(f"a capture is broken by {call}")

    @contextlib.contextmanager
    def capture(self, stream: Stream) -> Iterator[None]:
        self.captures[stream] = self.current
        with torch.cuda.stream(stream):
            yield
            for _ in range(4):
                self.switch()
        del self.captures[stream]
