"""What a command found: one record, from which the table, the JSON file and the page are made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any, TypeAlias

from torch.utils._pytree import tree_map

from fastamp.bench.race import Interval, Race, verdict_on

SCHEMA_VERSION = 4  # of the record: a field that comes, goes or changes its meaning is a new one


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One target: the figure is to lie between two ends, of which one may be infinite."""

    name: str
    figure: Interval | None
    ends: tuple[float, float]
    unit: str
    verdict: str
    reason: str

    def text(self) -> str:
        """Return the figure with its interval, what was wanted, and the verdict."""
        factor = 100 if self.unit == " %" else 1
        ends = [f"{end * factor:g}{self.unit}" for end in self.ends if math.isfinite(end)]
        sign = "" if len(ends) == 2 else "<= " if self.ends[1] < math.inf else ">= "
        figure = "-" if self.figure is None else self.figure.text(".4g", self.unit, factor)
        target = f"(target {sign}{' to '.join(ends)})"
        return f"{self.name} {figure} {target}: {self.verdict}, {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a command measured; the races hold every sample, `details` what only it knows."""

    table: list[dict[str, str]]  # a row for each arm: its cells by column
    races: dict[str, Race]
    metrics: dict[str, Interval]  # the figures that a later run may be held to, with --fail-on
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=dict)  # of every training step, by arm
    details: dict[str, Any] = field(default_factory=dict)


# What a command line asks for: the job, which is the same in records that can be compared, and what
# does it.
Task: TypeAlias = tuple[dict[str, Any], Callable[[], Report]]


def judge(
    name: str,
    figure: Interval | None,
    ends: tuple[float, float],
    unit: str,
    reason: str,
    *,
    excused: bool = False,
) -> Verdict:
    """Judge a figure that is to lie between two ends; n/a where it is excused or there is none."""
    verdict = "n/a" if excused or figure is None else verdict_on(figure, *ends)
    return Verdict(name=name, figure=figure, ends=ends, unit=unit, verdict=verdict, reason=reason)


def make_record(report: Report, run: dict[str, Any]) -> dict[str, Any]:
    """Return a report, and what `run` says of it, as JSON's types; None for what is not finite."""
    placebos = [
        f"placebo, {name}: {race.arms[0]} against itself {race.placebo().text('.4f', 'x')}"
        for name, race in report.races.items()
    ]
    record = {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **run,
        "table": report.table,
        "notes": report.notes + placebos,
        "verdicts": [asdict(verdict) | {"text": verdict.text()} for verdict in report.verdicts],
        "metrics": {name: asdict(metric) for name, metric in report.metrics.items()},
        "details": report.details,
        "losses": report.losses,
        "races": {name: _describe(race) for name, race in report.races.items()},
    }
    plain: dict[str, Any] = tree_map(_finite, record)
    return plain


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _describe(race: Race) -> dict[str, Any]:
    arms = {
        arm: {
            "time_s": dict(zip(("low", "median", "high"), race.quartiles_s(arm), strict=True)),
            "skipped": race.skipped(arm),
            "speedup": asdict(race.ratio(arm)),
        }
        for arm in race.arms
    }
    return {
        "base": race.arms[0],
        "warmup_rounds": race.warmup_rounds,
        "blocks": len(race.blocks()),
        "placebo": asdict(race.placebo()),
        "arms": arms,
        "rounds": [[{"arm": a, **v._asdict()} for a, v in r.items()] for r in race.rounds],
    }


def render(record: dict[str, Any]) -> str:
    """Return the table, the environment, the notes, and one line per target."""
    rows = [list(record["table"][0]), *(list(row.values()) for row in record["table"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    env = record["environment"]
    machine = (
        f"torch {env['torch']}, {env['device']} ({env['device_name']}), {env['threads']} threads, "
        f"fastamp {env['fastamp']} (backends {' '.join(env['backends'])})"
    )
    targets = (verdict["text"] for verdict in record["verdicts"])
    return "\n".join([*lines, "", machine, *record["notes"], *targets])
