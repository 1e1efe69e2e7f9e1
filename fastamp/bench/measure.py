"""What a task's race measures: times, losses and scores of its arms, their shares and their peaks.

The timed steps are a training, with the wait for each batch on the clock. A visit of an arm is
several steps, so that a GPU launches ahead as it does in a training. The first build trains all
steps, and its losses and scores are shown; the others are for the times alone.
"""

import ctypes
import gc
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import TypeAlias

import torch

import fastamp
from fastamp.bench import apart
from fastamp.bench.environment import find
from fastamp.bench.race import Build, Case, Plan, Race, collect, run_build
from fastamp.bench.tasks import BrokenTask
from fastamp.bench.trainer import Arm, Score, Trainer

Shares: TypeAlias = dict[str, float]  # of a step, by part

LEAST_VISITS = 12  # of the first build, for six blocks
WARMUP_STEPS = 4  # at most: kernels, optimizer state and the allocator's pools are made
VISIT_S = 0.05  # of the fastest arm, at least
MOST_STEPS = 40  # of a visit: by then one wait for the device no longer counts
AHEAD = 2  # batches that each worker makes ahead while other arms run
OPEN_STEPS = 2000  # without --steps, and in all builds but the first: or what fits into the time
PLAN = Plan(build_s=8.0, limit_s=100.0)
SHARES_BLOCKS = 6  # visits of every arm
REGIONS = ("data", "forward", "backward", "step")
MEMORY_STEPS = 2  # the first step makes the optimizer's state, the second runs beside it
TINY = "fastamp.bench.gpt:make_tiny"


@dataclass(frozen=True, kw_only=True)
class Results:
    """What was measured, by the name of the arm."""

    arms: list[Arm]
    race: Race  # its times are of a step: a visit's, divided by its steps
    parameters: int
    batch_sizes: list[int]  # of every step of the first arm, in samples
    losses: dict[str, list[float]]
    scores: dict[str, Score]
    shares: dict[str, Shares]  # where the time of a step goes
    workers: int = 0  # of the loaders
    visit_steps: int = 1
    left_out: dict[str, str] = field(default_factory=dict)  # why an arm is, in words


def race_task(arms: Sequence[Arm], steps: int | None = None) -> Results:
    """Race the arms of a task; `steps` are those of the first build, None: as many as it takes."""
    found: list[Results] = []

    def build(_: list[str], number: int) -> dict[str, Build]:
        left = found[0].arms if found else [*arms]
        count = steps if number == 1 else None
        found.append(apart.run_apart(_train, left, count, number))
        return {"": found[-1].race.builds[0]}

    race = collect(build, [""], PLAN)[""]
    return replace(found[0], race=race)


def _train(arms: list[Arm], all_steps: int | None, number: int) -> Results:
    """Race all arms in the build of a number; in the first one also score them."""
    trainers, left_out = _begin(arms)
    first, seed = trainers[arms[0].name], arms[0].seed * 1000 + number
    case = Case(
        arms={name: each.visit for name, each in trainers.items()},
        before=lambda name: trainers[name].prepare(),
        skipped=lambda name: trainers[name].has_skipped(),
    )
    race_visits = partial(run_build, case, device=first.device, seed=seed)
    total = all_steps or OPEN_STEPS
    count = min(WARMUP_STEPS, total // 3) - 1  # the first step is over
    warmup = race_visits(Plan(rounds=count, warmup=count)).warmup if count else []
    last = [visit.elapsed_s for visit in warmup[-1].values()] if warmup else [VISIT_S]
    workers = max(trainer.workers for trainer in trainers.values())
    left = total - 1 - count
    steps = count_visit_steps(min(last), left if all_steps else None, workers)
    for trainer in trainers.values():
        trainer.steps = steps
    build = race_visits(replace(PLAN, rounds=left // steps, warmup=0))
    build.rounds = [
        {name: each._replace(elapsed_s=each.elapsed_s / steps) for name, each in round_.items()}
        for round_ in build.rounds
    ]
    for trainer in trainers.values():  # what is left of the training
        trainer.steps = max((all_steps or 0) - len(trainer.losses), 0)
        trainer.prepare()
        trainer.visit()
        trainer.steps = steps
    is_first = number == 1
    return Results(
        arms=[trainer.arm for trainer in trainers.values()],
        race=Race(arms=build.arms, builds=[build]),
        parameters=sum(parameter.numel() for parameter in first.model.parameters()),
        batch_sizes=[*first.sizes],
        losses={n: torch.stack(each.losses).tolist() for n, each in trainers.items()},
        scores={n: each.evaluate() for n, each in trainers.items()} if is_first else {},
        shares={n: find_shares(each) for n, each in trainers.items()} if is_first else {},
        workers=workers,
        visit_steps=steps,
        left_out=left_out,
    )


def _begin(arms: list[Arm]) -> tuple[dict[str, Trainer], dict[str, str]]:
    """Return all arms after their first step, and why those in a lower precision cannot train.

    Raises:
        BrokenTask: an arm in FP32, or one of one's own, cannot train.
    """
    trainers: dict[str, Trainer] = {}
    left_out: dict[str, str] = {}
    for arm in arms:
        if arm.is_ours and arm.base in left_out:
            left_out[arm.name] = left_out[arm.base]
            continue
        try:
            is_alone = arm.base in left_out  # as one of one's own, whose precision is left out
            trainer = Trainer(replace(arm, base=arms[0].name) if is_alone else arm)
            trainer.prepare()
            trainer.visit()
        except BrokenTask as error:
            if arm.precision == "fp32" or arm.is_own:
                raise
            left_out[arm.name] = error.line
            gc.collect()
        else:
            trainers[arm.name] = trainer
    return trainers, left_out


def count_visit_steps(step_s: float, left: int | None, workers: int = 0) -> int:
    """Return the steps of a visit.

    Where only so many are `left`, they make twelve visits, or as many as there are. A visit has
    some steps for each worker, which has made batches while other arms ran.
    """
    steps = min(max(math.ceil(VISIT_S / max(step_s, 1e-9)), 1), MOST_STEPS)
    steps = max(steps, 2 * AHEAD * workers)
    return steps if left is None else max(min(steps, left // LEAST_VISITS), 1)


def find_failures(found: Results) -> list[str]:
    """Return the trainings of the first build whose last loss is NaN or infinite, in words."""
    return [
        f"the training of {name} has failed: its loss is {curve[-1]} in step {len(curve)}"
        for name, curve in found.losses.items()
        if not math.isfinite(curve[-1])
    ]


def last_loss(found: Results, arm: str) -> float:
    """Return the validation loss, or the mean of the last quarter of the training."""
    score, curve = found.scores[arm], found.losses[arm]
    if score.loss is not None:
        return score.loss
    return fmean(curve[-(len(curve) // 4 or 1) :] or [math.nan])


def find_shares(trainer: Trainer) -> Shares:
    """Train an arm for some more visits; return the share of each part, by fastamp's own timer.

    They are medians over visits: the wait for data, forward, backward, the step, and what no region
    has: "waits" on a GPU, else "other".
    """
    blocks: list[Shares] = []
    for _ in range(SHARES_BLOCKS):
        timer = fastamp.Timer(trainer.device)
        trainer.prepare()
        start_s = perf_counter()
        trainer.visit(timer)
        regions = timer.summary()  # waits for the device
        elapsed_s = max(perf_counter() - start_s, 1e-9)
        blocks.append({name: regions[name].total / elapsed_s for name in REGIONS})
    shares = {name: median(block[name] for block in blocks) for name in REGIONS}
    rest = max(1 - math.fsum(shares.values()), 0.0)
    return shares | {"waits" if trainer.device == "cuda" else "other": rest}


def limit(share: float) -> float:
    """Return how many times as fast a step were if a share of it took no time (Amdahl)."""
    return 1 / (1 - share) if share < 1 else math.inf


def peak_memory(arm: Arm) -> int | None:
    """Train two steps of one arm, in a fresh process, and return the peak over them, in bytes."""
    tiny = Trainer(replace(arm, task=TINY, batch_size=None))
    tiny.steps = MEMORY_STEPS
    tiny.visit()  # what torch loads for its kernels is in no peak
    trainer = Trainer(arm)
    trainer.steps, model = MEMORY_STEPS, trainer.model
    if trainer.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        trainer.visit()
        return torch.cuda.max_memory_allocated()
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    with suppress(AttributeError, OSError, TypeError):  # otherwise freed memory would be reused
        ctypes.CDLL(None).malloc_trim(0)
    before = _resident_nbytes("VmRSS")
    with suppress(OSError):  # if refused, the peak is since the start: never too low
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    trainer.visit()
    after = _resident_nbytes("VmHWM")
    return after - before + weights if before and after else None


def _resident_nbytes(key: str) -> int:
    """Return what is resident now, VmRSS, or was at its peak, VmHWM; 0 where it is not counted."""
    return 1024 * int(find(rf"{key}:\s+(\d+) kB", "/proc/self/status") or 0)
