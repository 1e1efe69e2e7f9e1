"""Test the race: it must find a known slowdown, and no difference between identical arms.

`python benchmarks/selftest.py`: all arms repeat one unit of work, so the true ratio is known.
Exit status: 0; 1 if a ratio is more than 0.02 off; 3 if this machine is too noisy to tell.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from fastamp.bench.options import DEFAULT, number
from fastamp.bench.race import AGAIN, Interval, Plan, run_race, verdict_on

if TYPE_CHECKING:
    from collections.abc import Sequence

UNIT = bytes(10_000)  # hashed once, a unit of work: about 6 us
UNITS = 100
SAME = 0.02  # how far a ratio may be from the true one
PLAN = Plan(rounds=40_000, warmup=100, half_width=0.004, least_blocks=400, limit_s=20.0)


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
    args = parser.parse_args(argv)
    slowed = UNITS + args.slowdown * UNITS // 100
    arms = {"plain": UNITS, AGAIN: UNITS, "slowed": slowed}
    plan = replace(PLAN, rounds=args.rounds, warmup=min(PLAN.warmup, args.rounds // 4))
    race = run_race({arm: partial(work, units) for arm, units in arms.items()}, plan)
    found, truth = race.ratio("plain", "slowed"), slowed / UNITS
    inside = "inside" if found.low <= truth <= found.high else "outside"
    verdicts = {
        judge("identical arms", race.placebo(), 1.0, "the plain arm against itself"),
        judge("slowed arm", found, truth, f"the true ratio, {truth:.4f}, is {inside} the interval"),
    }
    return 1 if "fail" in verdicts else 3 if "inconclusive" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
