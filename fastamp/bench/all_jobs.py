"""The built-in tasks, one after the other, but for the main job: what fastamp adds to each.

Takes one to two minutes for each task on two CPU cores.
"""

import argparse
from collections.abc import Callable
from functools import partial

from fastamp.bench.arms import choose_precisions, list_arms
from fastamp.bench.jobs import JOBS, MAIN, describe
from fastamp.bench.jobs.vision import why_none
from fastamp.bench.main_job import announce
from fastamp.bench.measure import Results, race_task
from fastamp.bench.options import refuse
from fastamp.bench.race import UNTOLD, find_noise
from fastamp.bench.record import Measurement, Report, Task
from fastamp.bench.targets import find_fastest, make_rows, measure_gains

METRICS = "TASK/fastamp/PRECISION and TASK/precision/PRECISION, as in mlp/fastamp/fp32"


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this command alone."""
    tasks = [name for name in JOBS if name != MAIN]
    text = f"some of {', '.join(tasks)} (default: all of them; images needs Pillow)"
    add("names", nargs="*", metavar="TASK", help=text)


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and the function that runs it."""
    known = [name for name in JOBS if name != MAIN]
    names = list(dict.fromkeys(args.names or [n for n in known if n != "images" or not why_none()]))
    for name in names:
        if name not in known:
            refuse("TASK", name, f"is none of {', '.join(known)}")
        if name == "images" and (why := why_none()):
            refuse("TASK", name, why)
    return {"tasks": names, "seed": args.seed}, partial(_run, args, names)


def _run(args: argparse.Namespace, names: list[str]) -> Report:
    precisions = choose_precisions(args.device)
    found: dict[str, Results] = {}
    for name in names:
        arms = list_arms(name, precisions, [])
        announce(name, arms)
        found[name] = race_task(arms, args.device, args.seed)
    gains = {name: measure_gains(each, f"{name}/") for name, each in found.items()}
    failed = [f"{name}: {why}" for name, each in found.items() for why in each.failures]
    return Report(
        table=[{"task": n, **row} for n, each in found.items() for row in make_rows(each)],
        races={name: each.race for name, each in found.items()},
        measurements=[gain for each in gains.values() for gain in each],
        notes=[f"{name}: {describe(name)}" for name in names],
        details={name: {"shares": each.shares} for name, each in found.items()},
        failures=failed,
        sentence="" if failed else _say(found, gains),
    )


def _say(found: dict[str, Results], gains: dict[str, list[Measurement]]) -> str:
    """Return what fastamp adds to each task in the precision that is fastest there."""
    said = []
    for name, each in found.items():
        wanted = f"{name}/fastamp/{find_fastest(each)}"
        [gain] = [gain for gain in gains[name] if gain.name == wanted]
        verdict = UNTOLD if find_noise({name: each.race}) else gain.verdict
        ratio = each.race.ratio(gain.arm, gain.base).value
        said.append(f"{name} {ratio:.2f}x ({verdict})")
    return f"Times as fast as torch in the same precision: {', '.join(said)}."
