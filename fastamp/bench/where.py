"""Where the time of a step goes, arm by arm, by fastamp's own timer.

All figures are medians over blocks of steps, as the race's are over visits. A block gives each part
its share of the block's time without that to draw batches, and what no region has to the rest:
"waits" on a GPU, else "other". The median shares, over their sum, divide the race's median step: so
these parts add up to the step that the table shows. "data" is drawn off the race's clock and comes
on top: the median of the blocks' seconds a step.
"""

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch

import fastamp
from fastamp.bench.advice import Profile
from fastamp.bench.facts import describe
from fastamp.bench.race import Interval, Race, estimate, exp
from fastamp.bench.trainer import Trainer

BLOCKS = 6  # of every arm, in turn
REGIONS = ("forward", "backward", "step")


def profile_trainers(
    trainers: dict[str, Trainer],
    batches: Iterator[Any],
    loader: Any,
    race: Race,
    steps: int,
    *,
    is_data_timed: bool = False,
) -> dict[str, Profile]:
    """Train every arm for some more blocks of so many steps; their batches are timed, too.

    The race's steps are without the wait for them, unless its data were timed.
    """
    blocks: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
    for place in range(BLOCKS):
        for name in trainers if place % 2 else reversed(trainers):
            blocks[name].append(_time_block(trainers[name], batches, steps))
    steps_s = {name: race.quartiles_s(name)[1] for name in trainers}
    if is_data_timed:
        for name, found in blocks.items():
            steps_s[name] = max(steps_s[name] - median(block["data"] for block in found), 1e-9)
    return {
        name: Profile(
            device=trainer.device,
            steps=BLOCKS * steps,
            parts=split_step(blocks[name], steps_s[name], trainer.device),
            facts=describe(trainer.optimizers, loader, trainer.scaler, trainer.dtype),
            syncs=_count_syncs(trainer, batches),
        )
        for name, trainer in trainers.items()
    }


def split_step(blocks: list[dict[str, float]], step_s: float, device: str) -> dict[str, Interval]:
    """Return the parts of a median step of `step_s`, from each block's shares of "all" its time."""
    rest = "waits" if device == "cuda" else "other"
    shares: dict[str, list[float]] = {part: [] for part in (*REGIONS, rest)}
    for block in blocks:
        found = {part: block[part] / block["all"] for part in REGIONS}
        for part, share in (found | {rest: 1 - math.fsum(found.values())}).items():
            shares[part].append(share)
    medians = {part: _typical(values) for part, values in shares.items()}
    factor = step_s / math.fsum(share.value for share in medians.values())
    parts = {part: share.scaled(lambda value: value * factor) for part, share in medians.items()}
    return {"data": _typical([block["data"] for block in blocks])} | parts


def _typical(values: list[float]) -> Interval:
    """Return the median with the interval of the logarithms."""
    logs = [math.log(max(value, 1e-9)) for value in values]
    return estimate(logs, middle=median).scaled(exp)


def scale(profile: Profile, factor: float) -> Profile:
    """Return a profile whose step takes `factor` times as long; the wait for data is no part."""
    parts = {
        part: each if part == "data" else each.scaled(lambda value: value * factor)
        for part, each in profile.parts.items()
    }
    return replace(profile, parts=parts)


def _time_block(trainer: Trainer, batches: Iterator[Any], steps: int) -> dict[str, float]:
    """Return the seconds a step of "data", of each region, and of "all" but the data."""
    timer = fastamp.Timer(trainer.device)

    def drawn() -> Iterator[Any]:
        for _ in range(steps):
            with timer("data"):
                batch = next(batches)
            yield batch

    start_s = perf_counter()
    trainer.train(drawn(), timer)
    regions = timer.summary()  # waits for the device
    elapsed_s = perf_counter() - start_s
    found = {name: regions[name].total / steps for name in ("data", *REGIONS)}
    return found | {"all": max(elapsed_s / steps - found["data"], 1e-9)}


def _count_syncs(trainer: Trainer, batches: Iterator[Any]) -> int:
    """Count how often the host waits for the device in a step: never on a CPU."""
    if trainer.device != "cuda":
        return 0
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # warns itself that it is a prototype
        try:
            trainer.train([next(batches)])
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return sum("synchronizing CUDA operation" in str(each.message) for each in seen)


def show_profiles(profiles: dict[str, Profile]) -> list[str]:
    """Return where the time of a step goes, a line for each arm."""
    lines = []
    for arm, profile in profiles.items():
        parts = (
            f"{part} {figure.value * 1e3:.3g} ms ({profile.share(part):.0%})"
            for part, figure in profile.parts.items()
        )
        syncs = f"; the host waits for the device {profile.syncs} times"
        syncs = "" if profile.device == "cpu" else syncs
        lines.append(f"where a step's time goes, {arm}: {', '.join(parts)}{syncs}")
    return lines
