"""The peak memory of an arm, measured in a process of its own that trains nothing else."""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from fastamp.bench import apart
from fastamp.bench.environment import find
from fastamp.bench.gpt import Shape
from fastamp.bench.jobs.language import make_gpt
from fastamp.bench.tasks import Training, draw, expect, make_loader, make_training
from fastamp.bench.text import Corpus
from fastamp.bench.trainer import Config, Trainer

MEMORY_STEPS = 2  # the first step makes the optimizer's state, the second runs beside it
MEMORY_KINDS = {
    "cpu": "resident set, minus its size before training, plus the model",
    "cuda": "GPU memory that torch allocates",
}
TINY = Shape(layers=1, heads=1, width=16, block_size=16)
TINY_TEXT = Corpus("", "", *(np.zeros(64, np.uint8) for _ in range(2)))


def peak_memory(make: Callable[[], Training], arm: Config, device: str) -> int | None:
    """Train two steps of one arm in a fresh process and return the peak over them, in bytes."""
    return apart.run_apart(measure_peak, make, arm, device)


def measure_peak(make: Callable[[], Training], arm: Config, device: str) -> int | None:
    """Return the peak of two steps in this process; it also checks the rest of the contract."""
    tiny = partial(make_gpt, shape=TINY, batch_size=1, corpus=TINY_TEXT)
    plain = replace(arm, is_own=False)
    _train_first_steps(plain, device, make_training(tiny, device, 0))  # loads the kernels
    training = make()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        trainer = _train_first_steps(arm, device, training)
        peak = torch.cuda.max_memory_allocated()
        _check(trainer)
        return peak
    tensors = (*training.model.parameters(), *training.model.buffers())
    weights = sum(tensor.nbytes for tensor in tensors)  # resident before
    with suppress(AttributeError, OSError, TypeError):  # otherwise freed memory would be reused
        ctypes.CDLL(None).malloc_trim(0)
    before = _resident_nbytes("VmRSS")
    with suppress(OSError):  # if refused, the peak is since the start: never too low
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    trainer = _train_first_steps(arm, device, training)
    after = _resident_nbytes("VmHWM")
    _check(trainer)
    return None if before is None or after is None else after - before + weights


def _train_first_steps(arm: Config, device: str, training: Training) -> Trainer:
    trainer = Trainer(arm, training, device)
    task = trainer.training
    loader = make_loader(task, 0, device=device)
    trainer.train(islice(draw(loader, device, task.accumulate), MEMORY_STEPS))
    return trainer


def _check(trainer: Trainer) -> None:
    """Check what only a step shows, before the long work; autocast changes none of it."""
    if trainer.dtype is None:
        has_grad = any(parameter.grad is not None for parameter in trainer.parameters)
        has_grad |= trainer.config.step == "fastamp"  # which frees them
        expect(has_grad, "loss", "a gradient of a parameter of the optimizer", "none")
        trainer.evaluate()


def _resident_nbytes(key: str) -> int | None:
    """Return what is resident now, VmRSS, or was at its peak, VmHWM."""
    found = find(rf"{key}:\s+(\d+) kB", "/proc/self/status")
    return None if found is None else int(found) * 1024
