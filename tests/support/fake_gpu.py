"""A fake GPU behind torch.cuda: streams with clocks of their own, and a count of waits.

Time passes only where a test says so.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest


@dataclass(frozen=True)
class FakeStream:
    cuda_stream: int


@dataclass
class FakeGpu:
    """Streams by number; work that is queued now begins at `host_ms` or later."""

    host_ms: float = 0.0
    done_ms: float = 0.0
    """Work up to this time is done."""
    stream: int = 1
    capturing: bool = False
    waits: int = 0
    num_events: int = 0
    busy_ms: dict[int, float] = field(default_factory=dict)
    copies: list[tuple[float, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def work(self, duration_ms: float, stream: int | None = None) -> None:
        """Queue work on the current stream, or on another one."""
        stream = stream or self.stream
        self.busy_ms[stream] = max(self.busy_ms.get(stream, 0.0), self.host_ms) + duration_ms

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to the host on the current stream; the copy is NaN until it is done."""
        self.work(1.0)
        host = torch.full_like(tensor, float("nan"))
        self.copies.append((self.busy_ms[self.stream], host, tensor.clone()))
        return host

    def wait_until(self, at_ms: float) -> None:
        self.waits += 1
        self.done_ms = max(self.done_ms, at_ms)
        for copied_ms, host, tensor in self.copies:
            if copied_ms <= self.done_ms:
                host.copy_(tensor)


def install(gpu: FakeGpu, patch: pytest.MonkeyPatch) -> None:
    """Make torch.cuda offer the GPU as "cuda:0"."""

    class Event:
        def __init__(self, *, enable_timing: bool = False) -> None:
            self.enable_timing = enable_timing
            gpu.num_events += 1
            self.at_ms = float("inf")

        def record(self, stream: FakeStream) -> None:
            assert not gpu.capturing
            self.at_ms = max(gpu.busy_ms.get(stream.cuda_stream, 0.0), gpu.host_ms)

        def query(self) -> bool:
            assert not gpu.capturing
            return self.at_ms <= gpu.done_ms

        def elapsed_time(self, end: Event) -> float:
            assert self.enable_timing
            assert self.query()
            assert end.query()
            return end.at_ms - self.at_ms

        def synchronize(self) -> None:
            gpu.wait_until(self.at_ms)

    @contextlib.contextmanager
    def on_stream(stream: FakeStream) -> Iterator[None]:
        before, gpu.stream = gpu.stream, stream.cuda_stream
        yield
        gpu.stream = before

    fakes = {
        "Event": Event,
        "stream": on_stream,
        "is_available": lambda: True,
        "current_stream": lambda _: FakeStream(gpu.stream),
        "is_current_stream_capturing": lambda: gpu.capturing,
    }
    for name, fake in fakes.items():
        patch.setattr(torch.cuda, name, fake)
