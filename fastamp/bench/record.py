"""What a command found: a race for each case, one table of all, and the record of everything.

The text on the terminal, the JSON file and the page are made from the record.
"""

import argparse
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from reprlib import repr as short
from typing import Any, TypeAlias, TypeVar

from torch.utils._pytree import tree_map

from fastamp._progress import progress
from fastamp.bench.race import (
    AGAIN,
    NOISE_CONFIDENCE,
    Interval,
    Plan,
    Race,
    find_noise,
    run_race,
    show,
    verdict_on,
)
from fastamp.timer.timer import align

SCHEMA_VERSION = 7  # raised when a field of the record is added, removed or changes its meaning
Details = dict[str, dict[str, float]]  # more figures of each arm, by name

SAID = ("faster", "slower", "no difference found")  # verdicts on arms without a target
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
    verdict: str = ""  # "" without a target
    reason: str = ""

    def text(self) -> str:
        """Return the figure with its interval, and where it has a target that and the verdict."""
        factor = 100 if self.unit == " %" else 1
        figure = "-" if self.interval is None else self.interval.text(".4g", self.unit, factor)
        if not self.verdict:
            return f"{self.name} {figure}"
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
    sentence: str = ""  # the last line: the result in plain words


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
) -> Measurement:
    """Return a figure with the verdict on it; n/a if it is excused or None."""
    about: dict[str, Any] = {"name": name, "interval": interval, "arm": arm, "base": base}
    verdict = "n/a" if excused or interval is None else verdict_on(interval, *target)
    return Measurement(**about, target=target, unit=unit, verdict=verdict, reason=reason)


def compare(name: str, race: Race) -> list[Measurement]:
    """Return how many times as fast as the base each arm is; the last one has the plain name."""
    base, *arms = race.arms
    return [
        Measurement(
            name=name if arm == arms[-1] else f"{name}/{arm}",
            arm=arm,
            base=base,
            interval=race.ratio(arm),
            unit="x",
        )
        for arm in arms
        if arm != AGAIN or arm == arms[-1]
    ]


def doubt(found: list[Measurement], races: Mapping[str, Race]) -> list[Measurement]:
    """Return the measurements of a run; on a machine that is too noisy none passes or fails."""
    noise = find_noise(races)
    if not noise:
        return found
    return [
        replace(each, verdict="inconclusive", reason=noise)
        if each.verdict in {"pass", "fail", *SAID}
        else each
        for each in found
    ]


@dataclass(frozen=True, kw_only=True)
class Case:
    """The arms of one race: the first is the base, the last is judged."""

    arms: Mapping[str, Callable[[], object]]
    before: Callable[[str], object] = lambda _: None  # prepares an arm for a call
    calls: int = 1  # in a visit
    plan: Plan | None = None  # of this case alone
    amounts: Mapping[str, float] = field(default_factory=dict)  # of a visit, by name of the rate
    details: Callable[[Race], Details] = lambda _: {}


def run_cases(
    args: argparse.Namespace,
    plan: Plan,
    names: Collection[str],
    make: Callable[[str], Case],
    notes: list[str],
) -> Report:
    """Race the arms of each case, one case after the other."""
    races, details, rows, found = {}, {}, [], []
    with progress(len(names)) as tick:
        for name in names:
            case = make(name)
            shared = {"device": args.device, "seed": args.seed}
            how = case.plan or plan
            race = run_race(case.arms, how, calls=case.calls, before=case.before, **shared)
            races[name], details[name] = race, case.details(race)
            for arm in race.arms if case.amounts else ():
                time_s = race.quartiles_s(arm)[1]
                details[name][arm] = {n: amount / time_s for n, amount in case.amounts.items()}
            found += compare(f"speedup/{name}", race)
            if PLAIN in race.arms:
                arm, ratio = race.arms[-1], race.ratio(race.arms[-1], PLAIN)
                of_plain = Measurement(
                    name=f"of_plain/{name}", arm=arm, base=PLAIN, interval=ratio, unit="x"
                )
                found.append(of_plain)
            rows += [_row(name, arm, race, details[name]) for arm in race.arms if arm != AGAIN]
            tick()
    return Report(table=rows, races=races, measurements=found, notes=notes, details=details)


def _row(name: str, arm: str, race: Race, details: Details) -> dict[str, str]:
    figures = {"median ms": 1e3 * race.quartiles_s(arm)[1], **details.get(arm, {})}
    row = {
        "race": name,
        "arm": arm,
        "blocks": str(len(race.blocks())),
        **{
            key: show(value, ".0f" if value >= 1000 or isinstance(value, int) else ".3f")
            for key, value in figures.items()
        },
        "speed-up [95 %]": race.ratio(arm).text(".3f", "x"),
    }
    if PLAIN in race.arms:
        judged = arm == race.arms[-1]
        row["of plain [95 %]"] = race.ratio(arm, PLAIN).text(".3f", "x") if judged else ""
    return row


def make_record(report: Report, run: dict[str, Any]) -> dict[str, Any]:
    """Return a report and the facts of its `run` as JSON's types; None for what is not finite."""
    noise = find_noise(report.races)
    confidence = 1 - (1 - NOISE_CONFIDENCE) / max(len(report.races), 1)
    placebos = {name: race.placebo(confidence) for name, race in report.races.items()}
    bases = {name: race.arms[0] for name, race in report.races.items()}
    found = report.measurements + [
        Measurement(name=f"placebo/{n}", arm=bases[n], base=bases[n], interval=each, unit="x")
        for n, each in placebos.items()
    ]
    lines = [
        f"placebo, {name}: {bases[name]} against itself {each.text('.4f', 'x')}"
        for name, each in placebos.items()
    ]
    columns = dict.fromkeys(column for row in report.table for column in row)
    record = {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **run,
        "noise": noise,
        "table": [{column: row.get(column, "") for column in columns} for row in report.table],
        "notes": report.notes + lines,
        "measurements": [asdict(each) | {"text": each.text()} for each in found],
        "closing": report.closing,
        "sentence": report.sentence,
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
        }
        for arm in race.arms
    }
    return {
        "base": race.arms[0],
        "warmup_rounds": race.warmup_rounds,
        "blocks": len(race.blocks()),
        "arms": arms,
        "rounds": [[{"arm": a, **v._asdict()} for a, v in r.items()] for r in race.rounds],
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


def render(record: dict[str, Any]) -> str:
    """Return the table, the environment, the notes, and one line per target."""
    rows = [list(record["table"][0]), *(list(row.values()) for row in record["table"])]
    env = record["environment"]
    machine = (
        f"torch {env['torch']}, {env['device']} ({env['device_name']}), {env['threads']} threads, "
        f"fastamp {env['fastamp']} (backends {' '.join(env['backends'])})"
    )
    judged = (each["text"] for each in record["measurements"] if each["verdict"])
    closing = [*judged, *record["closing"], record["sentence"]]
    first = [record["noise"], ""] if record["noise"] else []
    return "\n".join([*first, *align(rows), "", machine, *record["notes"], *filter(None, closing)])
