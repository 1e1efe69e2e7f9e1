"""What a task's race measures: times, losses and scores of its arms, and where their time goes.

The timed steps are a training, with the wait for each batch on the clock. A visit of an arm is
several steps, so that a GPU launches ahead as it does in a training. The first build trains all
steps, and its losses and scores are shown; the others are for the times alone.
"""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean

import torch

from fastamp._progress import progress
from fastamp.bench import apart
from fastamp.bench.arms import Arm
from fastamp.bench.race import Build, Case, Plan, Race, Visit, collect, run_build
from fastamp.bench.tasks import BrokenTask
from fastamp.bench.trainer import Runner, Score
from fastamp.bench.where import Shares, find_shares

LEAST_BLOCKS = 3
WARMUP_STEPS = 4  # at most: kernels, optimizer state and the allocator's pools are made
VISIT_S = 0.05  # of the fastest arm, at least
MOST_STEPS = 40  # of a visit: by then one wait for the device no longer counts
AHEAD = 2  # batches that each worker makes ahead while other arms run
# Without --steps, and in all builds but the first: as many steps as fit into this time.
OPEN_STEPS = 2000
PLAN = Plan(build_s=8.0, limit_s=100.0)
OUT_OF_MEMORY = "batch_size: a step does not fit into memory"


@dataclass(frozen=True, kw_only=True)
class Results:
    """What was measured, by the name of the arm."""

    arms: list[Arm]
    race: Race  # its times are of a step: a visit's, divided by its steps
    parameters: int
    batch_sizes: list[int]  # of every step of the first arm, in samples
    losses: dict[str, list[float]]
    scores: dict[str, list[Score]]  # one each; none where the task has no `evaluate`
    shares: dict[str, Shares]  # where the time of a step goes
    workers: int = 0  # of the loaders
    visit_steps: int = 1
    left_out: dict[str, str] = field(default_factory=dict)  # why an arm is, in words
    failures: list[str] = field(default_factory=list)  # trainings whose loss became NaN, in words


def race_arms(
    arms: Sequence[Arm],
    device: str,
    seed: int,
    *,
    steps: int | None = None,
    batch_size: int | None = None,
    tick: Callable[[], object] = lambda: None,
) -> Results:
    """Race the arms of a task; `steps` are those of the first build, None: as many as it takes."""
    found: list[Results] = []

    def build(_: list[str], number: int) -> dict[str, Build]:
        left = found[0].arms if found else [*arms]
        count = steps if number == 1 else None
        found.append(apart.run_apart(_train, left, device, seed, count, batch_size, PLAN, number))
        return {"": found[-1].race.builds[0]}

    race = collect(build, [""], PLAN, is_apart=True, tick=tick)[""]
    failures = next((each.failures for each in found if each.failures), [])
    return replace(found[0], race=race, failures=failures)


def race_task(arms: Sequence[Arm], device: str, seed: int, **options: int | None) -> Results:
    """Race the arms of a task under a progress bar."""
    with progress(PLAN.builds[-1]) as tick:
        return race_arms(arms, device, seed, tick=tick, **options)


def _train(
    arms: list[Arm],
    device: str,
    seed: int,
    all_steps: int | None,
    batch_size: int | None,
    plan: Plan,
    number: int,
) -> Results:
    """Race all arms in the build of a number; in the first one also score them."""
    runners, left_out = _begin(arms, device, seed, batch_size)
    case = Case(
        arms={name: each.visit for name, each in runners.items()},
        before=lambda name: runners[name].prepare(),
        skipped=lambda name: runners[name].trainer.has_skipped(),
    )
    race_visits = partial(run_build, case, device=device, seed=seed * 1000 + number)
    count = _count_warmup(all_steps) - 1  # the first step is over
    warmup = race_visits(Plan(rounds=count, warmup=count)).warmup if count else []
    last = [visit.elapsed_s for visit in warmup[-1].values()] if warmup else [VISIT_S]
    workers = max(runner.workers for runner in runners.values())
    steps, plan = _plan_visits(min(last), all_steps, plan, least=2 * AHEAD * workers)

    def set_steps(number_of_steps: int) -> None:
        for runner in runners.values():
            runner.steps = number_of_steps

    if all_steps is not None and (rest := all_steps - count - 1 - steps * plan.rounds):
        set_steps(rest)
        warmup += _per_step(race_visits(Plan(rounds=1, warmup=1)).warmup, rest)
    set_steps(steps)
    build = race_visits(plan)
    build.warmup, build.rounds = warmup, _per_step(build.rounds, steps)
    losses = {n: torch.stack(each.trainer.losses).tolist() for n, each in runners.items()}
    is_first = number == 1
    sizes = [*runners[arms[0].name].sizes]
    return Results(
        arms=[arm for arm in arms if arm.name in runners],
        race=Race(arms=build.arms, builds=[build]),
        parameters=sum(p.numel() for p in runners[arms[0].name].trainer.model.parameters()),
        batch_sizes=sizes,
        losses=losses,
        scores={name: each.score() if is_first else [] for name, each in runners.items()},
        shares={n: find_shares(each, device) for n, each in runners.items()} if is_first else {},
        workers=workers,
        visit_steps=steps,
        left_out=left_out,
        failures=[why for name, curve in losses.items() for why in find_failure(name, curve)],
    )


def _begin(
    arms: list[Arm], device: str, seed: int, batch_size: int | None
) -> tuple[dict[str, Runner], dict[str, str]]:
    """Return all arms after their first step, and why those in a lower precision cannot train.

    Raises:
        BrokenTask: an arm in FP32, or one of one's own, cannot train, or memory is too small for
            all.
    """
    runners: dict[str, Runner] = {}
    left_out: dict[str, str] = {}
    for arm in arms:
        try:
            runner = Runner(arm, device, seed, batch_size)
            runner.prepare()
            runner.visit()
        except BrokenTask as error:  # noqa: PERF203 - an arm takes seconds
            if error.line.startswith(OUT_OF_MEMORY) and runners:
                raise BrokenTask(_too_large(arm, [*runners]), error.trace) from None
            if arm.precision == "fp32" or arm.is_own:
                raise
            left_out[arm.name] = error.line
            gc.collect()
        else:
            runners[arm.name] = runner
    return runners, left_out


def _too_large(arm: Arm, others: list[str]) -> str:
    names = ", ".join(others)
    need = f"{arm.name} does not fit into memory beside {names}, which do"
    return f"memory: {need}; race fewer, as with --precision fp32, or smaller batches"


def find_failure(name: str, losses: list[float]) -> list[str]:
    """Return that a training has failed, in words, if its last loss is NaN or infinite."""
    finite = [place for place, loss in enumerate(losses, start=1) if math.isfinite(loss)]
    first = finite[-1] + 1 if finite else 1
    if first > len(losses):
        return []
    steps = f"from step {first} of {len(losses)} on"
    return [f"the training of {name} has failed: its loss is {losses[-1]} {steps}"]


def last_loss(found: Results, arm: str) -> float:
    """Return the validation loss, or the mean of the last quarter of the training."""
    for score in found.scores[arm]:
        if score.loss is not None:
            return score.loss
    curve = found.losses[arm]
    return fmean(curve[-(len(curve) // 4 or 1) :] or [math.nan])


def _per_step(rounds: list[dict[str, Visit]], steps: int) -> list[dict[str, Visit]]:
    return [
        {name: each._replace(elapsed_s=each.elapsed_s / steps) for name, each in round_.items()}
        for round_ in rounds
    ]


def _count_warmup(all_steps: int | None) -> int:
    """Return how many steps an arm takes first: so few that three blocks are left."""
    if all_steps is None:
        return WARMUP_STEPS
    return min(WARMUP_STEPS, max(all_steps - 2 * LEAST_BLOCKS, 1))


def _plan_visits(
    step_s: float, all_steps: int | None, plan: Plan, least: int = 0
) -> tuple[int, Plan]:
    """Return the steps of a visit, and the plan of a build after the warm-up.

    Where every arm takes `all_steps`, six blocks are left if there are enough, and three if three
    of single steps fit in; the build never stops early, whatever the machine. With workers a visit
    has at `least` so many steps, since some batches were made while other arms ran.
    """
    steps = min(max(math.ceil(VISIT_S / max(step_s, 1e-9)), 1), MOST_STEPS)
    steps = max(steps, least)
    if all_steps is None:
        return steps, replace(plan, rounds=OPEN_STEPS // steps, warmup=0)
    left = all_steps - _count_warmup(all_steps)
    steps = max(min(steps, left // (4 * LEAST_BLOCKS)), 1)
    return steps, Plan(rounds=left // steps, warmup=0)
