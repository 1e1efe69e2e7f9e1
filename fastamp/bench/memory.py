"""The peak memory of one arm, measured in a process of its own that trains nothing else."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fastamp.bench.data import training_batches
from fastamp.bench.model import Shape
from fastamp.bench.train import Job, Run, make_arms, make_model, train_step

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["PeakMemory", "peak_memory"]

STEPS = 2  # the first step makes the optimizer's state, the second runs beside it
PLACE = f"{STEPS} steps in a fresh process for each arm, after a tiny model has loaded the kernels"
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class PeakMemory:
    """A peak in bytes, None where the platform counts none, and how it was measured."""

    nbytes: int | None
    method: str


def peak_memory(job: Job, arm: str, data: npt.NDArray[np.uint8]) -> PeakMemory:
    """Train two steps of one arm in a fresh process and return the peak over them."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_peak_of_this_process, job, arm, data).result()


def _peak_of_this_process(job: Job, arm: str, data: npt.NDArray[np.uint8]) -> PeakMemory:
    tiny = Shape(layers=1, heads=1, width=16, block_size=16)
    _train(replace(job, shape=tiny, batch_size=1), arm, data)
    if job.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        _train(job, arm, data)
        return PeakMemory(torch.cuda.max_memory_allocated(), f"max_memory_allocated, {PLACE}")
    before = _resident(reset=True)
    _train(job, arm, data)
    after = _resident(reset=False)
    if before is None or after is None:
        return PeakMemory(None, f"this platform ({sys.platform}) counts no resident set")
    method = f"peak resident set less that before the model is built, {PLACE}"
    return PeakMemory(after[1] - before[0], method)


def _train(job: Job, arm: str, data: npt.NDArray[np.uint8]) -> None:
    run = Run(next(a for a in make_arms(job.precision) if a.name == arm), job, make_model(job))
    batches = training_batches(
        data, batch_size=job.batch_size, block_size=job.shape.block_size, seed=job.seed
    )
    for _ in range(STEPS):
        tokens, targets = next(batches)
        train_step(run, tokens.to(job.device), targets.to(job.device))


def _resident(*, reset: bool) -> tuple[int, int] | None:
    """Return the bytes resident now and at their peak, which `reset` brings down to now."""
    if STATUS.exists():
        if reset:
            # Where this is refused the peak counts from the start: never too low.
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        sizes = dict(re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", STATUS.read_text(encoding="utf-8")))
        return int(sizes["VmRSS"]) * 1024, int(sizes["VmHWM"]) * 1024
    if sys.platform == "win32":
        return None
    import resource  # noqa: PLC0415 - absent on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return peak, peak  # no count of now: the peak before the model stands for it
