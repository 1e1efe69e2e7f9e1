"""What a command found: figures with verdicts, one table, and the record of everything.

The text on the terminal, the JSON file and the page are made from the record, and a later run is
held to it as its baseline.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from textwrap import wrap
from typing import Any, TypeAlias

from torch.utils._pytree import tree_map_only

from fastamp.bench.options import refuse
from fastamp.bench.race import UNTOLD, Interval, Race, exp, find_noise, verdict_on
from fastamp.timer.timer import align

SCHEMA_VERSION = 12  # raised when a field of the record is added, removed or changes its meaning
WIDTH = 100  # columns
MACHINE = ("device", "device_name", "threads")
BASELINE = "the baseline"  # of a change


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A figure of an arm, mostly against a base, and where it has a target the verdict on it."""

    name: str  # as --fail-on has it
    interval: Interval | None  # None where the figure is not known
    arm: str = ""
    base: str = ""
    target: tuple[float, float] | None = None  # ends to lie between, one of them infinite
    unit: str = ""  # of a ratio of speeds "x"
    reason: str = ""
    excused: str = ""  # why a target is not for this machine
    noise: str = ""  # why no figure of time has a verdict
    is_counted: bool = False  # as bytes are: a busy machine excuses nothing

    @property
    def verdict(self) -> str:
        """Return what is said of a target or a ratio; "" of any other figure."""
        is_noisy = bool(self.noise) and not self.is_counted
        if self.target is not None:
            if self.interval is None or self.excused:
                return "n/a"
            return "inconclusive" if is_noisy else verdict_on(self.interval, *self.target)
        if self.unit != "x" or self.interval is None:
            return ""
        return UNTOLD if is_noisy else self.interval.verdict

    def text(self) -> str:
        """Return the figure with its interval, its target, the verdict and the reason."""
        factor = 100 if self.unit == " %" else 1
        figure = "-"
        if self.interval is not None and not math.isnan(self.interval.value):
            figure = self.interval.text(".4g", self.unit, factor)
        why = self.excused or ("" if self.is_counted else self.noise) or self.reason
        said = ", ".join(filter(None, [self.verdict, why]))
        if self.target is None:
            return ", ".join(filter(None, [f"{self.name} {figure}", said]))
        sign, end = (">=", self.target[0]) if self.target[1] == math.inf else ("<=", self.target[1])
        return f"{self.name} {figure} (target {sign} {end * factor:g}{self.unit}): {said}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a command measured; the races hold every sample, `details` all that is its own."""

    table: list[dict[str, str]]  # rows of cells by column; a missing cell is empty
    measurements: list[Measurement] = field(default_factory=list)
    races: dict[str, Race] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=dict)  # of every training step, by arm
    details: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)  # of the work itself: the status is 1
    sentence: str = ""  # the first line: the result in plain words


# The job of a command line, which is equal in records that can be compared, and the function that
# runs it.
Task: TypeAlias = tuple[dict[str, Any], Callable[[], Report]]


def compare_arms(race: Race, name: str, arm: str, base: str, **about: Any) -> Measurement:
    """Return how many times as fast as a base an arm is."""
    ratio = race.ratio(arm, base)
    return Measurement(name=name, interval=ratio, arm=arm, base=base, unit="x", **about)


def doubt(found: list[Measurement], races: Mapping[str, Race]) -> list[Measurement]:
    """Return the measurements of a run; on a busy machine no time or ratio has a verdict."""
    noise = "the machine is too busy" if find_noise(races) else ""
    return [replace(each, noise=noise or each.noise) for each in found]


def make_record(report: Report, run: dict[str, Any]) -> dict[str, Any]:
    """Return a report and the facts of its `run` as JSON's types; None for what is not finite."""
    noise = find_noise(report.races)
    columns = dict.fromkeys(column for row in report.table for column in row)
    record = {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **run,
        **vars(report),
        "noise": noise,
        "table": [{column: row.get(column, "") for column in columns} for row in report.table],
        "notes": report.notes + _describe_builds(report.races),
        "measurements": [
            {**asdict(each), "verdict": each.verdict, "text": each.text()}
            for each in report.measurements
        ],
        "sentence": "" if noise else report.sentence,
        "races": {name: _describe(race) for name, race in report.races.items()},
    }
    plain: dict[str, Any] = tree_map_only(float, lambda x: x if math.isfinite(x) else None, record)
    return plain


def _describe_builds(races: Mapping[str, Race]) -> list[str]:
    """Say how often arms were built, and how long their threads waited for a core."""
    if not races:
        return []
    counts = sorted({len(race.builds) for race in races.values()})
    several = f" to {counts[-1]} builds of a race" if counts[1:] else " builds"
    known = [share for race in races.values() if (share := race.waiting()) is not None]
    waited = f"at most {max(known):.1%} of the time" if known else "not counted here"
    where = "in processes of their own; threads waited for a core"
    return [f"{counts[0]}{several} {where}: {waited}"]


def _describe(race: Race) -> dict[str, Any]:
    arms = {
        arm: {
            "time_s": dict(zip(("low", "median", "high"), race.quartiles_s(arm), strict=True)),
            "skipped": sum(round_[arm].skipped for round_ in race.rounds),
        }
        for arm in race.arms
    }
    return {
        "base": race.arms[0],
        "waiting": race.waiting(),
        "arms": arms,
        "builds": [
            [[{"arm": a, **v._asdict()} for a, v in r.items()] for r in build.rounds]
            for build in race.builds
        ],
    }


def render(record: dict[str, Any]) -> str:
    """Return the sentence, the table, the environment, the notes, and one line per target."""
    rows = [list(record["table"][0]), *(list(row.values()) for row in record["table"])]
    env = record["environment"]
    machine = f"torch {env['torch']}, {env['device']} ({env['device_name']}), "
    machine += f"{env['threads']} threads, fastamp {env['fastamp']} ({env['backends'][0]})"
    texts = [record["noise"], *record["failures"], record["sentence"]]
    first = [line for text in texts for line in wrap(text, WIDTH)]
    after = [machine[:WIDTH], *record["notes"], *list_verdicts(record)]
    return "\n".join([*first, *align(rows), *after])


def list_verdicts(record: dict[str, Any]) -> list[str]:
    """Return a line for each figure that is held to a target."""
    return [each["text"] for each in record["measurements"] if each["target"]]


# A baseline: whether a run can be compared with it, and what is a regression


def read_baseline(text: str) -> dict[str, Any]:
    """Return the record of a file that --json wrote, for argparse."""
    try:
        return _find_metrics(json.loads(Path(text).read_bytes()))
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        refuse(text, f"cannot be read as a bench's record: {error!r}")


def _find_metrics(record: dict[str, Any]) -> dict[str, Any]:
    """Add the `facts` and the intervals, `metrics`, of a record; one of another schema has none."""
    is_known = record["schema_version"] == SCHEMA_VERSION
    record["facts"] = _find_facts(record) if is_known else {}
    found = {str(each["name"]): each["interval"] for each in record["measurements"] * is_known}
    record["metrics"] = {
        name: Interval(**{end: math.nan if x is None else float(x) for end, x in ends.items()})
        for name, ends in found.items()
        if ends is not None
    }
    return record


def _find_facts(run: dict[str, Any]) -> dict[str, Any]:
    """Return what has to be the same in two runs."""
    machine = {key: run["environment"][key] for key in MACHINE}
    return {"command": run["command"], **run["job"], **machine}


def read_bound(text: str) -> tuple[str, float]:
    """Return the metric and the greatest change of "speedup:-5%", for argparse."""
    found = re.fullmatch(r"(.+):([+-]\d+(?:\.\d+)?)%", text)
    change = float(found[2]) / 100 if found else 0.0
    if found is None or not -1 < change < 1 or change == 0:
        refuse(text, "is not a metric and a change from -99% to +99%, as in 'speedup:-5%'")
    return found[1], change


def differences(baseline: dict[str, Any], run: dict[str, Any]) -> list[str]:
    """Return the reasons why a baseline cannot be compared with this run."""
    if baseline["schema_version"] != SCHEMA_VERSION:
        return [f"schema_version is {baseline['schema_version']}, not {SCHEMA_VERSION}"]
    theirs, ours = baseline["facts"], json.loads(json.dumps(_find_facts(run)))
    pairs = {key: (theirs.get(key), ours.get(key)) for key in sorted({*theirs, *ours})}
    return [f"{key} is {their}, not {our}" for key, (their, our) in pairs.items() if their != our]


def hold(new: Measurement, baseline: dict[str, Any], most: float) -> Measurement:
    """Judge the change of a metric since the baseline, which may go up to `most`, with its sign.

    It passes when its whole interval is within the bound, and fails when none of it is. A metric
    that this run lacks, or that is not above 0, has no change in percent: inconclusive.
    """
    ends = (most, math.inf) if most < 0 else (-math.inf, most)
    both = baseline["metrics"][new.name], new.interval or Interval.exact(math.nan)
    old, now = (each.scaled(lambda x: math.log(x) if x > 0 else math.nan) for each in both)
    value = now.value - old.value
    # The errors of two independent runs add in quadrature.
    low = value - math.hypot(now.value - now.low, old.high - old.value)
    high = value + math.hypot(now.high - now.value, old.value - old.low)
    return Measurement(
        name=f"{new.name} since the baseline",
        interval=Interval(value=value, low=low, high=high).scaled(lambda log: exp(log) - 1),
        base=BASELINE,
        target=ends,
        unit=" %",
        reason="" if new.interval else "this run has no such metric",
        is_counted=new.is_counted,
    )
