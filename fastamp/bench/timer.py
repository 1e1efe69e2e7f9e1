"""The cost of an empty region of fastamp.Timer, beside two bare reads of the clock."""

import argparse
import math
import timeit
from dataclasses import replace
from functools import partial
from time import perf_counter_ns

import fastamp
from fastamp.bench.comparison import Details, run_cases
from fastamp.bench.race import Case, Interval, Plan, Race
from fastamp.bench.record import Measurement, Report, Task

REGIONS = 2000  # in a visit
PLAN = Plan(rounds=404, build_s=1.0, limit_s=45.0)
STATEMENTS = {"two reads": "clock(); clock()", "region": "with timer('x'): pass"}
METRICS = "speedup/timer, which is below 1"


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and the function that runs it."""
    return {"regions": REGIONS}, partial(_run, args)


def make_visits(device: str = "cpu") -> dict[str, timeit.Timer]:
    """Return a `timeit.Timer` of each statement, by arm."""
    names = {"clock": perf_counter_ns, "timer": fastamp.Timer(device)}
    return {arm: timeit.Timer(text, globals=names) for arm, text in STATEMENTS.items()}


def _least_ns(race: Race) -> Details:
    return {arm: {"least ns": min(race.times_s(arm)) / REGIONS * 1e9} for arm in race.arms}


def _make_case(device: str, _name: str) -> Case:
    visits = make_visits(device)
    return Case(arms={arm: partial(visit.timeit, REGIONS) for arm, visit in visits.items()})


def _run(args: argparse.Namespace) -> Report:
    notes = ["least ns: the shortest visit, divided by its regions; the target is its ratio"]
    make = partial(_make_case, args.device)
    report = run_cases(args, PLAN, ["timer"], make, notes, _least_ns)
    least = report.details["timer"]
    verdict = Measurement(
        name="region's cost",
        interval=Interval.exact(least["region"]["least ns"] / least["two reads"]["least ns"]),
        target=(-math.inf, 3.0 if "cpu" in fastamp.backends() else 8.0),
        unit="x",
        reason="against two reads of the clock",
        excused="two CUDA events cost more" if args.device == "cuda" else "",
    )
    return replace(report, measurements=[*report.measurements, verdict])
