"""What a command found: one record, from which the table, the JSON file and the page are made."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import numpy as np

from fastamp.bench.compare import verdict_on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastamp.bench.compare import Interval, Race

SCHEMA_VERSION = 2
UNITS = {"x": 1, " %": 100, "": 1}  # and the factor with which a figure is shown


@dataclass(frozen=True)
class Figure:
    """A figure of the record, by its JSON pointer (RFC 6901), and how it is shown."""

    pointer: str
    spec: str
    factor: float = 1

    def text(self, record: dict[str, Any]) -> str:
        """Return the figure as text; n/a where it is null."""
        value = at(record, self.pointer)
        return "n/a" if value is None else format(value * self.factor, self.spec)


Cell = tuple["str | Figure", ...]
Ends = tuple["float | None", "float | None"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One target: the figure is to lie between two ends; n/a where it cannot be judged."""

    name: str
    figure: Interval | None
    ends: Ends
    unit: str
    verdict: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a command measured; the races hold every sample, `details` what only it knows."""

    table: list[list[Cell]]
    races: dict[str, Race]
    metrics: dict[str, Interval]  # the figures that a later run may be held to, with --fail-on
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=dict)  # of every training step, by arm
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A command with its options settled; `job` is what two records must share to be compared."""

    job: dict[str, Any]
    run: Callable[[], Report]


def at(record: dict[str, Any], pointer: str) -> Any:
    """Return what a JSON pointer finds."""
    value: Any = record
    for key in pointer.split("/")[1:]:
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


def judge(name: str, figure: Interval | None, ends: Ends, unit: str, reason: str) -> Verdict:
    """Judge a figure that is to lie between two ends; n/a where there is none."""
    verdict = "n/a" if figure is None else verdict_on(figure, *ends)
    return Verdict(name=name, figure=figure, ends=ends, unit=unit, verdict=verdict, reason=reason)


def heading(text: str) -> list[Cell]:
    """Return a table's first row, whose cells are separated by commas."""
    return [(name,) for name in text.split(",")]


def interval_cell(pointer: str, spec: str, unit: str = "", factor: float = 1) -> Cell:
    """Show a figure with its interval."""
    ends = ("value", "low", "high")
    value, low, high = (Figure(f"{pointer}/{end}", spec, factor) for end in ends)
    return (value, unit + " [", low, ", ", high, "]")


def make_record(
    report: Report, *, command: str, job: dict[str, Any], environment: dict[str, Any]
) -> dict[str, Any]:
    """Return all of a report as JSON's types; a number that is not finite is None."""
    found = {
        "metrics": {name: asdict(metric) for name, metric in report.metrics.items()},
        "verdicts": [asdict(verdict) for verdict in report.verdicts],
        "notes": report.notes,
        "details": report.details,
        "losses": report.losses,
        "races": {name: _describe(race) for name, race in report.races.items()},
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "environment": environment,
        "job": job,
        **_plain(found),
    }


def _describe(race: Race) -> dict[str, Any]:
    arms = {}
    for arm in race.arms:
        low, median, high = np.percentile(race.times_s(arm) or [math.nan], [25, 50, 75]).tolist()
        arms[arm] = {
            "time_s": {"median": median, "low": low, "high": high},
            "skipped": race.skipped(arm),
            "speedup": asdict(race.ratio(arm)),
        }
    return {
        "base": race.arms[0],
        "warmup_rounds": race.warmup_rounds,
        "blocks": len(race.blocks()),
        "placebo": asdict(race.placebo()),
        "arms": arms,
        "rounds": [[asdict(visit) for visit in round_.values()] for round_ in race.rounds],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def render(report: Report, record: dict[str, Any]) -> str:
    """Return the table, the notes, the environment, and one line per target."""
    rows = [[_text(cell, record) for cell in row] for row in report.table]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    env = record["environment"]
    machine = (
        f"torch {env['torch']}, {env['device']} ({env['device_name']}), {env['threads']} threads, "
        f"fastamp {env['fastamp']} (backends {' '.join(env['backends'])})"
    )
    cells = [placebo_cell(name, record) for name in record["races"]]
    cells += [verdict_cell(i, record) for i in range(len(record["verdicts"]))]
    return "\n".join([*lines, "", machine, *report.notes, *(_text(c, record) for c in cells)])


def placebo_cell(name: str, record: dict[str, Any]) -> Cell:
    """Show what a race cannot tell apart."""
    text = f"placebo, {name}: {record['races'][name]['base']} against itself "
    return (text, *interval_cell(f"/races/{name}/placebo", ".4f", "x"))


def verdict_cell(index: int, record: dict[str, Any]) -> Cell:
    """Show one target: its name, its figure with the interval, what was wanted, and the verdict."""
    verdict, pointer = record["verdicts"][index], f"/verdicts/{index}"
    unit = verdict["unit"]
    factor = UNITS[unit]
    ends = [f"{end * factor:g}{unit}" for end in verdict["ends"] if end is not None]
    sign = "<= " if verdict["ends"][0] is None else ">= "
    wanted = " to ".join(ends) if len(ends) == 2 else sign + ends[0]
    figure: Cell = ("-",)
    if verdict["figure"] is not None:
        figure = (Figure(f"{pointer}/figure/value", ".4g", factor), unit)
        if verdict["figure"]["low"] != verdict["figure"]["high"]:
            figure = interval_cell(f"{pointer}/figure", ".4g", unit, factor)
    end = f" (target {wanted}): {verdict['verdict']}, {verdict['reason']}"
    return (verdict["name"] + " ", *figure, end)


def _text(cell: Cell, record: dict[str, Any]) -> str:
    return "".join(part if isinstance(part, str) else part.text(record) for part in cell)


@contextmanager
def progress(total: int) -> Iterator[Callable[[], object]]:
    """Show a bar, moved on by each call of what this yields, if a terminal and tqdm are there."""
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        yield lambda: None
        return
    with importlib.import_module("tqdm").tqdm(total=total, leave=False) as bar:
        yield bar.update
