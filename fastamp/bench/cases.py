"""What the small commands share: a race for each case, and one table of all races."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastamp.bench.compare import AGAIN, measure, show
from fastamp.bench.record import Report
from fastamp.train.options import progress

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Collection, Mapping

    from fastamp.bench.compare import Plan, Race

    Arms = Mapping[str, Callable[[], object]]
    Details = dict[str, dict[str, float]]  # more figures of each arm, by name


def race_cases(
    args: argparse.Namespace,
    plan: Plan,
    names: Collection[str],
    make: Callable[[str], Arms],
    *,
    before: Callable[[str], object] = lambda _: None,
    details: Callable[[Race], Details] = lambda _: {},
    notes: list[str],
) -> Report:
    """Race the arms of each case, which is made when its turn comes; the last arm is judged."""
    races, known = {}, {}
    with progress(len(names)) as tick:
        for name in names:
            races[name] = measure(
                make(name), plan, device=args.device, seed=args.seed, before=before
            )
            known[name] = details(races[name])
            tick()
    rows = [
        _row(name, arm, race, known[name])
        for name, race in races.items()
        for arm in race.arms
        if arm != AGAIN  # the placebo has a line of its own
    ]
    return Report(
        table=rows,
        races=races,
        metrics={f"speedup/{name}": race.ratio(race.arms[-1]) for name, race in races.items()},
        notes=notes,
        details=known,
    )


def _row(name: str, arm: str, race: Race, details: Details) -> dict[str, str]:
    figures = {"median ms": 1e3 * race.quartiles_s(arm)[1], **details.get(arm, {})}
    return {
        "race": name,
        "arm": arm,
        "blocks": str(len(race.blocks())),
        **{key: show(figure, ".3f") for key, figure in figures.items()},
        "speed-up [95 %]": race.ratio(arm).text(".3f", "x"),
    }
