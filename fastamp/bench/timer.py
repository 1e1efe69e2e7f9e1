"""What a region of `fastamp.Timer` costs, against the two reads of a clock that time it bare."""

from __future__ import annotations

import timeit
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import fastamp
from fastamp.bench.cases import race_cases, race_table
from fastamp.bench.compare import AGAIN, Interval, Plan
from fastamp.bench.options import add_command
from fastamp.bench.report import Report, Task, judge

if TYPE_CHECKING:
    import argparse

    from fastamp.bench.options import Subparsers

REGIONS = 2000  # in a visit
PLAN = Plan(rounds=400, window=3, warmup=12, half_width=0.01, least_blocks=100, limit_s=8.0)
TWO_READS = "clock(); clock()"
REGION = "with timer('x'): pass"


def add_parser(subparsers: Subparsers) -> None:
    """Add the command `timer` and its options."""
    add_command(
        subparsers,
        "timer",
        _prepare,
        gpu=False,
        help="a region of fastamp.Timer against two reads of a clock",
        description="Time a region with nothing in it, histogram and nesting included.",
        epilog="speedup/timer, which is below 1",
    )


def _prepare(args: argparse.Namespace) -> Task:
    return Task(job={"regions": REGIONS}, run=lambda: _run(args))


def make_visits() -> dict[str, timeit.Timer]:
    """Return what times each statement so many times, by arm."""
    known = {"timer": fastamp.Timer("cpu")}
    clock = "from time import perf_counter_ns as clock"
    reads = {arm: timeit.Timer(TWO_READS, clock) for arm in ("two reads", AGAIN)}
    return reads | {"region": timeit.Timer(REGION, globals=known)}


def _run(args: argparse.Namespace) -> Report:
    visits = {arm: partial(visit.timeit, REGIONS) for arm, visit in make_visits().items()}
    notes = ["least ns: the shortest visit, divided by its regions; the target is its ratio"]
    report = race_cases(args, PLAN, ["timer"], lambda _name: visits, notes=notes)
    race = report.races["timer"]
    least = {arm: {"least ns": min(race.times_s(arm)) / REGIONS * 1e9} for arm in race.arms}
    cost = least["region"]["least ns"] / least["two reads"]["least ns"]
    most = 2.5 if "cpu" in fastamp.backends() else 8.0
    figure = Interval(value=cost, low=cost, high=cost)
    verdict = judge("region's cost", figure, (None, most), "x", "against two reads of the clock")
    table = race_table(report.races, "least ns")
    return replace(report, table=table, details={"timer": least}, verdicts=[verdict])
