"""Where the time of a user's step goes, from the regions of a timer's summary."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fastamp.bench.race import Interval
from fastamp.timer import RegionStats
from fastamp.timer.timer import middles_ns

NAMED = ("data", "forward", "backward", "step", "waits")  # what a region is called, of a step
BETWEEN = "outside of regions"
PARTS = (*NAMED, "other", BETWEEN)
# Regions that are no part of a step, like all that lies inside them.
APART = {"eval", "evaluate", "val", "validate", "validation", "test", "checkpoint"}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where the time of a step goes, in seconds a step, by part."""

    device: str
    steps: int
    parts: Mapping[str, Interval]

    def share(self, part: str) -> float:
        """Return the share of a step that a part takes."""
        total_s = math.fsum(each.value for each in self.parts.values())
        return self.parts[part].value / total_s if total_s else 0.0


def read_profile(
    regions: Mapping[str, RegionStats], device: str, elapsed_s: float = 0.0
) -> Profile:
    """Sort the regions of a `Timer.summary()`, and the time between them, into a step's parts.

    A region is the part that it is called, and any other belongs to the region around it. Its time
    excludes the regions inside it. Without a forward or backward pass "step" may be the whole step,
    and counts as "other". Evaluation and checkpoints are left out, and so is the longest visit of
    each region, which is mostly the first. What no region has of `elapsed_s`, the time of all
    steps, is the part BETWEEN.

    Raises:
        ValueError: no region is called as a part of a step.
    """
    kinds = {path: _part_of(path) for path in regions}
    named = {p: kind for p, kind in kinds.items() if kind and p.rpartition("/")[2] in NAMED}
    if not named:
        msg = f"no region is named after a part of a step: {', '.join(map(repr, NAMED))}"
        raise ValueError(msg)
    counts = {path: s.count + s.dropped + s.captured for path, s in regions.items()}
    steps = max(counts[p] for p in [p for p in named if named[p] == "step"] or named)
    times_s = {path: _ends_s(stats) * counts[path] / steps for path, stats in regions.items()}
    own_s = times_s.copy()
    for path in regions:
        around = path.rpartition("/")[0]
        if around in own_s:
            own_s[around] = own_s[around] - times_s[path][::-1]
    is_whole = not {"forward", "backward"} & {*named.values()}
    sums_s = {part: np.zeros(3) for part in PARTS}
    for path, kind in kinds.items():
        if kind:
            sums_s["other" if is_whole and kind == "step" else kind] += own_s[path].clip(0.0)
    outermost = [path for path in regions if path.rpartition("/")[0] not in regions]
    totals_s = [regions[p].total * counts[p] / max(regions[p].count, 1) for p in outermost]
    sums_s[BETWEEN] += max(elapsed_s - math.fsum(totals_s), 0.0) / steps
    ends = {part: map(float, sum_s) for part, sum_s in sums_s.items() if sum_s[2] > 0}
    parts = {
        part: Interval(low=low, value=value, high=high) for part, (low, value, high) in ends.items()
    }
    return Profile(device=device, steps=steps, parts=parts)


def _part_of(path: str) -> str:
    """Return the part that a region belongs to; "" outside of a step."""
    names = path.split("/")
    if APART & {*names}:
        return ""
    return next((name for name in reversed(names) if name in NAMED), "other")


def _ends_s(stats: RegionStats) -> NDArray[np.float64]:
    """Return the mean visit without the longest one, between the ends of its interval."""
    if stats.count < 2:
        return np.full(3, stats.total / max(stats.count, 1))
    n = stats.count - 1
    mean_s = (stats.total - stats.max) / n
    buckets, hits = np.array(stats.histogram).T
    hits[-1] -= 1
    squares = float(hits @ (middles_ns(buckets) / 1e9 - mean_s) ** 2)
    half_s = min(1.96 * math.sqrt(squares) / n, mean_s)
    return mean_s + half_s * np.array([-1.0, 0.0, 1.0])
