"""What this installation does and lacks, or, with --timer, what would make a script faster.

It exits with 0, whatever it finds; with --check, which nothing here answers, with 3.
"""

import argparse
import re
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from reprlib import repr as short
from typing import Any, get_type_hints

import torch

from fastamp.bench import installation
from fastamp.bench.advice import PARTS, Profile, advise, read_profile
from fastamp.bench.facts import Facts
from fastamp.bench.race import Interval, Plan, run_race
from fastamp.bench.record import Report, Task, check_kinds, read_json
from fastamp.bench.rows import SGD, WORK
from fastamp.bench.step import CALLS, SMALL, STOCK_RTOL, Side, draw_grads
from fastamp.timer import RegionStats

METRICS = "none"
KINDS = {
    "Adam": "adamw",
    "AdamW": "adamw",
    "SGD": "sgd",
}  # the work of `bench step` that moves as many bytes
MOST_NUMEL = 2**24  # of the parameters of a race, which three sides copy
MOST_PARAMETERS = 2**16  # each takes some microseconds to make and to check
PLAN = Plan(rounds=400, half_width=0.02, limit_s=2.0)


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this command alone."""
    what = "a file written by Timer.to_json in your own script: show where its time goes, and what "
    what += "would help; name its regions data, forward, backward and step"
    add("--timer", type=_read, metavar="FILE", help=what)


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and the function that runs it."""
    if args.timer is None:
        return {}, _look
    path, profile = args.timer
    return {"timer": path}, partial(_judge, args, profile)


def _look() -> Report:
    """Say which backend serves which device, and what is missing."""
    rows = [installation.served_by(device) for device in installation.devices()]
    found = installation.examine()
    notes = [finding.text() for finding in found] or ["nothing is missing"]
    details = {"findings": [finding._asdict() for finding in found]}
    return Report(table=rows, notes=notes, details=details)


def _read(text: str) -> tuple[str, Profile]:
    """Return the path of a `Timer.to_json` file and its profile, for argparse."""
    problem = "is no file of Timer.to_json with the parts of a step"
    return text, read_json(text, _parse, problem)


def _parse(content: Any) -> Profile:
    if not isinstance(content, dict) or (content["schema"], content["unit"]) != (1, "s"):
        msg = f"expected an object of schema 1 in seconds, got {short(content)}"
        raise ValueError(msg)
    content.setdefault("facts", {})  # older files have none
    check_kinds(content, {"device": str, "facts": dict, "regions": dict})
    device = content["device"]
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        msg = f"its device is {short(device)}, expected cpu or cuda"
        raise ValueError(msg)
    regions = {path: _parse_region(path, saved) for path, saved in content["regions"].items()}
    profile = read_profile(regions, device, _parse_facts(content["facts"]))
    if not profile.parts:
        msg = "none of its regions took any time"
        raise ValueError(msg)
    return profile


def _parse_facts(facts: dict[str, Any]) -> Facts:
    sizes = facts.pop("sizes", None)
    kinds = get_type_hints(Facts)
    if not all(name in kinds and isinstance(value, kinds[name]) for name, value in facts.items()):
        msg = f"its facts are {short(facts)}"
        raise ValueError(msg)
    if sizes is not None:
        sizes = tuple((_whole(numel), _whole(count)) for numel, count in sizes)
    return Facts(**facts, sizes=sizes)


def _parse_region(path: str, saved: Any) -> RegionStats:
    if not isinstance(saved, dict):
        msg = f"its region {path!r} is {short(saved)}"
        raise TypeError(msg)
    histogram = tuple((_whole(bucket), _whole(hits)) for bucket, hits in saved["histogram"])
    stats = RegionStats(**{**saved, "histogram": histogram})
    numbers = [value for value in stats if not isinstance(value, tuple)]
    known = all(type(x) in (int, float) and 0 <= x < 2**53 for x in numbers)
    known = known and all(bucket < 1888 for bucket, _ in histogram)  # 2**63 ns
    counted = type(stats.count) is int and sum(hits for _, hits in histogram) == stats.count
    some = stats.count or stats.dropped or stats.captured
    if not known or not counted or not some or stats.max > stats.total * 1.001:
        msg = f"its region {path!r} is {short(saved)}"
        raise ValueError(msg)
    return stats


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        msg = f"{short(value)} is no count"
        raise ValueError(msg)
    return value


def _judge(args: argparse.Namespace, profile: Profile) -> Report:
    """Say where the time goes, and what would help."""
    ratios, notes = _race_step(profile, args.seed)
    found = advise(profile, ratios=ratios)
    rows = [
        {
            "part": part,
            "ms a step [95 %]": profile.parts[part].text(".3f", factor=1e3),
            "share": f"{profile.share(part):.0%}",
        }
        for part in PARTS
        if part in profile.parts
    ]
    notes = [f"{profile.steps} steps on {profile.device}, without time outside of regions", *notes]
    notes += [f"{number}. {each.text()}" for number, each in enumerate(found, start=1)]
    details = {"advice": [asdict(each) for each in found]}
    return Report(table=rows, notes=notes, details=details)


def _race_step(profile: Profile, seed: int) -> tuple[dict[str, Interval], list[str]]:
    """Race steps over parameters like those of the file; return `advise`'s ratios, and notes.

    A ratio is at most the file's own time over the raced one: its script may not clip at all.
    """
    facts, device = profile.facts, torch.device(profile.device).type
    here = device == "cpu" or (device == "cuda" and torch.cuda.is_available())
    all_sizes = facts.sizes or ()
    fits = here and 0 < sum(count for _, count in all_sizes) <= MOST_PARAMETERS
    if "step" not in profile.parts or not fits or facts.optimizer not in KINDS:
        return {}, []
    numel = sum(size * count for size, count in all_sizes)
    cut = max(1, -(-numel // MOST_NUMEL))  # parameters that are too large are shortened
    sizes = [max(size // cut, 1) for size, count in all_sizes for _ in range(count)]
    sides = _make_sides(facts, sizes, device, seed)
    race = run_race(
        {arm: side.fastamp if arm == "fastamp" else side.torch for arm, side in sides.items()},
        PLAN,
        device=device,
        seed=seed,
        calls=1 if sum(sizes) > SMALL else CALLS,
        before=lambda arm: sides[arm].restore(),
    )
    ratios, step_s = {}, profile.parts["step"]
    for part, arm in {"fused": "torch, fused", "step": "fastamp"}.items():
        time_s, ratio = race.time_s(arm).scaled(lambda value: value * cut), race.ratio(arm)
        ratios[part] = Interval(
            value=min(ratio.value, step_s.value / time_s.value),
            low=min(ratio.low, step_s.low / time_s.high),
            high=min(ratio.high, step_s.high / time_s.low),
        )
    times = ", ".join(f"{arm} {race.time_s(arm).text('.3f', ' ms', 1e3 * cut)}" for arm in sides)
    shortened = f", with 1/{cut} of their elements" if cut > 1 else ""
    return ratios, [f"clip and step of such parameters, raced here{shortened}: {times}"]


def _make_sides(facts: Facts, sizes: list[int], device: str, seed: int) -> dict[str, Side]:
    """Return torch's step as it is, fused, and fastamp's, each checked against plain arithmetic."""
    drawn, norm = draw_grads([(size,) for size in sizes], device, seed)
    name, sides = KINDS[facts.optimizer or ""], {}
    make = SGD if name == "sgd" else torch.optim.AdamW
    for arm in ("torch", "torch, fused", "fastamp"):
        optimizer = partial(make, fused=arm == "torch, fused" or facts.fused or None)
        work = WORK[name]._replace(optimizer=optimizer, scaler=facts.scaler not in {None, "none"})
        side = Side(work, drawn, grouped=(facts.groups or 1) >= len(sizes) > 1)
        side.check(side.fastamp if arm == "fastamp" else side.torch, norm, rtol=STOCK_RTOL)
        sides[arm] = side
    return sides
