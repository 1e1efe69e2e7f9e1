"""Where the time of a step goes, arm by arm, by fastamp's own timer."""

import math
import warnings
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch

import fastamp
from fastamp.bench.advice import Profile
from fastamp.bench.arms import Run
from fastamp.bench.facts import describe
from fastamp.bench.race import Interval, Race, bootstrap

BLOCKS = 6  # of every arm, in turn
BLOCK_S = 0.1
MOST_STEPS = 100  # of a block
REGIONS = ("data", "forward", "backward", "step")


def profile_runs(
    runs: dict[str, Run], batches: Iterator[Any], loader: Any, race: Race
) -> dict[str, Profile]:
    """Train every arm for some more steps; the time to draw their batches counts, too."""
    blocks: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    steps = {name: _block_steps(race.quartiles_s(name)[1]) for name in runs}
    for place in range(BLOCKS):
        for name in runs if place % 2 else reversed(runs):
            blocks[name].append(_time_steps(runs[name], batches, steps[name]))
    return {
        name: Profile(
            device=run.device,
            steps=BLOCKS * steps[name],
            parts={p: _typical([block[p] for block in blocks[name]]) for p in blocks[name][0]},
            facts=describe(run.optimizer, loader, run.scaler, run.arm.dtype),
            syncs=_count_syncs(run, batches),
        )
        for name, run in runs.items()
    }


def _block_steps(step_s: float) -> int:
    return max(1, min(int(BLOCK_S / step_s), MOST_STEPS)) if step_s > 0 else 1


def _typical(times_s: list[float]) -> Interval:
    """Return the median of times, with an interval that holds no time below 0."""
    return bootstrap([math.log(max(each, 1e-9)) for each in times_s]).scaled(math.exp)


def _time_steps(run: Run, batches: Iterator[Any], steps: int) -> dict[str, float]:
    """Return the seconds of each part of a step; the rest is "waits" on a GPU, else "other"."""
    timer = fastamp.Timer(run.device)
    start_s = perf_counter()
    for _ in range(steps):
        with timer("data"):
            batch = next(batches)
        run.train_step(batch, timer)
    regions = timer.summary()  # waits for the device
    elapsed_s = perf_counter() - start_s
    parts = {name: regions[name].total / steps for name in REGIONS if name in regions}
    rest = "waits" if run.device == "cuda" else "other"
    return parts | {rest: max(elapsed_s / steps - sum(parts.values()), 0.0)}


def _count_syncs(run: Run, batches: Iterator[Any]) -> int:
    """Count how often the host waits for the device in a step: never on a CPU."""
    if run.device != "cuda":
        return 0
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")  # warns itself that it is a prototype
        try:
            run.train_step(next(batches))
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
