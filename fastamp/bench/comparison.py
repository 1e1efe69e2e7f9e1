"""Tables of races: a command's own cases, and the callables of a program of one's own."""

import argparse
import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from timeit import timeit
from typing import Any, NamedTuple

import numpy as np
import torch

from fastamp.bench import apart
from fastamp.bench.race import (
    UNTOLD,
    Build,
    Case,
    Plan,
    Race,
    collect,
    find_noise,
    run_build,
    run_race,
    show,
)
from fastamp.bench.record import Report, compare_arms
from fastamp.step.arguments import as_bound
from fastamp.timer.timer import align

VISIT_S = 0.01  # of a callable, about: short ones are called several times
MOST_CALLS = 50
PLAN = Plan(build_s=1.0, limit_s=45.0)
PLAIN = "plain"  # the arm that does the same work in the plainest way


def run_cases(
    args: argparse.Namespace,
    plan: Plan,
    cases: Mapping[str, Callable[[], Case]],
    notes: list[str],
) -> Report:
    """Race the arms of cases, whose functions fresh processes call: they can be pickled."""

    def build(unfinished: list[str], number: int) -> dict[str, Build]:
        makes, seed = {name: cases[name] for name in unfinished}, args.seed * 1000 + number
        return apart.run_apart(_build_cases, makes, plan, args.device, seed)

    races = collect(build, cases, plan)
    known, rows, found = {}, [], []
    for name, race in races.items():
        base, last = race.arms[0], race.arms[-1]
        known[name] = {arm: _find_figures(race, arm) for arm in race.arms}
        rows += [_row(name, arm, race, figures) for arm, figures in known[name].items()]
        for arm in race.arms[1:]:
            metric = f"speedup/{name}" if arm == last else f"speedup/{name}/{arm}"
            found.append(compare_arms(race, metric, arm, base))
        if PLAIN in race.arms:
            found.append(compare_arms(race, f"of_plain/{name}", last, PLAIN))
    return Report(table=rows, races=races, measurements=found, notes=notes, details=known)


def _build_cases(
    makes: Mapping[str, Callable[[], Case]], plan: Plan, device: str, seed: int
) -> dict[str, Build]:
    """Build each case, one after the other, and time it."""
    builds = {}
    for name, make in makes.items():
        gc.collect()  # the case before
        builds[name] = run_build(make(), plan, device=device, seed=seed)
    return builds


def _find_figures(race: Race, arm: str) -> dict[str, float]:
    """Return the times of an arm, and the rates of their median."""
    p50, p90, p99 = map(float, np.percentile(race.times_s(arm), (50, 90, 99)))
    rates = {name: amount / p50 for name, amount in race.builds[0].amounts.items()}
    return {"median ms": 1e3 * p50, "p90 ms": 1e3 * p90, "p99 ms": 1e3 * p99, **rates}


def _row(name: str, arm: str, race: Race, figures: dict[str, float]) -> dict[str, str]:
    row = {"race": name, "arm": arm, "builds": str(len(race.builds))}
    row |= {key: show(x, ".0f" if x >= 1000 else ".3f") for key, x in figures.items()}
    row["speed-up [95 %]"] = race.ratio(arm).text(".3f", "x")
    if PLAIN in race.arms:
        is_last = arm == race.arms[-1]
        row["of plain [95 %]"] = race.ratio(arm, PLAIN).text(".3f", "x") if is_last else ""
    return row | {"verdict": _judge(race, arm) if arm != race.arms[0] else ""}


def _judge(race: Race, arm: str, base: str | None = None) -> str:
    return UNTOLD if find_noise({"": race}) else race.ratio(arm, base).verdict


class Ratio(NamedTuple):
    """How many times as fast, its 95 % interval, and what that means."""

    value: float
    low: float
    high: float
    verdict: str
    """"faster", "slower", "equal" (within 2 %) or "cannot tell", also where the machine is busy."""


class Comparison:
    """What a race has found; `str()` of it is a table, with the first callable as the base."""

    def __init__(self, race: Race) -> None:
        self._race = race

    def ratio(self, name: str, base: str) -> Ratio:
        """Return how many times as fast one callable is as another one.

        Raises:
            KeyError: there is no such callable.
        """
        found = self._race.ratio(name, base)
        return Ratio(found.value, found.low, found.high, _judge(self._race, name, base))

    def __str__(self) -> str:
        base, race = self._race.arms[0], self._race
        rows = [["", "median ms", f"times as fast as {base} [95 %]", "verdict"]]
        for name in race.arms:
            said = [race.ratio(name).text(".2f", "x"), _judge(race, name)]
            time = show(1e3 * race.quartiles_s(name)[1], ".4g")
            rows.append([name, time, *(said if name != base else ["", ""])])
        return "\n".join([*align(rows), *filter(None, [find_noise({"the comparison": race})])])


def compare(
    callables: Mapping[str, Callable[[], object]],
    *,
    build_s: float = PLAN.build_s,
    device: torch.device | str | None = None,
) -> Comparison:
    """Race two or more callables: any loops, steps or passes of a program of one's own.

    They take turns in random mirrored order, so that a machine that slows down slows all of them
    down, in 5 to 12 parts, over which the interval is. Each is called at least 15 times. Where
    their memory lies stays as it is: run the program again to vary that.

    Args:
        callables: two or more by name, without arguments. The first is the base of the table.
        build_s: seconds of a part, above 0, after which no more calls begin.
        device: waited for after each call; None is CUDA where the program has used it.

    Example:
        >>> import fastamp.bench
        >>> x = torch.randn(64, 64)
        >>> found = fastamp.bench.compare({"sum": x.sum, "norm": x.norm}, build_s=0.01)
        >>> found.ratio("norm", "sum").verdict in {"faster", "slower", "equal", "cannot tell"}
        True
    """
    given: Any = callables
    if not isinstance(given, Mapping) or len(given) < 2 or not all(map(callable, given.values())):
        msg = f"callables: expected two or more by name, got {callables!r:.200}"
        raise TypeError(msg)
    build_s = as_bound("build_s", build_s, above_zero=True)
    cuda: Any = torch.cuda
    kind = torch.device(device or ("cuda" if cuda.is_initialized() else "cpu")).type
    fastest_s = min(timeit(call, number=1) for call in callables.values())
    calls = min(max(round(VISIT_S / max(fastest_s, 1e-9)), 1), MOST_CALLS)
    case, plan = Case(arms=callables, calls=calls), replace(PLAN, build_s=build_s)
    return Comparison(run_race(lambda: case, plan, device=kind))
