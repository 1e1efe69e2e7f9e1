"""The peak memory of an arm, measured in a process of its own that trains nothing else."""

import ctypes
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path

import numpy as np
import torch

from fastamp.bench.arms import Arm, Job, Run, evaluate
from fastamp.bench.environment import find
from fastamp.bench.gpt import Shape
from fastamp.bench.jobs.language import make_gpt
from fastamp.bench.tasks import BrokenTask, Training, draw, expect, make_loader, make_training
from fastamp.bench.text import Corpus

MEMORY_STEPS = 2  # the first step makes the optimizer's state, the second runs beside it
MEMORY_KINDS = {
    "cpu": "resident set, minus its size before training, plus the model",
    "cuda": "GPU memory that torch allocates",
}
TINY = Shape(layers=1, heads=1, width=16, block_size=16)
TINY_TEXT = Corpus("", "", *(np.zeros(64, np.uint8) for _ in range(2)))


def peak_memory(job: Job, arm: Arm) -> int | None:
    """Train two steps of one arm in a fresh process and return the peak over them, in bytes."""
    with _new_process() as pool:
        try:
            return pool.submit(_peak_of_this_process, job, arm).result()
        except BrokenProcessPool:
            steps = f"the process of {MEMORY_STEPS} steps of {arm.name} was killed"
            msg = f"batch_size: a step does not fit into memory, or the model crashes: {steps}"
            raise BrokenTask(msg) from None


def _new_process() -> ProcessPoolExecutor:
    context = get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    """End this process when its parent has: it would wait for work for ever."""
    parent = parent_process()
    assert parent is not None  # noqa: S101 - it was spawned

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _peak_of_this_process(job: Job, arm: Arm) -> int | None:
    tiny = partial(make_gpt, shape=TINY, batch_size=1, corpus=TINY_TEXT)
    _first_steps(arm, job.device, make_training(tiny, job.device, 0))  # loads the kernels
    if job.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        run = _first_steps(arm, job.device, job.make_training(job.seed, job.memory_make))
        peak = torch.cuda.max_memory_allocated()
        _check(run)
        return peak
    training = job.make_training(job.seed, job.memory_make)
    with suppress(AttributeError, OSError, TypeError):  # otherwise freed memory would be reused
        ctypes.CDLL(None).malloc_trim(0)
    before = _resident_nbytes("VmRSS")
    with suppress(OSError):  # if refused, the peak is since the start: never too low
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    run = _first_steps(arm, job.device, training)
    after = _resident_nbytes("VmHWM")
    _check(run)
    weights = sum(t.nbytes for t in (*training.model.parameters(), *training.model.buffers()))
    return None if before is None or after is None else after - before + weights


def _first_steps(arm: Arm, device: str, training: Training) -> Run:
    run = Run(arm, device, training)
    for batch in islice(draw(make_loader(training, 0, device=device), device), MEMORY_STEPS):
        run.train_step(batch)
    return run


def _check(run: Run) -> None:
    """Check the rest of the contract, before the long work."""
    groups = run.optimizer.param_groups
    has_grad = any(p.grad is not None for group in groups for p in group["params"])
    expect(has_grad, "loss", "a gradient of a parameter of the optimizer", "none")
    if run.arm.dtype is None:
        evaluate(run)


def _resident_nbytes(key: str) -> int | None:
    """Return what is resident now, VmRSS, or was at its peak, VmHWM."""
    found = find(rf"{key}:\s+(\d+) kB", "/proc/self/status")
    return None if found is None else int(found) * 1024
