"""What this installation lacks, or where the time of a script's step goes.

It exits with 0, whatever it finds; with --check, which nothing here answers, with 3.
"""

import argparse
import math
from collections.abc import Callable
from functools import partial
from reprlib import repr as short
from typing import Any

from fastamp.bench import installation
from fastamp.bench.record import Report, Task, check_kinds, read_json
from fastamp.bench.where import REGIONS, Shares, limit

METRICS = "none"
BETWEEN = "outside of regions"
# Regions that are no part of a step, like all that lies inside them.
APART = {"eval", "evaluate", "val", "validate", "validation", "test", "checkpoint"}


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this command alone."""
    what = "a file written by Timer.to_json in your own script: show where its time goes; name its "
    what += "regions data, forward, backward and step"
    add("--timer", type=_read, metavar="FILE", help=what)


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and the function that runs it."""
    if args.timer is None:
        return {}, _look
    path, times_s = args.timer
    return {"timer": path}, partial(_show, times_s)


def _look() -> Report:
    """Say which backend serves which device, and what is missing."""
    rows = [
        {"device": str(device), "served by": installation.served_by(device)}
        for device in installation.devices()
    ]
    return Report(table=rows, notes=installation.examine() or ["nothing is missing"])


def _read(text: str) -> tuple[str, Shares]:
    """Return the path of a `Timer.to_json` file and the times of its parts, for argparse."""
    problem = "is no file of Timer.to_json with the parts of a step"
    return text, read_json(text, find_times, problem)


def find_times(content: dict[str, Any]) -> Shares:
    """Return the seconds of each part of a step, from the content of a `Timer.to_json` file.

    A region is the part that it is called, and any other belongs to the region around it. Its time
    excludes the regions inside it. Evaluation and checkpoints are left out. What no region has of
    the elapsed time is a part, too.

    Raises:
        ValueError: no region is called as a part of a step, or a time is no number of seconds.
    """
    check_kinds(content, {"regions": dict})
    regions, elapsed_s = content["regions"], content.get("elapsed", 0.0)
    totals_s = {path: region["total"] for path, region in regions.items()}
    for path, total_s in {**totals_s, "elapsed": elapsed_s}.items():
        if type(total_s) not in (int, float) or not 0 <= total_s < math.inf:
            msg = f"{path!r} is {short(total_s)}, expected seconds"
            raise ValueError(msg)
    own_s = dict(totals_s)
    for path, total_s in totals_s.items():
        around = path.rpartition("/")[0]
        if around in own_s:
            own_s[around] -= total_s
    times_s = dict.fromkeys([*REGIONS, "other"], 0.0)
    for path, time_s in own_s.items():
        if not APART & {*path.split("/")}:
            times_s[_part_of(path)] += max(time_s, 0.0)
    outermost = [path for path in totals_s if path.rpartition("/")[0] not in totals_s]
    times_s[BETWEEN] = max(elapsed_s - math.fsum(totals_s[path] for path in outermost), 0.0)
    if not any(times_s[part] for part in REGIONS):
        msg = f"no region with a time is named after a part of a step: {', '.join(REGIONS)}"
        raise ValueError(msg)
    return {part: time_s for part, time_s in times_s.items() if time_s}


def _part_of(path: str) -> str:
    return next((name for name in reversed(path.split("/")) if name in REGIONS), "other")


def _show(times_s: Shares) -> Report:
    """Say where the time goes, and how many times as fast a step were without each part."""
    whole_s = math.fsum(times_s.values())
    shares = {part: time_s / whole_s for part, time_s in times_s.items()}
    rows = []
    for part, share in shares.items():
        most = limit(shares, part)
        without = "-" if math.isinf(most) else f"at most {most:.2f}x as fast"
        row = {"part": part, "seconds": f"{times_s[part]:.3f}", "share": f"{share:.0%}"}
        rows.append({**row, "without it": without})
    return Report(table=rows, details={"shares": shares})
