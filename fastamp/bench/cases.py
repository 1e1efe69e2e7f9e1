"""What the small commands share: a race for each case, and one table of all races."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastamp.bench.compare import AGAIN, measure
from fastamp.bench.report import Cell, Figure, Report, heading, interval_cell, progress

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Mapping

    from fastamp.bench.compare import Plan, Race

    Arms = Mapping[str, Callable[[], object]]


def race_cases(
    args: argparse.Namespace,
    plan: Plan,
    names: Iterable[str],
    make: Callable[[str], Arms],
    *,
    before: Callable[[str], object] = lambda _: None,
    notes: list[str],
) -> Report:
    """Race the arms of each case, which is made when its turn comes; the last arm is judged."""
    races = {}
    names = list(names)
    with progress(len(names)) as tick:
        for name in names:
            races[name] = measure(
                make(name),
                plan,
                device=args.device,
                seed=args.seed,
                before=before,
            )
            tick()
    metrics = {f"speedup/{name}": race.ratio(race.arms[-1]) for name, race in races.items()}
    return Report(table=race_table(races), races=races, metrics=metrics, notes=notes)


def race_table(races: dict[str, Race], *details: str) -> list[list[Cell]]:
    """Return a row for each arm of each race, with figures of /details/<race>/<arm>."""
    rows = [heading(",".join(["race,arm,blocks,median ms", *details, "speed-up [95 %]"]))]
    for name, race in races.items():
        for arm in race.arms:
            if arm == AGAIN:
                continue  # the placebo has a line of its own
            known = f"/races/{name}/arms/{arm}"
            figures = [
                Figure(f"/races/{name}/blocks", ".0f"),
                Figure(f"{known}/time_s/median", ".3f", 1e3),
                *(Figure(f"/details/{name}/{arm}/{key}", ".3f") for key in details),
            ]
            ratio = interval_cell(f"{known}/speedup", ".3f", "x")
            rows.append([(name,), (arm,), *((figure,) for figure in figures), ratio])
    return rows
