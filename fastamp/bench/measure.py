"""What the main job measures: time, losses and scores of all arms, and where their time goes.

The timed steps are the training, and all arms of a round take their step on the same batch.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fastamp._progress import progress
from fastamp.bench.advice import Profile
from fastamp.bench.arms import Arm, Job, Run, Score, evaluate, make_arms
from fastamp.bench.peaks import peak_memory
from fastamp.bench.race import Plan, Race, run_race
from fastamp.bench.tasks import Training, copy_model, count_samples, draw, make_loader
from fastamp.bench.where import profile_runs

WARMUP_STEPS = 4  # at most: kernels, optimizer state and the allocator's pools are made
# Without --steps: as many as narrow intervals take.
OPEN = Plan(rounds=2000, warmup=WARMUP_STEPS, half_width=0.005, least_blocks=24, limit_s=60.0)


class Feed:
    """The batches of a training: every arm takes a step on one before the next is drawn."""

    def __init__(self, batches: Iterable[Any], seed: int) -> None:
        self.batches, self.seed = iter(batches), seed
        self.place, self.batch = -1, None
        self.sizes: list[int] = []  # of all batches so far, in samples

    def go_to_step_of(self, runs: dict[str, Run], name: str) -> None:
        """Draw the batch of an arm's next step, unless another arm has, and seed the step.

        So the step's random numbers, such as dropout's, are the same for all arms.
        """
        place = len(runs[name].losses)
        if place > self.place:
            self.place, self.batch = place, next(self.batches)
            self.sizes.append(count_samples(self.batch))
        torch.manual_seed(self.seed * OPEN.rounds + place)


@dataclass(frozen=True, kw_only=True)
class Results:
    """What was measured, by arm: peaks in bytes, losses, and one score for each seed."""

    parameters: int
    batch_sizes: list[int]  # in samples, of every step
    peaks: dict[str, int | None]  # None where the platform counts none
    race: Race
    losses: dict[str, list[float]]
    scores: dict[str, list[Score]]  # empty lists where the task has no `evaluate`
    profiles: dict[str, Profile]  # where the time of a step goes


def train_arms(job: Job, training: Training, *, seeds: int) -> Results:
    """Measure every arm with the job's seed; with the seeds after it, train and score only."""
    arms = make_arms(job)
    trained: list[Results] = []
    plan = OPEN if job.steps is None else _plan(job.steps)
    with progress(len(arms) + seeds * plan.rounds) as tick:
        peaks = {}
        for arm in arms:
            peaks[arm.name] = peak_memory(job, arm)
            tick()
        for seed in range(job.seed, job.seed + seeds):
            if trained:
                training = job.make_training(seed)
            runs = _make_runs(job, training, arms)
            loader = make_loader(training, seed, device=job.device)
            feed = Feed(draw(loader, job.device), seed)
            race = run_race(
                {name: partial(_step, run, feed) for name, run in runs.items()},
                plan,
                device=job.device,
                seed=seed,
                before=partial(feed.go_to_step_of, runs),
                skipped=partial(_has_skipped, runs),
                tick=tick,
            )
            plan = _plan(len(race.rounds))  # the same for every seed
            scores = {name: evaluate(run) for name, run in runs.items()}
            found = Results(
                # Not those of the task, whose lazy modules have none yet.
                parameters=sum(p.numel() for p in runs[arms[0].name].model.parameters()),
                batch_sizes=feed.sizes,
                peaks=peaks,
                race=race,
                losses={name: torch.stack(run.losses).tolist() for name, run in runs.items()},
                scores={name: [] if score is None else [score] for name, score in scores.items()},
                profiles={},
            )
            if not trained:
                found.profiles.update(profile_runs(runs, feed.batches, loader, race))
            trained.append(found)
    joined = {name: [s for each in trained for s in each.scores[name]] for name in race.arms}
    return replace(trained[0], scores=joined)


def _plan(steps: int) -> Plan:
    """Return a plan of a given length, which never stops early, whatever the machine.

    Three blocks are left after the warm-up if there are enough steps.
    """
    return Plan(rounds=steps, warmup=min(WARMUP_STEPS, max(steps - 6, 1)))


def _make_runs(job: Job, training: Training, arms: list[Arm]) -> dict[str, Run]:
    copies = [replace(training, model=copy_model(training)) for _ in arms]
    return {a.name: Run(a, job.device, each) for a, each in zip(arms, copies, strict=True)}


def _has_skipped(runs: dict[str, Run], name: str) -> bool:
    return runs[name].skipped()


def _step(run: Run, feed: Feed) -> None:
    run.train_step(feed.batch)
