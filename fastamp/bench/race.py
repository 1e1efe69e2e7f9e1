"""The measurement: the memory of each arm alone, then all arms side by side, then their scores.

The timed steps are the training. A round takes one step of every arm on the same batch, so a
machine that drifts slows all arms alike, and the ratio of two arms is taken within a round.
"""

from __future__ import annotations

import copy
import time
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np
import torch

from fastamp.bench.data import training_batches, validation_batches
from fastamp.bench.environment import describe
from fastamp.bench.memory import peak_memory
from fastamp.bench.report import Figures, Report, judge, progress, quartiles
from fastamp.bench.train import Run, evaluate, make_arms, make_model, train_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastamp.bench.data import Corpus
    from fastamp.bench.train import Job, Score

__all__ = ["WARMUP_STEPS", "measure", "race"]

SCHEMA_VERSION = 1
WARMUP_STEPS = 2  # the first steps make kernels, optimizer state and the allocator's pools
VALIDATION_WINDOWS = 32


def measure(
    job: Job, corpus: Corpus, targets: dict[str, float], *, excused: dict[str, str]
) -> Report:
    """Measure every arm and judge the last one, AMP with fastamp, against the first, FP32."""
    arms = make_arms(job.precision)
    model = make_model(job)
    with progress(2 * len(arms) + job.steps) as tick:
        peaks, scores = [], []
        for arm in arms:
            peaks.append(peak_memory(job, arm.name, corpus.train))
            tick()
        runs = [Run(arm, job, copy.deepcopy(model)) for arm in arms]
        rounds = race(runs, job, corpus, tick)
        for run in runs:
            scores.append(_score(run, job, corpus))
            tick()
    figures = [
        _figures(arm.name, job, rounds, peak.nbytes, score)
        for arm, peak, score in zip(arms, peaks, scores, strict=True)
    ]
    return Report(
        schema_version=SCHEMA_VERSION,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        environment=describe(job.device),
        job=asdict(job),
        data=corpus.describe(),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        warmup_steps=WARMUP_STEPS,
        memory_method=peaks[0].method,
        order=[list(seconds) for seconds in rounds],
        arms=figures,
        targets=judge(figures[0], figures[-1], targets, excused=excused),
    )


def race(
    runs: list[Run], job: Job, corpus: Corpus, tick: Callable[[], object]
) -> list[dict[str, float]]:
    """Train all runs in rounds; return each round's seconds by arm, in the order of execution."""
    batches = training_batches(
        corpus.train, batch_size=job.batch_size, block_size=job.shape.block_size, seed=job.seed
    )
    orders = _orders(runs, job.seed)
    rounds = []
    for _ in range(job.steps):
        tokens, targets = (part.to(job.device) for part in next(batches))
        rounds.append({run.arm.name: _timed(run, tokens, targets) for run in next(orders)})
        tick()
    return rounds


def _orders(runs: list[Run], seed: int) -> Iterator[tuple[Run, ...]]:
    """Yield orders in which, over time, every arm follows every other equally often."""
    rng = np.random.default_rng(seed)
    every = list(permutations(runs))
    while True:
        yield from (every[index] for index in rng.permutation(len(every)))


def _timed(run: Run, tokens: torch.Tensor, targets: torch.Tensor) -> float:
    _synchronize(run.device)
    start_s = time.perf_counter()
    train_step(run, tokens, targets)
    _synchronize(run.device)
    return time.perf_counter() - start_s


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _score(run: Run, job: Job, corpus: Corpus) -> Score:
    batches = validation_batches(
        corpus.validation,
        windows=VALIDATION_WINDOWS,
        batch_size=job.batch_size,
        block_size=job.shape.block_size,
    )
    return evaluate(run, batches)


def _figures(
    name: str, job: Job, rounds: list[dict[str, float]], peak_memory_bytes: int | None, score: Score
) -> Figures:
    timed = rounds[WARMUP_STEPS:]
    step_time_s = quartiles([seconds[name] for seconds in timed])
    return Figures(
        name=name,
        step_times_s=[seconds[name] for seconds in rounds],
        step_time_s=step_time_s,
        tokens_per_s=job.batch_size * job.shape.block_size / step_time_s.median,
        speedup=quartiles([seconds["fp32"] / seconds[name] for seconds in timed]),
        peak_memory_bytes=peak_memory_bytes,
        validation=score,
    )
