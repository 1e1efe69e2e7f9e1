"""The peak memory of an arm, measured in a process of its own that trains nothing else."""

import ctypes
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch

from fastamp.bench import apart
from fastamp.bench.arms import Arm
from fastamp.bench.environment import find
from fastamp.bench.gpt import Shape
from fastamp.bench.jobs.language import make_model
from fastamp.bench.tasks import make_training
from fastamp.bench.text import Corpus
from fastamp.bench.trainer import Runner, Trainer

MEMORY_STEPS = 2  # the first step makes the optimizer's state, the second runs beside it
MEMORY_KINDS = {
    "cpu": "peak of the resident set over two steps",
    "cuda": "peak of what torch allocates over two steps",
}
TINY = Shape(layers=1, heads=1, width=16, block_size=16)
TINY_TEXT = Corpus("", "", *(np.zeros(64, np.uint8) for _ in range(2)))


def peak_memory(arm: Arm, device: str, seed: int, batch_size: int | None) -> int | None:
    """Train two steps of one arm in a fresh process and return the peak over them, in bytes."""
    return apart.run_apart(measure_peak, arm, device, seed, batch_size)


def measure_peak(arm: Arm, device: str, seed: int, batch_size: int | None) -> int | None:
    """Return the peak of two steps in this process."""
    _load_kernels(arm, device)
    runner = Runner(arm, device, seed, batch_size)
    runner.steps, model = MEMORY_STEPS, runner.trainer.model
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        runner.visit()
        return torch.cuda.max_memory_allocated()
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    with suppress(AttributeError, OSError, TypeError):  # otherwise freed memory would be reused
        ctypes.CDLL(None).malloc_trim(0)
    before = _resident_nbytes("VmRSS")
    with suppress(OSError):  # if refused, the peak is since the start: never too low
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    runner.visit()
    after = _resident_nbytes("VmHWM")
    return None if before is None or after is None else after - before + weights


def _load_kernels(arm: Arm, device: str) -> None:
    """Take the steps of a tiny model: what torch loads for them is in no peak."""
    tiny = partial(make_model, shape=TINY, batch_size=1, corpus=TINY_TEXT)
    training = make_training(lambda _, seed: tiny(seed), device, 0)
    windows = [training.data[place] for place in range(MEMORY_STEPS)]
    batches = [tuple(part[None].to(device) for part in window) for window in windows]
    Trainer(arm, training, device).train(batches)


def _resident_nbytes(key: str) -> int | None:
    """Return what is resident now, VmRSS, or was at its peak, VmHWM."""
    found = find(rf"{key}:\s+(\d+) kB", "/proc/self/status")
    return None if found is None else int(found) * 1024
