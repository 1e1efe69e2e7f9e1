"""What a command found: a race for each case, one table of all, and the record of everything.

The text on the terminal, the JSON file and the page are made from the record.
"""

import argparse
import gc
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from reprlib import repr as short
from textwrap import wrap
from typing import Any, TypeAlias, TypeVar

from torch.utils._pytree import tree_map

from fastamp._progress import progress
from fastamp.bench import apart
from fastamp.bench.race import (
    SAID,
    UNTOLD,
    Build,
    Case,
    Interval,
    Plan,
    Race,
    collect,
    find_noise,
    run_build,
    show,
    verdict_on,
)
from fastamp.timer.timer import align

SCHEMA_VERSION = 10  # raised when a field of the record is added, removed or changes its meaning
Details = dict[str, dict[str, float]]  # more figures of each arm, by name

WIDTH = 100  # columns of a sentence
PLAIN = "plain"  # the arm that does the same work in the plainest way
_LARGEST_NBYTES = 2**28  # of a file that is read
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A figure of an arm, mostly against a base, and where it has a target the verdict on it."""

    name: str  # as --fail-on has it
    interval: Interval | None  # None where the figure is not known
    arm: str = ""
    base: str = ""
    target: tuple[float, float] = (-math.inf, math.inf)  # the ends that the figure lies between
    unit: str = ""
    verdict: str = ""  # "" of a figure that is neither a ratio nor held to a target
    reason: str = ""
    is_counted: bool = False  # as bytes are: a busy machine excuses nothing

    def text(self) -> str:
        """Return the figure with its interval, and where it has a target that and the verdict."""
        factor = 100 if self.unit == " %" else 1
        figure = "-" if self.interval is None else self.interval.text(".4g", self.unit, factor)
        if not self.reason:
            return f"{self.name} {figure}{', ' * bool(self.verdict)}{self.verdict}"
        ends = [f"{end * factor:g}{self.unit}" for end in self.target if math.isfinite(end)]
        if not ends:
            return f"{self.name} {figure}: {self.verdict}, {self.reason}"
        sign = "" if len(ends) == 2 else "<= " if self.target[1] < math.inf else ">= "
        target = f"(target {sign}{' to '.join(ends)})"
        return f"{self.name} {figure} {target}: {self.verdict}, {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a command measured; the races hold every sample, `details` all that is its own."""

    table: list[dict[str, str]]  # rows of cells by column; a missing cell is empty
    measurements: list[Measurement] = field(default_factory=list)
    races: dict[str, Race] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=dict)  # of every training step, by arm
    details: dict[str, Any] = field(default_factory=dict)
    closing: list[str] = field(default_factory=list)  # lines after the verdicts
    failures: list[str] = field(default_factory=list)  # of the work itself: the status is 1
    sentence: str = ""  # the first line: the result in plain words


# The job of a command line, which is equal in records that can be compared, and the function that
# runs it.
Task: TypeAlias = tuple[dict[str, Any], Callable[[], Report]]


def judge(
    name: str,
    interval: Interval | None,
    target: tuple[float, float],
    unit: str,
    reason: str,
    *,
    arm: str = "",
    base: str = "",
    excused: bool = False,
    is_counted: bool = False,
) -> Measurement:
    """Return a figure with the verdict on it; n/a if it is excused or None."""
    about: dict[str, Any] = {"name": name, "interval": interval, "arm": arm, "base": base}
    about["is_counted"] = is_counted
    verdict = "n/a" if excused or interval is None else verdict_on(interval, *target)
    return Measurement(**about, target=target, unit=unit, verdict=verdict, reason=reason)


def compare(name: str, race: Race) -> list[Measurement]:
    """Return how many times as fast as the base each arm is; the last one has the plain name."""
    arms = race.arms[1:]
    return [
        measure(name if arm == arms[-1] else f"{name}/{arm}", race.ratio(arm), arm, race.arms[0])
        for arm in arms
    ]


def measure(name: str, ratio: Interval, arm: str, base: str) -> Measurement:
    """Return a ratio of speeds with its verdict."""
    about: dict[str, Any] = {"name": name, "arm": arm, "base": base}
    return Measurement(**about, interval=ratio, unit="x", verdict=ratio.verdict)


def doubt(found: list[Measurement], races: Mapping[str, Race]) -> list[Measurement]:
    """Return the measurements of a run; on a busy machine no time or ratio has a verdict."""
    noise = find_noise(races)
    unclear = {**dict.fromkeys(SAID, UNTOLD), "pass": "inconclusive", "fail": "inconclusive"}
    return [
        replace(each, verdict=unclear[each.verdict], reason=each.reason and noise)
        if noise and each.verdict in unclear and not each.is_counted
        else each
        for each in found
    ]


def run_cases(
    args: argparse.Namespace,
    plan: Plan,
    names: Collection[str],
    make: Callable[[str], Case],
    notes: list[str],
    details: Callable[[Race], Details] = lambda _: {},
) -> Report:
    """Race the arms of each case; `make`, which can be pickled, builds it in fresh processes."""
    with progress(plan.builds[-1]) as tick:

        def build(unfinished: list[str], number: int) -> dict[str, Build]:
            more = (plan, args.device, args.seed, unfinished, number)
            return apart.run_apart(_build_cases, make, *more)

        races = collect(build, names, plan, is_apart=True, tick=tick)
    known, rows, found = {}, [], []
    for name, race in races.items():
        amounts, known[name] = race.builds[0].found, details(race)
        for arm in race.arms if amounts else ():
            time_s = race.quartiles_s(arm)[1]
            known[name][arm] = {n: amount / time_s for n, amount in amounts.items()}
        found += compare(f"speedup/{name}", race)
        if PLAIN in race.arms:
            arm = race.arms[-1]
            found.append(measure(f"of_plain/{name}", race.ratio(arm, PLAIN), arm, PLAIN))
        rows += [_row(name, arm, race, known[name]) for arm in race.arms]
    return Report(table=rows, races=races, measurements=found, notes=notes, details=known)


def _build_cases(
    make: Callable[[str], Case], plan: Plan, device: str, seed: int, names: list[str], number: int
) -> dict[str, Build]:
    """Build each case, one after the other, and time it."""
    builds = {}
    for name in names:
        case = make(name)
        builds[name] = run_build(case, plan, device=device, seed=seed * 1000 + number)
        builds[name].found = dict(case.amounts)
        del case
        gc.collect()
    return builds


def _row(name: str, arm: str, race: Race, details: Details) -> dict[str, str]:
    figures = {"median ms": 1e3 * race.quartiles_s(arm)[1], **details.get(arm, {})}
    ratio, is_judged = race.ratio(arm), arm == race.arms[-1]
    row = {
        "race": name,
        "arm": arm,
        "builds": str(len(race.builds)),
        **{
            key: show(value, ".0f" if value >= 1000 or isinstance(value, int) else ".3f")
            for key, value in figures.items()
        },
        "speed-up [95 %]": ratio.text(".3f", "x"),
    }
    if PLAIN in race.arms:
        row["of plain [95 %]"] = race.ratio(arm, PLAIN).text(".3f", "x") if is_judged else ""
    said = UNTOLD if find_noise({name: race}) else ratio.verdict
    return row | {"verdict": "" if arm == race.arms[0] else said}


def make_record(report: Report, run: dict[str, Any]) -> dict[str, Any]:
    """Return a report and the facts of its `run` as JSON's types; None for what is not finite."""
    noise = find_noise(report.races)
    columns = dict.fromkeys(column for row in report.table for column in row)
    record = {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **run,
        "noise": noise,
        "table": [{column: row.get(column, "") for column in columns} for row in report.table],
        "notes": report.notes + _describe_builds(report.races),
        "measurements": [asdict(each) | {"text": each.text()} for each in report.measurements],
        "closing": report.closing,
        "failures": report.failures,
        "sentence": "" if noise else report.sentence,
        "details": report.details,
        "losses": report.losses,
        "races": {name: _describe(race) for name, race in report.races.items()},
    }
    plain: dict[str, Any] = tree_map(_finite, record)
    return plain


def _describe_builds(races: Mapping[str, Race]) -> list[str]:
    """Say how often arms were built, and how long their threads waited for a core."""
    if not races:
        return []
    counts = {len(race.builds) for race in races.values()}
    shares = [race.waiting() for race in races.values()]
    where = {True: "in processes of their own", False: "of new objects in one process"}
    kinds = " or ".join(where[kind] for kind in {race.is_apart for race in races.values()})
    least, most = min(counts), max(counts)
    builds = f"{least} builds" if least == most else f"{least} to {most} builds of a race"
    known = [share for share in shares if share is not None]
    waited = f"at most {max(known):.1%} of the time" if known else "not counted here"
    return [f"{builds} {kinds}; threads waited for a core: {waited}"]


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _describe(race: Race) -> dict[str, Any]:
    arms = {
        arm: {
            "time_s": dict(zip(("low", "median", "high"), race.quartiles_s(arm), strict=True)),
            "skipped": race.skipped(arm),
        }
        for arm in race.arms
    }
    return {
        "base": race.arms[0],
        "is_apart": race.is_apart,
        "waiting": race.waiting(),
        "arms": arms,
        "builds": [
            [[{"arm": a, **v._asdict()} for a, v in r.items()] for r in build.rounds]
            for build in race.builds
        ],
    }


def read_json(text: str, parse: Callable[[Any], _T], problem: str) -> _T:
    """Return `parse` of a JSON file's content, for argparse; an error's text has `problem`."""
    try:
        with Path(text).open("rb") as file:
            return parse(json.loads(file.read(_LARGEST_NBYTES)))
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        missing = "it has no " if isinstance(error, LookupError) else ""
        message = f"{text!r} {problem}: {missing}{error}"
        raise argparse.ArgumentTypeError(message) from error


def check_kinds(content: dict[str, Any], kinds: Mapping[str, type]) -> None:
    """Raise an error unless some entries of a JSON object are of these kinds."""
    for name, kind in kinds.items():
        if not isinstance(content[name], kind):
            msg = f"its {name} is {short(content[name])}, expected a {kind.__name__}"
            raise TypeError(msg)


def is_judged(measurement: dict[str, Any]) -> bool:
    """Say whether a figure of a record is held to a target, and not only said to be faster."""
    return measurement["verdict"] not in {"", *SAID}


def render(record: dict[str, Any]) -> str:
    """Return the sentence, the table, the environment, the notes, and one line per target."""
    rows = [list(record["table"][0]), *(list(row.values()) for row in record["table"])]
    env = record["environment"]
    machine = (
        f"torch {env['torch']}, {env['device']} ({env['device_name']}), {env['threads']} threads, "
        f"fastamp {env['fastamp']} (backends {' '.join(env['backends'])})"
    )
    judged = (each["text"] for each in record["measurements"] if is_judged(each))
    first = [record["noise"], *record["failures"], record["sentence"]]
    first = [line for text in first if text for line in wrap(text, WIDTH)]
    closing = [*judged, *record["closing"]]
    return "\n".join([*first, *align(rows), machine, *record["notes"], *closing])
