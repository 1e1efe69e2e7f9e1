"""Compare a run with a saved one: whether they can be compared, and what is a regression."""

import argparse
import json
import math
import re
from functools import partial
from reprlib import repr as short
from typing import Any

from fastamp.bench.race import LARGEST_LOG, Interval, verdict_on
from fastamp.bench.record import SCHEMA_VERSION, Measurement, check_kinds, read_json

MACHINE = ("device", "device_name", "threads")
BASELINE = "the baseline"  # of a change


def read(text: str) -> dict[str, Any]:
    """Return the record of a file that --json wrote, for argparse."""
    return read_json(text, _check, "cannot be read")


def _check(record: dict[str, Any]) -> dict[str, Any]:
    """Raise an error unless a record has what `differences` and `hold` read; add its `metrics`.

    A record of another schema has none.
    """
    record["metrics"] = {}
    if record["schema_version"] != SCHEMA_VERSION:
        return record
    kinds = {"command": str, "job": dict, "environment": dict, "measurements": list}
    check_kinds(record, kinds)
    for name in MACHINE:
        record["environment"][name]
    for each in record["measurements"]:
        check_kinds(each, {"name": str})
        name, figure = each["name"], each["interval"]
        if figure is None:
            continue
        ends = {end: figure[end] for end in ("value", "low", "high")}
        if ends != figure or not all(x is None or type(x) in (int, float) for x in ends.values()):
            msg = f"its measurement {name!r} is {short(figure)}, expected numbers"
            raise TypeError(msg)
        record["metrics"][name] = {n: x if x is None else float(x) for n, x in ends.items()}
    return record


def bound(text: str) -> tuple[str, float]:
    """Return the metric and the greatest change of "speedup:-5%", for argparse."""
    found = re.fullmatch(r"(.+):([+-]\d+(?:\.\d+)?)%", text)
    change = float(found[2]) / 100 if found else 0.0
    if found is None or not -1 < change < 1 or change == 0:
        message = f"{text!r} is not a metric and a change from -99% to +99%, as in 'speedup:-5%'"
        raise argparse.ArgumentTypeError(message)
    return found[1], change


def differences(baseline: dict[str, Any], run: dict[str, Any]) -> list[str]:
    """Return the reasons why a baseline cannot be compared with this run."""
    if baseline["schema_version"] != SCHEMA_VERSION:
        return [f"schema_version is {baseline['schema_version']}, not {SCHEMA_VERSION}"]
    theirs, ours = (
        {"command": each["command"], **each["job"]}
        | {key: each["environment"][key] for key in MACHINE}
        for each in (baseline, json.loads(json.dumps(run)))
    )
    pairs = {key: (theirs.get(key), ours.get(key)) for key in sorted({*theirs, *ours})}
    return [f"{key} is {their}, not {our}" for key, (their, our) in pairs.items() if their != our]


def hold(
    name: str, new: Interval | None, saved: dict[str, float | None], most: float
) -> Measurement:
    """Judge the change of a metric since the baseline, which may go up to `most`, with its sign.

    It passes when its whole interval is within the bound, and fails when none of it is. A metric
    that this run lacks, or that is not above 0, has no change in percent: inconclusive.
    """
    ends = (most, math.inf) if most < 0 else (-math.inf, most)
    about: dict[str, Any] = {"name": f"{name} since the baseline", "base": BASELINE}
    verdict = partial(Measurement, **about, target=ends, unit=" %")
    if new is None:
        return verdict(interval=None, verdict="inconclusive", reason="this run has no such metric")
    old, now = (_logs(**figure) for figure in (saved, vars(new)))
    value = now.value - old.value
    # The errors of two independent runs add in quadrature.
    low = value - math.hypot(now.value - now.low, old.high - old.value)
    high = value + math.hypot(now.high - now.value, old.value - old.low)
    change = Interval(value=value, low=low, high=high).scaled(_expm1)
    before = saved["value"]
    why = f"{new.value:.4g} against {math.nan if before is None else before:.4g}"
    return verdict(interval=change, verdict=verdict_on(change, *ends), reason=why)


def _expm1(x: float) -> float:
    return math.inf if x > LARGEST_LOG else math.expm1(x)


def _logs(value: float | None, low: float | None, high: float | None) -> Interval:
    """Take logarithms: NaN for a value that has none, infinity for such an end."""

    def log(x: float | None, otherwise: float) -> float:
        return math.log(x) if x is not None and 0 < x < math.inf else otherwise

    return Interval(value=log(value, math.nan), low=log(low, -math.inf), high=log(high, math.inf))
