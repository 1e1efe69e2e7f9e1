"""Test the race: it must find a known slowdown, and no difference between identical arms.

`python benchmarks/selftest.py`: all arms repeat one unit of work, so the true ratio is known.
Exit status: 0; 1 if a ratio is more than 0.02 off; 3 if this machine is too busy to tell.

`--layout 400`, half a minute and no clock: plants ratios of 1.00, 1.03, 1.05 and 1.20 in so many
races each, whose arms are up to 15 % faster or slower in every build, and without that. Status: 0;
1 if more than 5 % of the verdicts are false, or 1.20, or 1.05 without a bias, is missed in 5 %.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fastamp.bench import apart
from fastamp.bench.options import DEFAULT, number
from fastamp.bench.race import (
    SAID,
    UNTOLD,
    Build,
    Case,
    Interval,
    Plan,
    Visit,
    collect,
    find_noise,
    run_build,
    verdict_on,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

UNIT = bytes(10_000)  # hashed once, a unit of work: about 6 us
UNITS = 100
SAME = 0.02  # how far a ratio may be from the true one
PLAN = Plan(warmup=20, build_s=1.0, half_width=0.004)
PLANTED = {  # the truth and the bias, and the least share of races that find it
    (1.00, 0.15): 0.0,
    (1.03, 0.15): 0.0,
    (1.05, 0.15): 0.0,
    (1.20, 0.15): 0.95,
    (1.00, 0.0): 0.0,
    (1.05, 0.0): 0.95,
}


def work(units: int) -> None:
    """Repeat the unit of work."""
    for _ in range(units):
        hashlib.sha256(UNIT).digest()


def judge(name: str, found: Interval, truth: float, why: str) -> str:
    """Print a ratio beside its bounds; return the verdict."""
    low, high = truth - SAME, truth + SAME
    verdict = verdict_on(found, low, high)
    print(f"{name} {found.text('.4g', 'x')} (target {low:g}x to {high:g}x): {verdict}, {why}")
    return verdict


def main(argv: Sequence[str] | None = None) -> int:
    """Race identical arms and a slowed one; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    slowdown = f"of the slowed arm, in percent {DEFAULT}"
    parser.add_argument("--slowdown", type=number(int, 0, 100), default=10, help=slowdown)
    parser.add_argument("--rounds", type=number(int, 8), default=PLAN.rounds, help="at most")
    text = "plant ratios whose arms lie elsewhere in every build, in so many races of each"
    parser.add_argument("--layout", type=number(int, 1), metavar="RACES", help=text)
    args = parser.parse_args(argv)
    if args.layout:
        return plant_layouts(args.layout)
    slowed = UNITS + args.slowdown * UNITS // 100
    plan = replace(PLAN, rounds=args.rounds, warmup=min(PLAN.warmup, args.rounds // 4))
    units = {"plain": UNITS, "again": UNITS, "slowed": slowed}

    def build(_: list[str], number: int) -> dict[str, Build]:
        return {"": apart.run_apart(work_once, units, plan, number)}

    race = collect(build, [""], plan)[""]
    if noise := find_noise({"the selftest": race}):
        print(noise)
        return 3
    found, truth = race.ratio("plain", "slowed"), slowed / UNITS
    inside = "inside" if found.low <= truth <= found.high else "outside"
    verdicts = {
        judge("identical arms", race.ratio("again"), 1.0, "the plain arm against itself"),
        judge("slowed arm", found, truth, f"the true ratio, {truth:.4f}, is {inside} the interval"),
    }
    return 1 if "fail" in verdicts else 3 if "inconclusive" in verdicts else 0


def work_once(units: dict[str, int], plan: Plan, number: int) -> Build:
    """Time one build of the arms."""
    arms = {arm: partial(work, count) for arm, count in units.items()}
    return run_build(Case(arms=arms), plan, seed=number)


def plant_layouts(runs: int) -> int:
    """Race planted ratios whose arms lie elsewhere in every build; return the exit status."""
    status, rng = 0, np.random.default_rng(0)
    for (truth, bias), least in PLANTED.items():

        def build(_: list[str], __: int, truth: float = truth, bias: float = bias) -> Any:
            places = (1 + rng.uniform(-bias, bias, 2)) * (truth, 1.0)
            noise = np.exp(0.01 * rng.normal(size=(8, 2)))
            pairs = (
                dict(zip("ab", map(Visit, times.tolist()), strict=True)) for times in places * noise
            )
            return {"": Build(arms=["a", "b"], rounds=[*pairs])}

        said = dict.fromkeys(SAID, 0)
        for _ in range(runs):
            said[collect(build, [""], Plan())[""].ratio("b").verdict] += 1
        right = "faster" if truth > 1 else "equal"
        false = runs - said[right] - said[UNTOLD]
        status |= int(false > 0.05 * runs or said[right] < least * runs)
        print(f"{truth:.2f}x, {bias:.0%} either way: {said}, {false} false of {runs}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
