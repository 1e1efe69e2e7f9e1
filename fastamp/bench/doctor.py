"""What this installation lacks, or where the time of a script's step goes.

It exits with 0, whatever it finds; with --check, which nothing here answers, with 3.
"""

import argparse
import math
import re
from collections.abc import Callable
from functools import partial
from reprlib import repr as short
from typing import Any

from fastamp.bench import installation
from fastamp.bench.parts import BETWEEN, PARTS, Profile, read_profile
from fastamp.bench.record import Report, Task, check_kinds, read_json
from fastamp.bench.where import limit
from fastamp.timer import RegionStats

METRICS = "none"


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this command alone."""
    what = "a file written by Timer.to_json in your own script: show where its time goes; name its "
    what += "regions data, forward, backward and step"
    add("--timer", type=_read, metavar="FILE", help=what)


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and the function that runs it."""
    if args.timer is None:
        return {}, _look
    path, profile = args.timer
    return {"timer": path}, partial(_show, profile)


def _look() -> Report:
    """Say which backend serves which device, and what is missing."""
    rows = [
        {"device": str(device), "served by": installation.served_by(device)}
        for device in installation.devices()
    ]
    return Report(table=rows, notes=installation.examine() or ["nothing is missing"])


def _read(text: str) -> tuple[str, Profile]:
    """Return the path of a `Timer.to_json` file and its profile, for argparse."""
    problem = "is no file of Timer.to_json with the parts of a step"
    return text, read_json(text, _parse, problem)


def _parse(content: Any) -> Profile:
    if not isinstance(content, dict) or (content["schema"], content["unit"]) != (1, "s"):
        msg = f"expected an object of schema 1 in seconds, got {short(content)}"
        raise ValueError(msg)
    content = {"elapsed": 0.0, **content}  # which older files lack
    check_kinds(content, {"device": str, "regions": dict})
    device, elapsed_s = content["device"], content["elapsed"]
    _expect(re.fullmatch(r"cpu|cuda(:\d+)?", device), "device", device, "cpu or cuda")
    _expect(_is_number(elapsed_s), "elapsed", elapsed_s, "seconds")
    regions = {path: _parse_region(path, saved) for path, saved in content["regions"].items()}
    profile = read_profile(regions, device, elapsed_s)
    _expect({*profile.parts} - {BETWEEN}, "regions", [*regions], "some that took any time")
    return profile


def _parse_region(path: str, saved: Any) -> RegionStats:
    name = f"region {path!r}"
    _expect(isinstance(saved, dict), name, saved, "an object")
    histogram = _as_pairs(saved["histogram"])
    stats = RegionStats(**{**saved, "histogram": histogram})
    known = all(map(_is_number, stats[:-1])) and stats.max <= stats.total * 1.001
    known = known and all(bucket < 1888 for bucket, _ in histogram)  # 2**63 ns
    counted = type(stats.count) is int and sum(hits for _, hits in histogram) == stats.count
    some = stats.count or stats.dropped or stats.captured
    _expect(known and counted and some, name, saved, "one of RegionStats")
    return stats


def _as_pairs(pairs: Any) -> tuple[tuple[int, int], ...]:
    for value in (value for pair in pairs for value in pair):
        _expect(type(value) is int and _is_number(value), "count", value, "0 or more")
    return tuple((first, second) for first, second in pairs)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 2**53


def _expect(found: object, name: str, value: object, expected: str) -> None:
    if not found:
        msg = f"its {name} is {short(value)}, expected {expected}"
        raise ValueError(msg)


def _show(profile: Profile) -> Report:
    """Say where the time goes, and how many times as fast a step were without each part."""
    rows = []
    for part in (part for part in PARTS if part in profile.parts):
        share = profile.share(part)
        most = limit({part: share}, part)
        rows.append(
            {
                "part": part,
                "ms a step [95 %]": profile.parts[part].text(".3f", factor=1e3),
                "share": f"{share:.0%}",
                "without it": "-" if math.isinf(most) else f"at most {most:.2f}x as fast",
            }
        )
    shares = {part: profile.share(part) for part in profile.parts}
    notes = [f"{profile.steps} steps on {profile.device}"]
    return Report(table=rows, notes=notes, details={"shares": shares})
