"""What this installation lacks, or what would make a script faster.

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
from fastamp.bench.advice import BETWEEN, PARTS, Profile, advise, read_profile
from fastamp.bench.facts import Facts
from fastamp.bench.race import Case, Interval, Plan, find_noise, run_race
from fastamp.bench.record import Report, Task, check_kinds, read_json
from fastamp.bench.rows import SGD, WORK
from fastamp.bench.step import CALLS, SMALL, STOCK_RTOL, Side, draw_grads
from fastamp.timer import RegionStats

METRICS = "none"
# The work of `bench step` that moves as many bytes.
KINDS = {"Adam": "adamw", "AdamW": "adamw", "SGD": "sgd"}
MOST_NUMEL = 2**24  # of the parameters of a race, which three sides copy
MOST_PARAMETERS = 2**16  # each takes some microseconds to make and to check
LIKE = 2  # times the loop's own step, which a race of the same work takes at most
PLAN = Plan(rounds=400, build_s=0.4, builds=(5,))


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
    return {"timer": path}, partial(_judge, profile, args.seed)


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
    content = {"facts": {}, "elapsed": 0.0, **content}  # older files have neither
    check_kinds(content, {"device": str, "facts": dict, "regions": dict})
    device, elapsed_s, facts = content["device"], content["elapsed"], content["facts"]
    _expect(re.fullmatch(r"cpu|cuda(:\d+)?", device), "device", device, "cpu or cuda")
    _expect(_is_number(elapsed_s), "elapsed", elapsed_s, "seconds")
    kinds = get_type_hints(Facts)
    if facts.get("sizes") is not None:
        facts["sizes"] = _as_pairs(facts["sizes"])
    for name, value in facts.items():
        known = name in kinds and (name == "sizes" or isinstance(value, kinds[name]))
        _expect(known, f"fact {name!r}", value, "what facts.save writes")
    regions = {path: _parse_region(path, saved) for path, saved in content["regions"].items()}
    profile = read_profile(regions, device, Facts(**facts), elapsed_s)
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


def _judge(profile: Profile, seed: int) -> Report:
    """Say where the time goes, and what would help."""
    gains, raced = _race_step(profile, seed)
    found = advise(profile, gains, "raced on parameters like the loop's")
    rows = [
        {
            "part": part,
            "ms a step [95 %]": profile.parts[part].text(".3f", factor=1e3),
            "share": f"{profile.share(part):.0%}",
        }
        for part in PARTS
        if part in profile.parts
    ]
    notes = [f"{profile.steps} steps on {profile.device}", *filter(None, [raced])]
    notes += [f"{number}. {each.text()}" for number, each in enumerate(found, start=1)]
    details = {"advice": [asdict(each) for each in found]}
    return Report(table=rows, notes=notes, details=details)


def _race_step(profile: Profile, seed: int) -> tuple[dict[str, Interval], str]:
    """Race steps over parameters like those of the file; return what is gained, and a note."""
    facts, device = profile.facts, torch.device(profile.device).type
    if facts.by_fastamp:
        return {}, "fastamp makes the step already"
    if facts.sparse:
        return {}, "the step: its gradients are sparse, so torch makes it, and nothing is promised"
    here = device == "cpu" or (device == "cuda" and torch.cuda.is_available())
    all_sizes = facts.sizes or ()
    fits = here and 0 < sum(count for _, count in all_sizes) <= MOST_PARAMETERS
    if "step" not in profile.parts or not fits or facts.optimizer not in KINDS:
        return {}, ""
    numel = sum(size * count for size, count in all_sizes)
    cut = max(1, -(-numel // MOST_NUMEL))  # parameters that are too large are shortened
    sizes = [max(size // cut, 1) for size, count in all_sizes for _ in range(count)]

    def make() -> Case:
        sides = _make_sides(facts, sizes, device, seed)
        return Case(
            arms={arm: s.fastamp if arm == "fastamp" else s.torch for arm, s in sides.items()},
            before=lambda arm: sides[arm].restore(),
            calls=1 if sum(sizes) > SMALL else CALLS,
        )

    race = run_race(make, PLAN, device=device, seed=seed)
    if find_noise({"the step": race}):
        return {}, find_noise({"the step": race})
    times_s = {arm: race.time_s(arm).scaled(lambda value: value * cut) for arm in race.arms}
    step_s = profile.parts["step"]
    if times_s["torch"].value > LIKE * step_s.value:
        theirs, own = (each.text(".3f", " ms", 1e3) for each in (times_s["torch"], step_s))
        note = f"the step: torch's takes {theirs} raced on parameters like the loop's, whose own "
        note += f"takes {own}; that is another work, as with sparse gradients: nothing is promised"
        return dict.fromkeys(("fused", "step"), Interval.exact(1.0)), note
    gains = {}
    for part, arm in {"fused": "torch, fused", "step": "fastamp"}.items():
        ratio = race.ratio(arm)
        # At most the file's own time over the raced one: its script may not clip at all.
        limited = Interval(
            value=min(ratio.value, step_s.value / times_s[arm].value),
            low=min(ratio.low, step_s.low / times_s[arm].high),
            high=min(ratio.high, step_s.high / times_s[arm].low),
        )
        gains[part] = profile.gain(limited, "step")
    times = ", ".join(f"{arm} {time_s.text('.3f', ' ms', 1e3)}" for arm, time_s in times_s.items())
    shortened = f", with 1/{cut} of their elements" if cut > 1 else ""
    return gains, f"clip and step of such parameters, raced here{shortened}: {times}"


def _make_sides(facts: Facts, sizes: list[int], device: str, seed: int) -> dict[str, Side]:
    """Return torch's step as it is, fused, and fastamp's, each checked against plain arithmetic."""
    drawn, norm = draw_grads([(size,) for size in sizes], device, seed)
    name, sides = KINDS[facts.optimizer or ""], {}
    make = SGD if name == "sgd" else torch.optim.AdamW
    for arm in ("torch", "torch, fused", "fastamp"):
        optimizer = partial(make, fused=arm == "torch, fused" or facts.fused or None)
        work = WORK[name]._replace(optimizer=optimizer, scaler=facts.scaler not in {None, "none"})
        side = Side(work, drawn)
        side.check(side.fastamp if arm == "fastamp" else side.torch, norm, rtol=STOCK_RTOL)
        sides[arm] = side
    return sides
