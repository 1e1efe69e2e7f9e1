"""What the small commands share: a race for each case, and one table of all races."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from fastamp.bench.race import AGAIN, Plan, Race, run_race, show
from fastamp.bench.record import Report
from fastamp.train.options import progress

Details = dict[str, dict[str, float]]  # more figures of each arm, by name

PLAIN = "plain"  # the arm that does the same work in the plainest way: what others are held against


@dataclass(frozen=True, kw_only=True)
class Case:
    """The arms of one race: the first is the base, the last is judged."""

    arms: Mapping[str, Callable[[], object]]
    before: Callable[[str], object] = lambda _: None  # prepares an arm for its visit
    amounts: Mapping[str, float] = field(default_factory=dict)  # of a visit, by name of the rate
    details: Callable[[Race], Details] = lambda _: {}


def run_cases(
    args: argparse.Namespace,
    plan: Plan,
    names: Collection[str],
    make: Callable[[str], Case],
    notes: list[str],
) -> Report:
    """Race the arms of each case, which is made when its turn comes."""
    races, details, rows, metrics = {}, {}, [], {}
    with progress(len(names)) as tick:
        for name in names:
            case = make(name)
            race = run_race(case.arms, plan, device=args.device, seed=args.seed, before=case.before)
            races[name], details[name] = race, case.details(race)
            for arm in race.arms if case.amounts else ():
                time_s = race.quartiles_s(arm)[1]
                details[name][arm] = {n: amount / time_s for n, amount in case.amounts.items()}
            judged = race.arms[-1]
            metrics[f"speedup/{name}"] = race.ratio(judged)
            if PLAIN in race.arms:
                metrics[f"of_plain/{name}"] = race.ratio(judged, PLAIN)
            rows += [_row(name, arm, race, details[name]) for arm in race.arms if arm != AGAIN]
            tick()
    columns = dict.fromkeys(column for row in rows for column in row)
    table = [{column: row.get(column, "") for column in columns} for row in rows]
    return Report(table=table, races=races, metrics=metrics, notes=notes, details=details)


def _row(name: str, arm: str, race: Race, details: Details) -> dict[str, str]:
    figures = {"median ms": 1e3 * race.quartiles_s(arm)[1], **details.get(arm, {})}
    row = {
        "race": name,
        "arm": arm,
        "blocks": str(len(race.blocks())),
        **{key: show(value, ".0f" if value >= 1000 else ".3f") for key, value in figures.items()},
        "speed-up [95 %]": race.ratio(arm).text(".3f", "x"),
    }
    if PLAIN in race.arms:
        judged = arm == race.arms[-1]
        row["of plain [95 %]"] = race.ratio(arm, PLAIN).text(".3f", "x") if judged else ""
    return row
