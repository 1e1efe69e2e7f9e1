"""What the main job measures: the memory of each arm, the time of its steps, and its scores.

The timed steps are the training, and all arms of a round take their step on the same batch. The
peak memory of an arm is measured in a process of its own that trains nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import torch

from fastamp.bench.arms import Arm, Job, Run, Score, evaluate, make_arms, make_model
from fastamp.bench.environment import find
from fastamp.bench.race import Plan, Race, run_race
from fastamp.train.gpt import Shape
from fastamp.train.options import progress
from fastamp.train.text import Batch, Bytes, Corpus, training_batches, validation_batches

WARMUP_STEPS = 4  # at most: kernels, optimizer state and the allocator's pools are made
VALIDATION_WINDOWS = 64
MEMORY_STEPS = 2  # the first step makes the optimizer's state, the second runs beside it
MEMORY_KINDS = {
    "cpu": "resident set, less that before the model is built",
    "cuda": "GPU memory that torch allocates",
}


@dataclass(frozen=True, kw_only=True)
class Results:
    """What was measured, by arm: peaks in bytes, losses, and one score for each seed."""

    parameters: int
    peaks: dict[str, int | None]  # None where the platform counts none
    race: Race
    losses: dict[str, list[float]]
    scores: dict[str, list[Score]]


def train_arms(job: Job, corpus: Corpus, *, seeds: int) -> Results:
    """Measure every arm with the job's seed; with the seeds after it, train and score only."""
    arms, sizes = make_arms(job), (job.shape.block_size, job.batch_size)
    spread = validation_batches(corpus.validation, *sizes, VALIDATION_WINDOWS, job.device)
    windows = list(spread)
    trained: list[tuple[Race, dict[str, Run]]] = []
    with progress(len(arms) + seeds * job.steps) as tick:
        peaks = {}
        for arm in arms:
            peaks[arm.name] = peak_memory(job, arm, corpus.train)
            tick()
        for seed in range(job.seed, job.seed + seeds):
            model = make_model(replace(job, seed=seed))
            runs = {arm.name: Run(arm, job, copy.deepcopy(model)) for arm in arms}
            draws = training_batches(corpus.train, *sizes, seed, job.device)
            batches = list(islice(draws, job.steps))
            race = run_race(
                {name: partial(_step, run, iter(batches)) for name, run in runs.items()},
                # A training is as long for every seed and every machine: it never stops early.
                # Three blocks are left after the warm-up if there are enough steps.
                Plan(rounds=job.steps, warmup=min(WARMUP_STEPS, max(job.steps - 6, 1))),
                device=job.device,
                seed=seed,
                skipped=partial(_has_skipped, runs),
                tick=tick,
            )
            trained.append((race, runs))
    race, runs = trained[0]
    return Results(
        parameters=sum(parameter.numel() for parameter in runs[race.arms[0]].parameters),
        peaks=peaks,
        race=race,
        losses={name: torch.stack(run.losses).tolist() for name, run in runs.items()},
        scores={name: [evaluate(each[name], windows) for _, each in trained] for name in runs},
    )


def _has_skipped(runs: dict[str, Run], name: str) -> bool:
    return runs[name].skipped()


def _step(run: Run, batches: Iterator[Batch]) -> None:
    run.train_step(*next(batches))


def peak_memory(job: Job, arm: Arm, data: Bytes) -> int | None:
    """Train two steps of one arm in a fresh process and return the peak over them, in bytes."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_peak_of_this_process, job, arm, data).result()


def _peak_of_this_process(job: Job, arm: Arm, data: Bytes) -> int | None:
    tiny = Shape(layers=1, heads=1, width=16, block_size=16)
    _first_steps(replace(job, shape=tiny, memory_batch_size=1), arm, data)  # loads the kernels
    if job.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        _first_steps(job, arm, data)
        return torch.cuda.max_memory_allocated()
    before = _resident_nbytes("VmRSS")
    with suppress(OSError):  # where this is refused the peak counts from the start: never too low
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    _first_steps(job, arm, data)
    after = _resident_nbytes("VmHWM")
    return None if before is None or after is None else after - before


def _first_steps(job: Job, arm: Arm, data: Bytes) -> None:
    run = Run(arm, job, make_model(job))
    sizes = (job.shape.block_size, job.memory_batch_size)
    draws = training_batches(data, *sizes, job.seed, job.device)
    for batch in islice(draws, MEMORY_STEPS):
        run.train_step(*batch)


def _resident_nbytes(key: str) -> int | None:
    """Return what is resident now, VmRSS, or was at its peak, VmHWM."""
    found = find(rf"{key}:\s+(\d+) kB", "/proc/self/status")
    return None if found is None else int(found) * 1024
