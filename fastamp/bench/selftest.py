"""Test the bench: it must find a known slowdown, and no difference between identical arms.

The exit status is always that of --check.
"""

import argparse
import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fastamp.bench.race import AGAIN, Plan
from fastamp.bench.record import Case, Report, Task, compare, judge, run_cases
from fastamp.bench.timer import REGIONS, make_visits
from fastamp.train.options import DEFAULT, number

UNIT = bytes(10_000)  # hashed once, a unit of work: about 6 us
UNITS = 100
SAME = 0.02  # how far a ratio may be from the true one
PLAN = Plan(rounds=40_000, warmup=100, half_width=0.004, least_blocks=400, limit_s=20.0)


METRICS = "speedup, of the slowed arm against the plain one"


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this command alone."""
    add("--device", choices=["cpu"], default="cpu", help="where the work is done")
    slowdown = f"of the slowed arm, in percent {DEFAULT}"
    add("--slowdown", type=number(int, 0, 100), default=10, help=slowdown)


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and the function that runs it."""
    args.check = True
    job = {"unit_nbytes": len(UNIT), "units": UNITS, "slowdown": args.slowdown}
    return job, partial(_run, args)


def _run(args: argparse.Namespace) -> Report:
    # All arms repeat the same unit, so the true ratio is known exactly.
    slowed = UNITS + args.slowdown * UNITS // 100
    truth = slowed / UNITS
    units = {"plain": UNITS, AGAIN: UNITS, "slowed": slowed}
    arms = {arm: partial(_work, count) for arm, count in units.items()}
    cost_s = min(make_visits()["region"].repeat(200, REGIONS)) / REGIONS
    notes = [
        f"the slowed arm does {args.slowdown} % more work",
        f"a region of fastamp.Timer costs {cost_s * 1e9:.0f} ns",
    ]
    report = run_cases(args, PLAN, ["selftest"], lambda _: Case(arms=arms), notes)
    race = report.races["selftest"]
    found = race.ratio("plain", "slowed")
    inside = "inside" if found.low <= truth <= found.high else "outside"
    both = (
        ("identical arms", race.placebo(), 1.0, "the plain arm against itself"),
        ("slowed arm", found, truth, f"the true ratio, {truth:.4f}, is {inside} the interval"),
    )
    verdicts = [judge(n, ratio, (t - SAME, t + SAME), "x", reason) for n, ratio, t, reason in both]
    measurements = [*compare("speedup", race), *verdicts]
    return replace(report, measurements=measurements, details={"true_ratio": truth})


def _work(units: int) -> None:
    for _ in range(units):
        hashlib.sha256(UNIT).digest()
