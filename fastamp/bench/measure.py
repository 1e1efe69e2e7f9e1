"""What the main job measures: time, losses and scores of all arms, and where their time goes.

The timed steps are the training. A visit of an arm is several steps, so that a GPU launches ahead
as it does in a training; all arms of a round take their steps on the same batches.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastamp._progress import progress
from fastamp.bench.advice import Profile
from fastamp.bench.peaks import peak_memory
from fastamp.bench.race import LEAST_BLOCKS, Plan, Race, Visit, run_race
from fastamp.bench.tasks import (
    BrokenTask,
    Make,
    Training,
    count_samples,
    draw,
    make_loader,
    make_training,
    with_copy,
)
from fastamp.bench.trainer import LEAN, Config, Score, Trainer
from fastamp.bench.where import profile_trainers

WARMUP_STEPS = 4  # at most: kernels, optimizer state and the allocator's pools are made
VISIT_S = 0.05  # of the fastest arm, at least
MOST_STEPS = 40  # of a visit: by then one wait for the device no longer counts
# Without --steps: as many steps as narrow intervals take, warm-up aside.
OPEN_STEPS = 2000
OPEN = Plan(rounds=OPEN_STEPS, warmup=0, half_width=0.005, least_blocks=24, limit_s=60.0)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every arm of one benchmark has in common."""

    device: str
    precision: str
    seed: int
    steps: int | None  # of every arm; None: as many as it takes
    make: Make  # can be pickled
    memory_make: Make  # the same, for the processes that measure peak memory
    batch_size: int | None = None  # in place of the task's own

    def make_training(self, seed: int, make: Make | None = None) -> Training:
        """Return the task, with the weights that every arm starts from."""
        training = make_training(make or self.make, self.device, seed)
        return replace(training, batch_size=self.batch_size or training.batch_size)

    def list_arms(self) -> list[Config]:
        """Return FP32 (on CUDA strict and with TF32), lean, stock AMP, and AMP with fastamp's step.

        The last one is judged.
        """
        full = ["fp32-strict", "fp32-tf32"] if self.device == "cuda" else ["fp32"]
        stock = Config(name="amp", precision=self.precision)
        ours = replace(stock, name="amp+fastamp", step="fastamp")
        lean = Config(name=LEAN, precision=LEAN, step="fastamp")
        return [*(Config(name=name, precision=name) for name in full), lean, stock, ours]


class Batches:
    """The batches of a visit: every arm takes its steps on them before the next are drawn."""

    def __init__(self, source: Iterable[Any], seed: int) -> None:
        self.source, self.seed = iter(source), seed
        self.steps = 1  # of a visit
        self.of_visit: list[Any] = []
        self.sizes: list[int] = []  # of all batches so far, in samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.of_visit)

    def go_to_visit_of(self, trainer: Trainer) -> None:
        """Draw the batches of an arm's next visit, unless another arm has, and seed the visit.

        So the random numbers of its steps, such as dropout's, are the same for all arms.
        """
        taken = len(trainer.losses)
        if taken == len(self.sizes):
            self.of_visit = [next(self.source) for _ in range(self.steps)]
            self.sizes += map(count_samples, self.of_visit)
        torch.manual_seed((self.seed << 30) + taken)


@dataclass(frozen=True, kw_only=True)
class Results:
    """What was measured, by arm: peaks in bytes, losses, and one score for each seed."""

    parameters: int
    batch_sizes: list[int]  # in samples, of every step
    peaks: dict[str, int | None]  # None where the platform counts none
    race: Race  # its times are of a step: a visit's, divided by its steps
    losses: dict[str, list[float]]
    scores: dict[str, list[Score]]  # empty lists where the task has no `evaluate`
    profiles: dict[str, Profile]  # where the time of a step goes
    visit_steps: int = 1  # of every timed visit
    nbytes: dict[str, dict[str, int]] = field(default_factory=dict)  # by arm and part of memory
    left_out: str = ""  # why lean is, in words


def train_arms(job: Job, training: Training, *, seeds: int) -> Results:
    """Measure every arm with the job's seed; with the seeds after it, train and score only."""
    arms, left_out = job.list_arms(), ""
    total = None if job.steps is None else len(arms) + seeds * job.steps
    make = partial(job.make_training, job.seed, job.memory_make)
    with progress(total) as tick:
        peaks = {}
        for arm in arms:
            try:
                peaks[arm.name] = peak_memory(make, arm, job.device)
            except BrokenTask as error:  # the others are measured without lean
                if arm.name != LEAN:
                    raise
                left_out = error.line
            tick()
        arms = [arm for arm in arms if arm.name in peaks]
        trained = [_train(job, arms, training, tick, profiles=True)]
        for seed in range(job.seed + 1, job.seed + seeds):
            again = replace(job, seed=seed, steps=len(trained[0].batch_sizes))
            trained.append(_train(again, arms, job.make_training(seed), tick, profiles=False))
    scores = {name: [s for each in trained for s in each.scores[name]] for name in peaks}
    return replace(trained[0], peaks=peaks, scores=scores, left_out=left_out)


def _train(
    job: Job,
    arms: list[Config],
    training: Training,
    tick: Callable[[int], object],
    *,
    profiles: bool,
) -> Results:
    """Race and score all arms with one seed."""
    trainers = {c.name: Trainer(c, with_copy(training), job.device) for c in arms}
    loader = make_loader(training, job.seed, device=job.device)
    batches = Batches(draw(loader, job.device), job.seed)
    race_visits = partial(
        run_race,
        {name: partial(trainer.train, batches) for name, trainer in trainers.items()},
        device=job.device,
        seed=job.seed,
        before=lambda name: batches.go_to_visit_of(trainers[name]),
        skipped=lambda name: trainers[name].has_skipped(),
        tick=lambda: tick(batches.steps),
    )
    count = _count_warmup(job.steps)
    warmup = race_visits(Plan(rounds=count, warmup=count)).rounds
    step_s = min(visit.elapsed_s for visit in warmup[-1].values())
    steps, plan = _plan_visits(step_s, job.steps)
    if job.steps is not None and (rest := job.steps - count - steps * plan.rounds):
        batches.steps = rest
        warmup += _per_step(race_visits(Plan(rounds=1, warmup=1)).rounds, rest)
    batches.steps = steps
    race = race_visits(plan)
    race.warmup_rounds += len(warmup)
    race.rounds = warmup + _per_step(race.rounds, steps)
    profiled = trainers if profiles else {}
    return Results(
        # Not those of the task, whose lazy modules have none yet.
        parameters=sum(p.numel() for p in next(iter(trainers.values())).model.parameters()),
        batch_sizes=[*batches.sizes],
        visit_steps=steps,
        peaks={},
        race=race,
        losses={n: torch.stack(trainer.losses).tolist() for n, trainer in trainers.items()},
        scores={name: trainer.evaluate() for name, trainer in trainers.items()},
        profiles=profile_trainers(profiled, batches.source, loader, race, steps),
        nbytes={name: _count_nbytes(trainer) for name, trainer in trainers.items()},
    )


def _count_nbytes(trainer: Trainer) -> dict[str, int]:
    """Count the bytes of the storages of weights and of states, and of gradients in a step."""
    states = (state for state in trainer.optimizer.state.values() if isinstance(state, dict))
    kept = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return {
        "weights": _count_storages([*trainer.model.parameters()]),
        "gradients": sum(p.nbytes for p in trainer.parameters if p.requires_grad),
        "optimizer": _count_storages(kept),
    }


def _count_storages(tensors: list[Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _per_step(rounds: list[dict[str, Visit]], steps: int) -> list[dict[str, Visit]]:
    return [
        {name: visit._replace(elapsed_s=visit.elapsed_s / steps) for name, visit in visits.items()}
        for visits in rounds
    ]


def _count_warmup(all_steps: int | None) -> int:
    """Return how many steps an arm takes first: so few that three blocks are left."""
    if all_steps is None:
        return WARMUP_STEPS
    return min(WARMUP_STEPS, max(all_steps - 2 * LEAST_BLOCKS, 1))


def _plan_visits(step_s: float, all_steps: int | None) -> tuple[int, Plan]:
    """Return the steps of a visit, and the plan of the race after the warm-up.

    Where every arm takes `all_steps`, six blocks are left if there are enough, and three if three
    of single steps fit in; the race never stops early, whatever the machine.
    """
    steps = min(max(math.ceil(VISIT_S / max(step_s, 1e-9)), 1), MOST_STEPS)
    if all_steps is None:
        return steps, replace(OPEN, rounds=OPEN_STEPS // steps)
    left = all_steps - _count_warmup(all_steps)
    steps = max(min(steps, left // (4 * LEAST_BLOCKS)), 1)
    return steps, Plan(rounds=left // steps, warmup=0)
