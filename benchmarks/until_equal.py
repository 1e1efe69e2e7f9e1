"""Time to equal loss: the seconds of training until an arm's held-out loss reaches a target.

`python benchmarks/until_equal.py task.py muon=task.py:muon`: each arm of the task in every
precision, and each NAME=FILE.py:make. Every seed trains all arms in turn, a part of the horizon
each. Between the parts their weights are scored by one model in FP32. Evaluations are not on the
clock, nor are the first steps beyond the time of later ones: they compile and allocate. The target
is the loss that torch's arm in FP32 has at 90 % of its steps, or `--loss`.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median, stdev
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch

from fastamp.bench.options import DEFAULT, number
from fastamp.bench.race import CONFIDENCE, SAID, UNTOLD, Interval, show, student
from fastamp.bench.tasks import expect, with_absolute_path
from fastamp.bench.trainer import Arm, Trainer, choose_precisions, list_arms, read_arm
from fastamp.timer.timer import align

if TYPE_CHECKING:
    from collections.abc import Sequence

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
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


def find_target(arm: Arm, steps: int, seeds: range) -> float:
    """Return an arm's smooth loss at EQUAL of its steps, the mean over seeds."""
    first = [train([arm], seed, steps, -math.inf)[arm.name] for seed in seeds]
    ends = [np.interp(EQUAL * steps, curve.steps, curve.smooth()) for curve in first]
    return fmean(map(float, ends))


def train(arms: list[Arm], seed: int, steps: int, target: float) -> Seed:
    """Train all arms with one seed until each has crossed the target, or its time is over.

    The first arm stops after its steps where no loss is a target, and else after MOST times them.
    """
    reference = arms[0].name
    arms = [replace(arm, seed=seed) for arm in arms]
    trainers, judge = {arm.name: Trainer(arm) for arm in arms}, Trainer(arms[0])
    curves = {name: Curve(losses=[_score(judge, each)]) for name, each in trainers.items()}
    most = steps if target == -math.inf else MOST * steps
    live, rng, part = [*trainers], np.random.default_rng(seed), max(round(steps / PARTS), 1)
    while live:
        for name in rng.permutation(live).tolist():
            trainer = trainers[name]
            elapsed_s = _time_visit(trainer)
            curves[name].add(trainer.steps, elapsed_s, _score(judge, trainer))
            trainer.steps = part  # after the first visit, of one step
        crossed = curves[reference].cross(target)
        for name in [*live]:
            is_late = curves[reference].steps[-1] >= most
            if crossed is not None:
                is_late = curves[name].seconds[-1] > MOST * crossed[0]
            if is_late or curves[name].cross(target) is not None:
                live.remove(name)
    return curves


def _time_visit(trainer: Trainer) -> float:
    trainer.prepare()
    synchronize = torch.get_device_module(DEVICE).synchronize
    synchronize()
    start_s = perf_counter()
    trainer.visit()
    synchronize()
    return perf_counter() - start_s


def _score(judge: Trainer, trainer: Trainer) -> float:
    """Return the held-out loss of an arm's weights in FP32."""
    values, theirs = ([*m.parameters(), *m.buffers()] for m in (judge.model, trainer.model))
    shapes = [[each.shape for each in tensors] for tensors in (values, theirs)]
    wanted = "the parameters and buffers of the task's model in every arm"
    expect(shapes[0] == shapes[1], "model", wanted, f"others in {trainer.arm.name}")
    with torch.no_grad():
        for mine, value in zip(values, theirs, strict=True):
            mine.copy_(value)
    torch.manual_seed(0)  # a random part of the held-out data is the same one for all
    loss = judge.evaluate().loss
    expect(loss is not None, "options['evaluate']", 'a dict with "loss"', "none")
    return math.inf if loss is None or math.isnan(loss) else loss


def make_rows(found: list[Seed], target: float) -> list[list[str]]:
    """Return the table: each arm beside the first one."""
    reference, *others = found[0]
    confidence = 1 - (1 - CONFIDENCE) / max(len(others), 1)
    whole = [seed for seed in found if (seed[reference].cross(target) or (0.0,))[0] > 0]
    rows = [["arm", "reached by", "s", "steps", f"of its time [{100 * confidence:.4g} %]", ""]]
    for name in found[0]:
        there = [each for seed in whole if (each := seed[name].cross(target)) is not None]
        reached = sum(seed[name].cross(target) is not None for seed in found)
        middle = [median(each[k] for each in there) if there else math.nan for k in (0, 1)]
        ratio = compare(whole, name, reference, target, confidence)
        said = "" if name == reference or ratio is None else UNTOLD
        if said and ratio is not None:
            said = SAID[0] if ratio.high < 1 else SAID[1] if ratio.low > 1 else UNTOLD
        text = "" if name == reference or ratio is None else ratio.text(".3f", "x")
        shown = [show(each, ".4g") for each in middle]
        rows.append([name, f"{reached} of {len(found)} seeds", *shown, text, said])
    return rows


def compare(
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


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row for each arm."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("task", help="as for the bench; its evaluate returns the loss")
    add("arms", nargs="*", type=read_arm, metavar="NAME=FILE.py:make", help="more arms")
    add("--steps", type=number(int, 3), default=STEPS, help=f"of the first arm {DEFAULT}")
    add("--seeds", type=number(int, 2), default=SEEDS, help=DEFAULT)
    add("--loss", type=float, help="the target")
    add("--json", type=Path, help="write the curves to this file")
    args = parser.parse_args(argv)
    task = with_absolute_path(args.task)
    arms = list_arms(task, choose_precisions(DEVICE), args.arms)
    target, seeds = args.loss, range(args.seeds)
    if target is None:
        target = find_target(arms[0], args.steps, seeds)
    found = [train(arms, seed, args.steps, target) for seed in seeds]
    print("\n".join([f"held-out loss {target:.4f}", *align(make_rows(found, target))]))
    if args.json is not None:
        curves = [{name: asdict(curve) for name, curve in seed.items()} for seed in found]
        args.json.write_text(json.dumps({"target": target, "seeds": curves}), encoding="utf-8")


if __name__ == "__main__":
    main()
