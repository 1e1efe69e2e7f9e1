"""The cost of an empty region of fastamp.Timer, beside two bare reads of the clock."""

import argparse
import timeit
from functools import partial
from time import perf_counter_ns

import fastamp
from fastamp.bench.comparison import PLAN, run_cases
from fastamp.bench.race import Case
from fastamp.bench.record import Task

REGIONS = 2000  # in a visit
STATEMENTS = {"two reads": "clock(); clock()", "region": "with timer('x'): pass"}


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and the function that runs it."""
    notes = [f"a visit is {REGIONS:,} regions, or pairs of reads"]
    cases = {"timer": partial(_make_case, args.device)}
    return {"regions": REGIONS}, lambda: run_cases(args, PLAN, cases, notes)


def _make_case(device: str) -> Case:
    names = {"clock": perf_counter_ns, "timer": fastamp.Timer(device)}
    visits = {arm: timeit.Timer(text, globals=names) for arm, text in STATEMENTS.items()}
    arms = {arm: partial(visit.timeit, REGIONS) for arm, visit in visits.items()}
    return Case(arms=arms, amounts={"million/s": REGIONS / 1e6})
