"""What the main job measures: time, losses and scores of all arms, and where their time goes.

The timed steps are a training. A visit of an arm is several steps, so that a GPU launches ahead
as it does in a training; all arms of a round take their steps on the same batches. The first build
trains all steps, and its losses and scores are shown; the others are for the times alone.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from statistics import fmean
from typing import Any, TypeVar

import torch
from torch import Tensor

from fastamp._progress import progress
from fastamp.bench import apart, arms
from fastamp.bench.advice import Profile
from fastamp.bench.peaks import peak_memory
from fastamp.bench.race import Build, Case, Plan, Race, Visit, collect, run_build
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
from fastamp.bench.where import profile_trainers, scale

LEAST_BLOCKS = 3
WARMUP_STEPS = 4  # at most: kernels, optimizer state and the allocator's pools are made
VISIT_S = 0.05  # of the fastest arm, at least
MOST_STEPS = 40  # of a visit: by then one wait for the device no longer counts
# Without --steps, and in all builds but the first: as many steps as fit into this time.
OPEN_STEPS = 2000
PLAN = Plan(build_s=8.0, limit_s=100.0)
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every arm of one benchmark has in common."""

    device: str
    precision: str
    seed: int
    steps: int | None  # of every arm; None: as many as it takes
    make: Make  # can be pickled
    memory_make: Make  # the same, for the processes that measure peak memory
    memory_batch: int | None = None  # theirs, where it is another one
    batch_size: int | None = None  # in place of the task's own
    added: tuple[tuple[str, str], ...] = ()  # arms of --arm, see arms.read
    against: str | None = None  # the arm that those of one's own change; None: the first

    def make_training(self, seed: int, make: Make | None = None) -> Training:
        """Return the task, with the weights that every arm starts from."""
        training = make_training(make or self.make, self.device, seed)
        batch_size, own = self.batch_size or training.batch_size, arms.find(training, self.added)
        return replace(training, batch_size=batch_size, arms=own)

    def list_arms(self, own: Iterable[str] = ()) -> list[Config]:
        """Return FP32 (on CUDA strict and with TF32), lean, stock AMP, and AMP with fastamp's step.

        The last one is judged. Arms of one's `own` stand before AMP: each is that of `against`.
        Of a job in FP32: FP32, and FP32 with fastamp's step.
        """
        full = ["fp32-strict", "fp32-tf32"] if self.device == "cuda" else ["fp32"]
        stock = Config(name="amp", precision=self.precision)
        ours = replace(stock, name="amp+fastamp", step="fastamp")
        first = [Config(name=name, precision=name) for name in full]
        last = [stock, ours]
        if self.precision == "fp32":
            last = [replace(ours, name="fp32+fastamp")]
        else:
            first.append(Config(name=LEAN, precision=LEAN, step="fastamp"))
        known = {config.name: config for config in (*first, *last)}
        like = known[self.against or full[0]]
        return [*first, *(replace(like, name=name, is_own=True) for name in own), *last]

    def try_arms(
        self, training: Training, attempt: Callable[[Config], _T]
    ) -> tuple[dict[Config, _T], dict[str, str]]:
        """Return what an attempt gives for each arm, and why built-in arms are left out, by name.

        Raises:
            BrokenTask: of any other arm, or of the one that others change.
        """
        found, left_out = {}, {}
        for arm in self.list_arms(training.arms):
            try:
                found[arm] = attempt(arm)
            except BrokenTask as error:  # noqa: PERF203 - an arm takes seconds
                is_ours = arm.name == LEAN or arms.is_built_in(arm.name, training)
                if arm.name == self.against or not is_ours:
                    raise
                left_out[arm.name] = error.line
        return found, left_out


class Batches:
    """The batches of a visit: every arm takes its steps on them before the next are drawn.

    Where a loader is an arm's change, each arm has its own, and draws them on the clock.
    """

    def __init__(self, source: Iterable[Any], seed: int, *, is_timed: bool = False) -> None:
        self.source, self.seed, self.is_timed = iter(source), seed, is_timed
        self.steps = 1  # of a visit
        self.of_visit: list[Any] = []
        self.sizes: list[int] = []  # of the batches of all steps so far, in samples

    def __iter__(self) -> Iterator[Any]:
        if not self.is_timed:
            yield from self.of_visit
            return
        for batch in islice(self.source, self.steps):
            self.sizes.append(count_samples(batch))
            yield batch

    def go_to_visit_of(self, trainer: Trainer) -> None:
        """Draw the batches of an arm's next visit, unless another arm has, and seed the visit.

        So the random numbers of its steps, such as dropout's, are the same for all arms.
        """
        taken = len(trainer.losses)
        if taken == len(self.sizes) and not self.is_timed:
            self.of_visit = [next(self.source) for _ in range(self.steps)]
            self.sizes += map(count_samples, self.of_visit)
        torch.manual_seed((self.seed << 30) + taken)


def open_batches(trainers: Mapping[str, Trainer], seed: int) -> dict[str, Batches]:
    """Return the batches of every arm: arms that read the same ones share them."""
    tasks = {name: trainer.training for name, trainer in trainers.items()}
    is_timed = len({id(task.data) for task in tasks.values()}) > 1
    opened: dict[Any, Batches] = {}
    found = {}
    for name, task in tasks.items():
        key = (task.batch_size, task.accumulate, is_timed and name)
        if key not in opened:
            device = trainers[name].device
            drawn = draw(make_loader(task, seed, device=device), device, task.accumulate)
            opened[key] = Batches(drawn, seed, is_timed=is_timed)
        found[name] = opened[key]
    return found


def set_steps(batches: Mapping[str, Batches], steps: int) -> dict[str, float]:
    """Set the steps of a visit: of the first arm, and of others as many as take its samples.

    Returns how many times the samples of a step of the first arm a visit of each has.
    """
    sizes = {name: fmean(each.sizes) for name, each in batches.items()}
    base = next(iter(sizes.values()))
    for name, each in batches.items():
        each.steps = max(round(steps * base / sizes[name]), 1)
    return {name: each.steps * sizes[name] / base for name, each in batches.items()}


@dataclass(frozen=True, kw_only=True)
class Results:
    """What was measured, by arm: peaks in bytes, losses and scores."""

    parameters: int
    batch_sizes: list[int]  # in samples, of every step
    peaks: dict[str, int | None]  # None where the platform counts none
    race: Race  # its times are of a step: a visit's, divided by its steps
    losses: dict[str, list[float]]
    scores: dict[str, list[Score]]  # one each; none where the task has no `evaluate`
    profiles: dict[str, Profile]  # where the time of a step goes
    visit_steps: int = 1  # of every timed visit
    nbytes: dict[str, dict[str, int]] = field(default_factory=dict)  # by arm and part of memory
    worth: dict[str, float] = field(default_factory=dict)  # of an arm's step: its samples, by arm
    samples: dict[str, int] = field(default_factory=dict)  # in all steps, by arm
    is_data_timed: bool = False
    left_out: dict[str, str] = field(default_factory=dict)  # why an arm is, in words
    memory_batch: int | None = None  # of the peaks, where it is not that of the steps
    failures: list[str] = field(default_factory=list)  # trainings whose loss became NaN, in words


def train_arms(job: Job, training: Training) -> Results:
    """Measure every arm."""
    make = partial(job.make_training, job.seed, job.memory_make)
    trained: list[Results] = []
    with progress(PLAN.builds[-1]) as tick:
        found, left_out = job.try_arms(training, lambda arm: peak_memory(make, arm, job.device))
        configs, peaks = [*found], {arm.name: nbytes for arm, nbytes in found.items()}

        def build(_: list[str], number: int) -> dict[str, Build]:
            short = job if number == 1 else replace(job, steps=None)
            trained.append(apart.run_apart(_train, short, configs, PLAN, number))
            return {"": trained[-1].race.builds[0]}

        race = collect(build, [""], PLAN, is_apart=True, tick=tick)[""]
    first = trained[0]
    if training.arms:  # each to the base, those of one's own to another arm, and AMP's two
        race.comparisons = len(configs) + (len(training.arms) if job.against else 0)
    profiles = {
        name: scale(profile, race.quartiles_s(name)[1] / first.race.quartiles_s(name)[1])
        for name, profile in first.profiles.items()
    }
    failures = next((each.failures for each in trained if each.failures), [])
    more: dict[str, Any] = {"left_out": left_out, "memory_batch": job.memory_batch}
    more["failures"] = failures
    return replace(first, race=race, peaks=peaks, profiles=profiles, **more)


def _train(job: Job, configs: list[Config], plan: Plan, number: int) -> Results:
    """Race all arms in the build of a number; in the first one also score them."""
    training = job.make_training(job.seed)
    trainers = {c.name: Trainer(c, with_copy(training), job.device) for c in configs}
    batches = open_batches(trainers, job.seed)
    base = batches[configs[0].name]
    case = Case(
        arms={name: partial(trainer.train, batches[name]) for name, trainer in trainers.items()},
        before=lambda name: batches[name].go_to_visit_of(trainers[name]),
        skipped=lambda name: trainers[name].has_skipped(),
    )
    race_visits = partial(run_build, case, device=job.device, seed=job.seed * 1000 + number)
    count = _count_warmup(job.steps)
    warmup = race_visits(Plan(rounds=count, warmup=count)).warmup
    step_s = min(visit.elapsed_s for visit in warmup[-1].values())
    steps, plan = _plan_visits(step_s, job.steps, plan)
    if job.steps is not None and (rest := job.steps - count - steps * plan.rounds):
        amounts = set_steps(batches, rest)
        warmup += _per_step(race_visits(Plan(rounds=1, warmup=1)).warmup, amounts)
    amounts = set_steps(batches, steps)
    build = race_visits(plan)
    build.warmup, build.rounds = warmup, _per_step(build.rounds, amounts)
    race, is_first = Race(arms=build.arms, builds=[build]), number == 1
    profiled = {name: each for name, each in trainers.items() if name not in training.arms}
    loader = make_loader(training, job.seed, device=job.device)
    timed = {"is_data_timed": base.is_timed}
    losses = {name: torch.stack(each.losses).tolist() for name, each in trainers.items()}
    return Results(
        parameters=sum(p.numel() for p in training.model.parameters()),
        batch_sizes=[*base.sizes],
        worth={name: amount / batches[name].steps for name, amount in amounts.items()},
        samples={name: sum(each.sizes) for name, each in batches.items()},
        visit_steps=steps,
        peaks={},
        race=race,
        losses=losses,
        failures=[why for name, curve in losses.items() for why in find_failure(name, curve)],
        scores={name: each.evaluate() if is_first else [] for name, each in trainers.items()},
        profiles=profile_trainers(profiled, base.source, loader, race, steps, **timed)
        if is_first
        else {},
        nbytes={name: _count_nbytes(trainer) for name, trainer in trainers.items()},
        is_data_timed=base.is_timed,
    )


def find_failure(name: str, losses: list[float]) -> list[str]:
    """Return that a training has failed, in words, if its last loss is NaN or infinite."""
    finite = [place for place, loss in enumerate(losses, start=1) if math.isfinite(loss)]
    first = finite[-1] + 1 if finite else 1
    if first > len(losses):
        return []
    steps = f"from step {first} of {len(losses)} on"
    return [f"the training of {name} has failed: its loss is {losses[-1]} {steps}"]


def _count_nbytes(trainer: Trainer) -> dict[str, int]:
    """Count the bytes of the storages of weights and of states, and of gradients in a step."""
    every = (state for each in trainer.optimizers for state in each.state.values())
    states = (state for state in every if isinstance(state, dict))
    kept = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return {
        "weights": _count_storages([*trainer.model.parameters()]),
        "gradients": sum(p.nbytes for p in trainer.parameters if p.requires_grad),
        "optimizer": _count_storages(kept),
    }


def _count_storages(tensors: list[Tensor]) -> int:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _per_step(
    rounds: list[dict[str, Visit]], amounts: Mapping[str, float]
) -> list[dict[str, Visit]]:
    return [
        {name: each._replace(elapsed_s=each.elapsed_s / amounts[name]) for name, each in r.items()}
        for r in rounds
    ]


def _count_warmup(all_steps: int | None) -> int:
    """Return how many steps an arm takes first: so few that three blocks are left."""
    if all_steps is None:
        return WARMUP_STEPS
    return min(WARMUP_STEPS, max(all_steps - 2 * LEAST_BLOCKS, 1))


def _plan_visits(step_s: float, all_steps: int | None, plan: Plan) -> tuple[int, Plan]:
    """Return the steps of a visit, and the plan of a build after the warm-up.

    Where every arm takes `all_steps`, six blocks are left if there are enough, and three if three
    of single steps fit in; the build never stops early, whatever the machine.
    """
    steps = min(max(math.ceil(VISIT_S / max(step_s, 1e-9)), 1), MOST_STEPS)
    if all_steps is None:
        return steps, replace(plan, rounds=OPEN_STEPS // steps, warmup=0)
    left = all_steps - _count_warmup(all_steps)
    steps = max(min(steps, left // (4 * LEAST_BLOCKS)), 1)
    return steps, Plan(rounds=left // steps, warmup=0)
