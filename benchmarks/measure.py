"""How every benchmark here measures: interleaved, medians, the memory's limit in the same run."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Larger than any cache here: a read of it comes from memory.
LIMIT_NBYTES = 500_000_000


@dataclass(frozen=True)
class Timing:
    """Seconds of one arm over all rounds."""

    median_s: float
    low_s: float  # quartiles
    high_s: float
    samples_s: list[float]


def interleaved(
    arms: Mapping[str, Callable[[], object]], device: torch.device, *, rounds: int
) -> dict[str, Timing]:
    """Time every arm once per round, in random order, after two rounds of warm-up."""
    order = list(arms)
    shuffle = random.Random(0)  # noqa: S311 - an order, not a secret
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for round_ in range(rounds + 2):
        shuffle.shuffle(order)
        for name in order:
            elapsed_s = _time_once(arms[name], device)
            if round_ >= 2:
                seconds[name].append(elapsed_s)
    return {name: _timing(samples) for name, samples in seconds.items()}


def _time_once(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _timing(samples: list[float]) -> Timing:
    low, median, high = statistics.quantiles(samples, n=4)
    return Timing(median, low, high, samples)


def host_seconds(call: Callable[[], object], *, rounds: int = 30) -> float:
    """Return the median time until the call returns, whatever the GPU still has to do."""
    samples = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def count_launches(call: Callable[[], object]) -> int:
    """Return how many kernels one call starts on the GPU."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in on_device)


def make_plain_read(device: torch.device) -> Callable[[], object]:
    """Return a call that reads LIMIT_NBYTES once: torch's integer sum, on all threads."""
    memory = torch.ones(LIMIT_NBYTES // 8, dtype=torch.int64, device=device)
    return memory.sum
