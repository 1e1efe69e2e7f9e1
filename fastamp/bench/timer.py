"""A region of fastamp.Timer with nothing in it, against the two clock reads that time it bare."""

from __future__ import annotations

import math
import timeit
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import fastamp
from fastamp.bench.cases import race_cases
from fastamp.bench.compare import AGAIN, Interval, Plan
from fastamp.bench.options import add_command
from fastamp.bench.report import Report, Task, judge

if TYPE_CHECKING:
    import argparse

    from fastamp.bench.cases import Details
    from fastamp.bench.compare import Race
    from fastamp.bench.options import Subparsers

REGIONS = 2000  # in a visit
PLAN = Plan(rounds=400, window=3, warmup=12, half_width=0.01, least_blocks=100, limit_s=8.0)
TWO_READS = "clock(); clock()"
REGION = "with timer('x'): pass"


def add_parser(subparsers: Subparsers) -> None:
    """Add the command `timer`."""
    metrics = "speedup/timer, which is below 1"
    add_command(subparsers, "timer", _prepare, __doc__, metrics=metrics, gpu=False)


def _prepare(args: argparse.Namespace) -> Task:
    return Task(job={"regions": REGIONS}, run=lambda: _run(args))


def make_visits() -> dict[str, timeit.Timer]:
    """Return what times each statement so many times, by arm."""
    known = {"timer": fastamp.Timer("cpu")}
    clock = "from time import perf_counter_ns as clock"
    reads = {arm: timeit.Timer(TWO_READS, clock) for arm in ("two reads", AGAIN)}
    return reads | {"region": timeit.Timer(REGION, globals=known)}


def _least_ns(race: Race) -> Details:
    return {arm: {"least ns": min(race.times_s(arm)) / REGIONS * 1e9} for arm in race.arms}


def _run(args: argparse.Namespace) -> Report:
    visits = {arm: partial(visit.timeit, REGIONS) for arm, visit in make_visits().items()}
    notes = ["least ns: the shortest visit, divided by its regions; the target is its ratio"]
    report = race_cases(args, PLAN, ["timer"], lambda _name: visits, details=_least_ns, notes=notes)
    least = report.details["timer"]
    cost = least["region"]["least ns"] / least["two reads"]["least ns"]
    most = 2.5 if "cpu" in fastamp.backends() else 8.0
    reason = "against two reads of the clock"
    verdict = judge("region's cost", Interval.exact(cost), (-math.inf, most), "x", reason)
    return replace(report, verdicts=[verdict])
