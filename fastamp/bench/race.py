"""The main job's measurement: the memory of each arm alone, all arms side by side, their scores.

The timed steps are the training, and all arms of a round take their step on the same batch. The
peak memory of an arm is measured in a process of its own that trains nothing else.
"""

from __future__ import annotations

import copy
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fastamp.bench import compare
from fastamp.bench.compare import Plan, Race
from fastamp.bench.data import training_batches, validation_batches
from fastamp.bench.model import Shape
from fastamp.bench.report import progress
from fastamp.bench.train import Job, Run, evaluate, make_arms, make_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    import numpy.typing as npt

    from fastamp.bench.data import Corpus
    from fastamp.bench.train import Score

WARMUP_STEPS = 4  # at most: kernels, optimizer state and the allocator's pools are made
VALIDATION_WINDOWS = 64
MEMORY_STEPS = 2  # the first step makes the optimizer's state, the second runs beside it
PLACE = (
    f"{MEMORY_STEPS} steps in a fresh process per arm, after a tiny model has loaded the kernels"
)
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class PeakMemory:
    """A peak in bytes, None where the platform counts none, of what, and how it was measured."""

    nbytes: int | None
    kind: str
    method: str


@dataclass(frozen=True, kw_only=True)
class Results:
    """What was measured: peaks, losses and scores by arm, one score for each seed."""

    arms: list[str]
    parameters: int
    peaks: dict[str, PeakMemory]
    race: Race
    losses: dict[str, list[float]]
    scores: dict[str, list[Score]]


def measure(job: Job, corpus: Corpus, *, seeds: int) -> Results:
    """Measure every arm with the job's seed; with the seeds after it, train and score only."""
    arms = [arm.name for arm in make_arms(job)]
    scores: dict[str, list[Score]] = {name: [] for name in arms}
    with progress(len(arms) + seeds * (job.steps + len(arms))) as tick:
        peaks = {}
        for name in arms:
            peaks[name] = peak_memory(job, name, corpus.train)
            tick()
        races, losses = [], []
        for seed in range(job.seed, job.seed + seeds):
            seeded = replace(job, seed=seed)
            model = make_model(seeded)
            runs = {arm.name: Run(arm, job, copy.deepcopy(model)) for arm in make_arms(job)}
            races.append(_race(runs, seeded, corpus, tick))
            losses.append({n: torch.stack(run.losses).tolist() for n, run in runs.items()})
            for name, run in runs.items():
                windows = validation_batches(corpus.validation, job, VALIDATION_WINDOWS)
                scores[name].append(evaluate(run, windows))
                tick()
    return Results(
        arms=arms,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        peaks=peaks,
        race=races[0],
        losses=losses[0],
        scores=scores,
    )


def _race(runs: dict[str, Run], job: Job, corpus: Corpus, tick: Callable[[], object]) -> Race:
    """Train all runs, a step of each in a round, on the same batches."""
    batches = {name: _on_device(job, corpus.train) for name in runs}
    batch: list[torch.Tensor] = []

    def draw(name: str) -> None:
        batch[:] = next(batches[name])

    def step(run: Run) -> None:
        run.train_step(*batch)

    return compare.measure(
        {name: partial(step, run) for name, run in runs.items()},
        # A training is as long for every seed and every machine: it never stops early.
        Plan(rounds=job.steps, warmup=min(WARMUP_STEPS, job.steps - 2)),
        device=job.device,
        seed=job.seed,
        before=draw,
        skipped=lambda name: runs[name].skipped(),
        tick=tick,
    )


def _on_device(job: Job, data: npt.NDArray[np.uint8]) -> Iterator[tuple[torch.Tensor, ...]]:
    for batch in training_batches(data, job):
        yield tuple(part.to(job.device) for part in batch)


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
        return PeakMemory(torch.cuda.max_memory_allocated(), "GPU memory", f"allocated, {PLACE}")
    before = _resident("VmRSS")
    with suppress(OSError):  # where this is refused the peak counts from the start: never too low
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    _train(job, arm, data)
    after = _resident("VmHWM")
    kind = "resident set"
    if before is None or after is None:
        return PeakMemory(None, kind, f"this platform ({sys.platform}) counts none")
    return PeakMemory(after - before, kind, f"less that before the model is built, {PLACE}")


def _train(job: Job, arm: str, data: npt.NDArray[np.uint8]) -> None:
    run = Run(next(a for a in make_arms(job) if a.name == arm), job, make_model(job))
    batches = _on_device(job, data)
    for _ in range(MEMORY_STEPS):
        run.train_step(*next(batches))


def _resident(key: str) -> int | None:
    """Return the bytes resident now, VmRSS, or at their peak, VmHWM."""
    if STATUS.exists():
        found = re.search(rf"{key}:\s+(\d+) kB", STATUS.read_text(encoding="utf-8"))
        return int(found[1]) * 1024 if found else None
    if sys.platform == "win32":
        return None
    import resource  # noqa: PLC0415 - absent on Windows

    # No count of now: the peak before the model stands for it.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
