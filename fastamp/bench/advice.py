"""What would make a training step faster, and by how much at most, from where its time goes.

A gain is how many times as fast the whole step becomes, as an interval. What a race has measured
(`gains`) is given as it is. Otherwise a part of the step can at most vanish: in a step of t seconds
a part of p seconds then gains from 1 to t / (t - p), and the value, for sorting alone, is the
geometric mean of these ends.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fastamp.bench.environment import count_cores, no_speed_reason
from fastamp.bench.facts import Facts
from fastamp.bench.race import Interval
from fastamp.timer import RegionStats
from fastamp.timer.timer import middles_ns

NAMED = ("data", "forward", "backward", "step", "waits")  # what a region is called, of a step
BETWEEN = "outside of regions"
PARTS = (*NAMED, "other", BETWEEN)
# Regions that are no part of a step, like all that lies inside them.
APART = {"eval", "evaluate", "val", "validate", "validation", "test", "checkpoint"}
LEAST_GAIN = 1.02  # smaller gains are left out
RACED = "raced on this job"
NATIVE = {"Adam", "AdamW", "SGD"}  # torch's optimizers that fastamp updates itself
VANISHES = Interval(value=math.nan, low=1.0, high=math.inf)  # how many times as fast a part gets


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where the time of a step goes, in seconds a step, by part."""

    device: str
    steps: int
    parts: Mapping[str, Interval]  # "waits": host and device for each other
    facts: Facts = field(default_factory=Facts)
    syncs: float | None = None  # the host's waits for the device, per step; None: not counted

    def time_s(self, *parts: str) -> Interval:
        """Return the time of some parts together."""
        found = [self.parts[part] for part in parts if part in self.parts]
        ends = ("low", "value", "high")
        return Interval(**{end: math.fsum(getattr(each, end) for each in found) for end in ends})

    def share(self, *parts: str) -> float:
        """Return the share of a step that some of its parts take."""
        total_s = self.time_s(*self.parts).value
        return self.time_s(*parts).value / total_s if total_s else 0.0

    def limit(self, *parts: str) -> float:
        """Return how many times as fast a step were if some parts took no time (Amdahl)."""
        total_s, part_s = self.time_s(*self.parts).value, self.time_s(*parts)
        left_s = total_s - min(max(part_s.value, part_s.high), total_s)
        return total_s / left_s if left_s > 0 else math.inf

    def gain(self, ratio: Interval, *parts: str) -> Interval:
        """Return how many times as fast a step becomes if parts become `ratio` times as fast."""
        part_s, total_s = self.time_s(*parts), self.time_s(*self.parts).value
        rest_s = total_s - part_s.value

        def whole(time_s: float, r: float) -> float:
            left_s = rest_s + (time_s / r if r > 0 else math.inf)
            return (rest_s + time_s) / left_s if left_s > 0 else math.inf

        # Few visits have ends below 0 or beyond the step.
        ends_s = [min(max(end, 0.0), total_s) for end in (part_s.low, part_s.high)]
        found = [whole(end_s, r) for end_s in ends_s for r in (ratio.low, ratio.high)]
        low, high = min(found), min(max(found), whole(part_s.value, math.inf))
        known = math.isfinite(ratio.value)
        value = whole(part_s.value, ratio.value) if known else math.sqrt(low * high)
        return Interval(value=value, low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One change: its kind, what to write, how many times as fast a step becomes, and why."""

    part: str  # "fused", "step", "loader", "resident", "precision", "waits" or "nothing"
    what: str
    gain: Interval
    why: str

    def text(self) -> str:
        """Return the advice in a line."""
        if self.part == "nothing":
            return f"{self.what}: {self.why}"
        low, high = (f"{end:.2f}x" for end in (self.gain.low, self.gain.high))
        said = f"{low} to {high}" if low != high else low
        if self.gain.low <= 1:  # a limit: nothing has raced it
            said = "1.00x or more" if math.isinf(self.gain.high) else f"at most {high}"
        return f"{self.what}: {said} as fast; {self.why}"


def read_profile(
    regions: Mapping[str, RegionStats],
    device: str,
    facts: Facts | None = None,
    elapsed_s: float = 0.0,
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
    return Profile(device=device, steps=steps, parts=parts, facts=facts or Facts())


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


def advise(
    profile: Profile, gains: Mapping[str, Interval] | None = None, raced: str = RACED
) -> list[Advice]:
    """Return what would help, best first; one advice, "nothing", where nothing does.

    Args:
        profile: where the time goes.
        gains: what a race has measured, by `Advice.part`.
        raced: why these gains are certain.
    """
    gains = gains or {}
    found = [
        replace(each, gain=gains[each.part], why=raced) if each.part in gains else each
        for each in (
            *_about_data(profile),
            *_about_step(profile, raced="fused" in gains),
            *_about_precision(profile, raced="precision" in gains),
            *_about_waits(profile),
        )
    ]
    helpful = [
        each
        for each in found
        if each.gain.value >= LEAST_GAIN and (each.part not in gains or each.gain.low > 1)
    ]
    if helpful:
        return sorted(helpful, key=lambda each: -each.gain.value)
    share = profile.share("forward", "backward")
    why = f"the model's own forward and backward pass take {share:.0%} of a step"
    return [Advice(part="nothing", what="nothing", gain=Interval.exact(1.0), why=why)]


def _about_data(profile: Profile) -> Iterator[Advice]:
    facts, share, path = profile.facts, profile.share("data"), profile.facts.path or ""
    on_gpu, gathered = profile.device.startswith("cuda"), path.startswith("gathered")
    why = f"the loop waits for data in {share:.0%} of its time, and no more can be saved"
    gain = profile.gain(VANISHES, "data")
    what = f"num_workers={count_cores()}"
    what += "" if facts.iterable else " (try worker='thread', too)"
    if not facts.iterable and "collate_fn" not in path:  # arrays, which need no workers
        arrays = "fastamp.in_memory(dataset) or another ArrayDataset, "
        what = f"{arrays}if its items never change and fit in memory; else {what}"
    if gathered and facts.loader == "fastamp.DataLoader":
        what = "larger batches, or a smaller dtype in the dataset: they are copied at memory speed"
    elif gathered:
        what = f"fastamp.DataLoader, which gathers the {facts.dataset} in compiled code"
    elif facts.loader == "fastamp.DataLoader":
        why += f"; batches are made {path}"
    else:
        what = f"fastamp.DataLoader, with {what}"
    yield Advice(part="loader", what=what, gain=gain, why=why)
    if on_gpu and gathered and not path.startswith("gathered on "):
        what = "a dataset of tensors on the GPU, if it fits there: batches are gathered on it"
        yield Advice(part="resident", what=what, gain=gain, why=why)


def _about_step(profile: Profile, *, raced: bool) -> Iterator[Advice]:
    """Advise fastamp's step; torch's fused one beside it only if that is `raced`."""
    facts, gain = profile.facts, profile.gain(VANISHES, "step")
    kinds = facts.optimizer.split(" and ") if facts.optimizer else []
    if facts.by_fastamp or facts.sparse or not {*kinds} <= NATIVE:
        return  # the loop has it, or torch's own step stays, so nothing is promised
    why = f"clip and step take {profile.share('step'):.0%} of a step"
    if facts.fused is False and raced:
        what = f"fused=True for {facts.optimizer}"
        yield Advice(part="fused", what=what, gain=gain, why=why)
    what = "scaler.step(optimizer, max_norm=...) of fastamp.GradScaler"
    if facts.scaler in {None, "none"}:
        what = "fastamp.optimizer_step(optimizer, max_norm=..., zero_grad=True)"
        what += ", unless the loop has it" * (facts.by_fastamp is None)
    yield Advice(part="step", what=what, gain=gain, why=why)


def _about_precision(profile: Profile, *, raced: bool) -> Iterator[Advice]:
    """Advise for or against low precision; `raced` is that of the file against FP32."""
    device, dtype = profile.device.partition(":")[0], profile.facts.dtype
    reason = no_speed_reason(device, "fp16" if dtype == "float16" else "bf16")
    gain = profile.gain(VANISHES, "forward", "backward")
    share = profile.share("forward", "backward")
    why = f"the model's forward and backward pass take {share:.0%} of a step"
    if dtype in {"bfloat16", "float16"}:
        if reason is not None or raced:
            what = "train in FP32 here: leave out torch.autocast"
            yield Advice(part="precision", what=what, gain=gain, why=f"{reason}, and {why}")
    elif reason is None and dtype in {None, "float32"} and not raced:
        what = f"torch.autocast({device!r}, dtype=torch.bfloat16)"
        what += ", if it trains in FP32" * (dtype is None)
        why += ", and no more can be saved: `python -m fastamp.bench --task` measures your model"
        yield Advice(part="precision", what=what, gain=gain, why=why)


def _about_waits(profile: Profile) -> Iterator[Advice]:
    share = profile.share("waits")
    counted = "" if profile.syncs is None else f", {profile.syncs:.3g} times a step"
    why = f"host and device wait for each other in {share:.0%} of a step{counted}"
    what = "no .item() or .cpu() in the loop: fastamp.MetricsTracker reads values later"
    if profile.syncs == 0:  # then it is the device that waits
        why = f"the device does nothing in {share:.0%} of a step"
        what = "torch.compile, or larger batches: the host launches too many short kernels"
    yield Advice(part="waits", what=what, gain=profile.gain(VANISHES, "waits"), why=why)
