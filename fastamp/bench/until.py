"""Time to equal loss: the seconds of training until an arm's held-out loss reaches a target.

Every seed trains all arms in turn, a part of the horizon each, from the same weights. Between the
parts their weights are scored by one model in FP32. Evaluations are not on the clock, nor are the
first steps beyond the time of later ones: they compile and allocate.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from statistics import fmean, median, stdev
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from fastamp._progress import progress
from fastamp.bench.measure import Batches, Job, open_batches, set_steps
from fastamp.bench.race import CONFIDENCE, SAID, UNTOLD, Interval, show, student
from fastamp.bench.record import Measurement, Report
from fastamp.bench.tasks import Part, Training, expect, short, with_copy
from fastamp.bench.trainer import Config, Trainer

SEEDS = 5  # at least
STEPS = 400  # of the reference's horizon, without --steps
PARTS = 40  # of the horizon: a visit, and an evaluation after it
EQUAL = 0.9  # of the reference's steps, where its loss is the target: the end is noisy
MOST = 2.0  # times the reference's seconds, after which an arm stops
FIRST = 2  # visits of an arm, of one step and of a part, that are charged the time of later ones


@dataclass(kw_only=True)
class Curve:
    """The held-out losses of an arm, at first and after each of its visits."""

    losses: list[float]
    steps: list[int] = field(default_factory=lambda: [0])
    seconds: list[float] = field(default_factory=lambda: [0.0])
    start_s: float = 0.0  # of the first visits, beyond what is charged
    visits: list[tuple[int, float]] = field(default_factory=list, repr=False)  # steps, seconds

    def add(self, steps: int, elapsed_s: float, loss: float) -> None:
        """Add a visit and the loss after it."""
        self.visits.append((steps, elapsed_s))
        self.losses.append(loss)
        self.steps.append(self.steps[-1] + steps)
        later = [time_s / n for n, time_s in self.visits[FIRST:]]
        first = [n * median(later) for n, _ in self.visits[:FIRST]] if later else []
        times_s = [time_s for _, time_s in self.visits]
        charged = first + times_s[len(first) :]
        self.start_s = math.fsum(times_s) - math.fsum(charged)
        self.seconds = [0.0, *np.cumsum(charged).tolist()]

    def smooth(self) -> list[float]:
        """Return the median of each loss and its neighbours."""
        inner = [median(self.losses[i : i + 3]) for i in range(len(self.losses) - 2)]
        return [self.losses[0], *inner, self.losses[-1]]

    def cross(self, target: float) -> tuple[float, float] | None:
        """Return the seconds and the steps at which the smooth loss reaches a target, if it does.

        The last loss has no neighbour yet, and decides nothing.
        """
        losses = self.smooth()[:-1]
        place = next((i for i, loss in enumerate(losses) if loss <= target), None)
        if place is None:
            return None
        at = max(place - 1, 0), place
        share = (losses[at[0]] - target) / ((losses[at[0]] - losses[at[1]]) or 1.0)
        seconds, steps = (
            each[at[0]] + share * (each[at[1]] - each[at[0]]) for each in (self.seconds, self.steps)
        )
        return seconds, steps


Seed = dict[str, Curve]  # by arm
_SCHEDULE = Part("options['schedule']", "its call or its step")


def run(job: Job, steps: int, seeds: range, target: float | None) -> Report:
    """Train every seed's arms until they reach a loss; None is the reference's own at EQUAL."""
    training = job.make_training(job.seed)

    def make(config: Config) -> None:
        Trainer(config, with_copy(training), job.device)

    found, left_out = job.try_arms(training, make)
    configs = [*found]
    reference = next(config for config in configs if job.against in {None, config.name})
    with progress(len(seeds) * (1 + (target is None))) as tick:
        if target is None:
            target = fmean(_loss_at(job, reference, seed, steps) for seed in _each(seeds, tick))
        curves = [
            _train(job, configs, reference.name, seed, steps, target) for seed in _each(seeds, tick)
        ]
    return _report(curves, reference.name, target, left_out)


def _each(seeds: range, tick: Callable[[], object]) -> Iterator[int]:
    for seed in seeds:
        yield seed
        tick()


def _loss_at(job: Job, config: Config, seed: int, steps: int) -> float:
    """Return an arm's smooth loss at EQUAL of its steps."""
    curve = _train(job, [config], config.name, seed, steps, -math.inf)[config.name]
    return float(np.interp(EQUAL * steps, curve.steps, curve.smooth()))


def _train(
    job: Job, configs: list[Config], reference: str, seed: int, steps: int, target: float
) -> Seed:
    """Train all arms with one seed until each has crossed the target, or its time is over.

    The reference stops after its steps where no loss is a target, and else after MOST times them.
    """
    training = job.make_training(seed)
    trainers = {c.name: Trainer(c, with_copy(training), job.device) for c in configs}
    judge = Trainer(Config(name="fp32"), with_copy(training), job.device)
    curves = {name: Curve(losses=[_score(judge, each)]) for name, each in trainers.items()}
    batches = open_batches(trainers, seed)
    schedules = {name: _make_schedule(each, training, steps) for name, each in trainers.items()}
    most = steps if target == -math.inf else MOST * steps
    live, rng, part = [*trainers], np.random.default_rng(seed), max(round(steps / PARTS), 1)
    while live:
        for name in rng.permutation(live).tolist():
            trainer, before = trainers[name], len(trainers[name].losses)
            elapsed_s = _time_visit(trainer, batches[name], schedules[name])
            curves[name].add(len(trainer.losses) - before, elapsed_s, _score(judge, trainer))
        set_steps(batches, part)  # after the first visits, of one step
        crossed = curves[reference].cross(target)
        for name in [*live]:
            is_late = curves[reference].steps[-1] >= most
            if crossed is not None:
                is_late = curves[name].seconds[-1] > MOST * crossed[0]
            if is_late or curves[name].cross(target) is not None:
                live.remove(name)
    return curves


def _make_schedule(trainer: Trainer, training: Training, steps: int) -> Callable[[], None]:
    """Return what follows each step: the task's schedulers, until all of their steps are over.

    A horizon has as many samples for all arms.
    """
    own = trainer.training
    sizes = [each.batch_size * each.accumulate for each in (training, own)]
    horizon = max(round(steps * sizes[0] / sizes[1]), 1)
    schedulers: list[Any] = []
    with _SCHEDULE:
        if own.schedule is not None:
            schedulers = [own.schedule(optimizer, horizon) for optimizer in trainer.optimizers]
    for each in schedulers:
        expect(isinstance(each, LRScheduler), _SCHEDULE.name, "a scheduler of torch's", short(each))

    def advance() -> None:
        if len(trainer.losses) <= horizon:
            with _SCHEDULE:
                for each in schedulers:
                    each.step()

    return advance


def _time_visit(trainer: Trainer, batches: Batches, advance: Callable[[], None]) -> float:
    def scheduled() -> Iterator[Any]:
        for batch in batches:
            yield batch
            advance()  # after the step on the batch

    batches.go_to_visit_of(trainer)
    synchronize = torch.get_device_module(trainer.device).synchronize
    synchronize()
    start_s = perf_counter()
    trainer.train(scheduled())
    synchronize()
    return perf_counter() - start_s


def _score(judge: Trainer, trainer: Trainer) -> float:
    """Return the held-out loss of an arm's weights in FP32."""
    values, theirs = ([*m.parameters(), *m.buffers()] for m in (judge.model, trainer.model))
    shapes = [[each.shape for each in tensors] for tensors in (values, theirs)]
    wanted = "the parameters and buffers of the task's model in every arm, for --until"
    expect(shapes[0] == shapes[1], "model", wanted, f"others in {trainer.config.name}")
    with torch.no_grad():
        for mine, value in zip(values, theirs, strict=True):
            mine.copy_(value)
    torch.manual_seed(0)  # a random part of the held-out data is the same one for all
    losses = [score.loss for score in judge.evaluate()]
    wanted = 'a dict with "loss" from its call, for --until'
    expect(losses not in ([], [None]), "options['evaluate']", wanted, "none")
    loss = float(losses[0] or 0.0)
    return math.inf if math.isnan(loss) else loss


def _report(found: list[Seed], reference: str, target: float, left_out: dict[str, str]) -> Report:
    others = [name for name in found[0] if name != reference]
    confidence = 1 - (1 - CONFIDENCE) / max(len(others), 1)
    whole = [seed for seed in found if (seed[reference].cross(target) or (0.0,))[0] > 0]
    rows, measurements = [], []
    for name in found[0]:
        crossed = [seed[name].cross(target) for seed in whole]
        there = [each for each in crossed if each is not None]
        reached = sum(seed[name].cross(target) is not None for seed in found)
        row = {"arm": name, "reached by": f"{reached} of {len(found)} seeds"}
        for unit, place in (("s", 0), ("steps", 1)):
            middle = median(each[place] for each in there) if there else math.nan
            row[f"median {unit}"] = show(middle, ".4g")
        row["start s"] = show(max(0.0, *(seed[name].start_s for seed in found)), ".2f")
        ratio = _compare(whole, name, reference, target, confidence)
        percent = f"{100 * confidence:.4g} %"
        text = "n/a" if ratio is None else ratio.text(".3f", "x")
        row[f"of {reference}'s time [{percent}]"] = "1.000x" if name == reference else text
        rows.append(row)
        if name == reference:
            continue
        said = "n/a"
        if ratio is not None:
            said = SAID[0] if ratio.high < 1 else SAID[1] if ratio.low > 1 else UNTOLD
        about: dict[str, Any] = {"name": f"time_to_loss/{name}", "arm": name, "base": reference}
        seeds = f"{len(whole)} of {len(found)} seeds"
        reason = f"{name} against {reference}, seconds to a loss of {target:.4f}, {seeds}"
        measurements.append(
            Measurement(interval=ratio, unit="x", verdict=said, reason=reason, **about)
        )
    notes = [
        f"held-out loss in FP32, {target:.4f}: the median of three evaluations, interpolated",
        "seconds are without evaluations and without the start, in which an arm compiles",
        f"{len(others)} comparisons, each at {percent}: all together hold at 95 %",
        *(f"{arm}: n/a; {why}" for arm, why in left_out.items()),
    ]
    if len(whole) < len(found):
        missed = len(found) - len(whole)
        why = f"{reference} itself does not reach the loss, or has it before its first step"
        notes.append(f"{missed} seeds are left out: {why}")
    curves = {name: [asdict(seed[name]) for seed in found] for name in found[0]}
    details = {"curves": curves, "target": target}
    return Report(table=rows, measurements=measurements, notes=notes, details=details)


def _compare(
    seeds: list[Seed], name: str, reference: str, target: float, confidence: float
) -> Interval | None:
    """Return the ratio of seconds, with a t-interval of the mean of its logarithm over seeds.

    A seed in which the arm stopped before it reached the target counts with the time that it took,
    at least, and takes the interval's upper end away.
    """
    logs, is_open = [], False
    for seed in seeds:
        base, own = (seed[each].cross(target) for each in (reference, name))
        if base is None:
            continue
        is_open |= own is None
        seconds = min(seed[name].seconds[-1], MOST * base[0]) if own is None else own[0]
        logs.append(math.log(max(seconds, 1e-9) / base[0]))
    if len(logs) < 2:
        return None
    wide = student((1 - confidence) / 2, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    middle = fmean(logs)
    high = math.inf if is_open else math.exp(middle + wide)
    return Interval(value=math.exp(middle), low=math.exp(middle - wide), high=high)
