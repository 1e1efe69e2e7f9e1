"""What would make a training step faster, and by how much at most, from where its time goes.

`read_profile` sorts the regions of a timer into the parts of a step; `advise` says what would help,
best first. A gain is how many times as fast the whole step becomes, as an interval:

- A gain that a race of this very job has measured (`gains`) is given unchanged. The main job races
  all of a step but its data, which it draws off the clock, and adds their time by the rule below.
- A part of p seconds that becomes r times as fast in a step of t seconds gives t / (t - p + p/r).
  `ratios` holds the r of clip and optimizer step, as `bench step` measures it for the same kind of
  optimizer, sizes and groups.
- Where r is unknown, as for waiting, the part can at most vanish: from 1 to t / (t - p). If a
  GPU's loop makes its own batches, they can be made in parallel: the step then takes the longer
  of the two, which gives the lower end.
- The r of precision depends on the model, so its bounds are the same: forward and backward can at
  most vanish, and the advice names the command that measures it.

Where only bounds are known, the value is their geometric mean, used for sorting alone.
"""

import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from fastamp.bench.environment import no_speed_reason
from fastamp.bench.facts import Facts
from fastamp.bench.race import Interval
from fastamp.timer import RegionStats
from fastamp.timer.timer import middles_ns

# The parts of a step, and the words in a region's name that stand for each.
PARTS = {
    "data": {"data", "dataloader", "load", "loader", "loading", "batch", "fetch", "copy", "input"},
    "forward": {"forward", "fwd", "loss", "model"},
    "backward": {"backward", "bwd"},
    "step": {"step", "optimizer", "optim", "opt", "update", "clip", "unscale", "scaler", "zero"},
    "waits": {"wait", "waits", "sync", "synchronize", "item"},
    "other": set(),
}
OUTSIDE = {"eval", "evaluate", "evaluation", "val", "validate", "validation", "test", "checkpoint"}
LEAST_GAIN = 1.02  # smaller gains are left out
RACED = "raced on this job"
NATIVE = {"Adam", "AdamW", "SGD", "Adagrad"}  # torch's optimizers that fastamp updates itself
UNSCALED = "fastamp.optimizer_step(optimizer, max_norm=..., zero_grad=True)"
IN_MEMORY = {"TensorDataset", "ArrayDataset", "TokenDataset", "ndarray", "memmap", "Tensor", "dict"}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Where the time of a step goes, in seconds a step, by part."""

    device: str
    steps: int
    parts: Mapping[str, Interval]  # "waits": host and device for each other
    facts: Facts = field(default_factory=Facts)
    syncs: float | None = None  # the host's waits for the device, per step; None: not counted

    @property
    def total_s(self) -> float:
        """The time of a step."""
        return math.fsum(part.value for part in self.parts.values())

    def share(self, *parts: str) -> float:
        """Return the share of a step that some of its parts take."""
        part_s = math.fsum(self.parts[part].value for part in parts if part in self.parts)
        return part_s / self.total_s if self.total_s else 0.0

    def gain(self, ratio: Interval, *parts: str) -> Interval:
        """Return how many times as fast a step becomes if parts become `ratio` times as fast."""
        p = [self.parts[part] for part in parts if part in self.parts]
        rest_s = self.total_s - math.fsum(each.value for each in p)

        def whole(time_s: float, r: float) -> float:
            left_s = rest_s + (time_s / r if r > 0 else math.inf)
            return (rest_s + time_s) / left_s if left_s > 0 else math.inf

        lows, values, highs = ([getattr(i, end) for i in p] for end in ("low", "value", "high"))
        # Few visits have ends below 0 or beyond the step.
        times_s = [min(max(math.fsum(ends), 0.0), self.total_s) for ends in (lows, highs)]
        found = [whole(*pair) for pair in itertools.product(times_s, (ratio.low, ratio.high))]
        most = self.total_s / rest_s if rest_s > 0 else math.inf  # without these parts
        low, high = min(found), min(max(found), most)
        known = math.isfinite(ratio.value)
        value = whole(math.fsum(values), ratio.value) if known else math.sqrt(low * high)
        return Interval(value=value, low=low, high=high)


VANISHES = Interval(value=math.nan, low=1.0, high=math.inf)  # an unknown r


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
        ends = low if low == high else f"{low} to {high}"
        ends = f"{low} or more" if math.isinf(self.gain.high) else ends
        return f"{self.what}: {ends} as fast; {self.why}"


def read_profile(
    regions: Mapping[str, RegionStats], device: str, facts: Facts | None = None
) -> Profile:
    """Sort the regions of a `Timer.summary()` into the parts of a step.

    A word of PARTS in a region's name tells its part, as in "forward" or "optimizer step"; any
    other region has the part of the region around it. A region's time excludes the regions inside
    it. A "step" that encloses data, a forward or a backward pass is the whole step, and so is one
    without any forward or backward region. Evaluation and checkpoints are left out, and so is the
    longest visit of each region, which is mostly the first.

    Raises:
        ValueError: no region is named after a part of a step.
    """
    kinds = _kinds_of(regions)
    counts = {path: s.count + s.dropped + s.captured for path, s in regions.items()}
    whole = [path for path, kind in kinds.items() if kind == "other" and _word_of(path) == "step"]
    if not whole and not {*kinds.values()} - {"other"}:
        known = ", ".join(repr(part) for part in PARTS if part != "other")
        msg = f"no region is named after a part of a step: {known}"
        raise ValueError(msg)
    taken = [[path for path, kind in kinds.items() if kind == part] for part in PARTS]
    order = (taken[3], whole, *taken)
    steps = max(counts[path] for path in next(filter(None, order)))
    parts = dict.fromkeys(PARTS, Interval.exact(0.0))
    for path, kind in kinds.items():
        time_s = _time_s(regions[path], counts[path] / steps)
        for child in regions:
            if child.rpartition("/")[0] == path:
                time_s = _less(time_s, _time_s(regions[child], counts[child] / steps))
        parts[kind] = _plus(parts[kind], time_s)
    found = {part: time_s for part, time_s in parts.items() if time_s.high > 0}
    return Profile(device=device, steps=steps, parts=found, facts=facts or Facts())


def _word_of(path: str) -> str | None:
    """Return the part in a region's own name; "" outside of a step, None if there is none."""
    words = {*re.split(r"[^a-z]+", path.rpartition("/")[2].lower())}
    if words & OUTSIDE:
        return ""
    return next((part for part, known in PARTS.items() if words & known), None)


def _kinds_of(paths: Iterable[str]) -> dict[str, str]:
    """Return the part of each region that belongs to a step."""
    own = {path: _word_of(path) for path in paths}
    inner = {"forward", "backward"}
    kinds: dict[str, str] = {}
    for path in sorted(own):  # enclosing regions come first
        kind = own[path]
        if kind is None:
            kind = kinds.get(path.rpartition("/")[0], "other")
        inside = {own[other] for other in own if other.startswith(f"{path}/")}
        is_whole = inside & (inner | {"data"}) or not inner & {*own.values()}
        kinds[path] = "other" if kind == "step" and is_whole else kind
        if kinds.get(path.rpartition("/")[0]) == "":
            kinds[path] = ""
    return {path: kind for path, kind in kinds.items() if kind}


def _time_s(stats: RegionStats, visits: float) -> Interval:
    """Return the seconds a step: the mean, without the longest visit, times the visits a step."""
    if stats.count < 2:
        return Interval.exact(stats.total * visits)
    n = stats.count - 1
    mean_s = (stats.total - stats.max) / n
    buckets, hits = np.array(stats.histogram).T
    hits[-1] -= 1
    squares = float(hits @ (middles_ns(buckets) / 1e9 - mean_s) ** 2)
    half_s = min(1.96 * math.sqrt(squares) / n, mean_s)
    ends = (mean_s - half_s, mean_s, mean_s + half_s)
    return Interval(low=ends[0] * visits, value=ends[1] * visits, high=ends[2] * visits)


def _plus(a: Interval, b: Interval) -> Interval:
    return Interval(value=a.value + b.value, low=a.low + b.low, high=a.high + b.high)


def _less(a: Interval, b: Interval) -> Interval:
    ends = (a.low - b.high, a.value - b.value, a.high - b.low)
    low, value, high = (max(end, 0.0) for end in ends)
    return Interval(value=value, low=low, high=high)


def advise(
    profile: Profile,
    *,
    gains: Mapping[str, Interval] | None = None,
    ratios: Mapping[str, Interval] | None = None,
) -> list[Advice]:
    """Return what would help, best first; one advice, "nothing", where nothing does.

    Args:
        profile: where the time goes.
        gains: what a race of this job has measured end to end, by `Advice.part`.
        ratios: how many times as fast the step alone becomes, by "fused" and "step".
    """
    gains = {part: gain for part, gain in (gains or {}).items() if not gain.says_nothing}
    ratios = ratios or {}
    found = [
        each if each.part not in gains else replace(each, gain=gains[each.part], why=RACED)
        for about in (_about_data, _about_step, _about_precision, _about_waits)
        for each in about(profile, {**ratios, **gains})
    ]
    helpful = [each for each in found if each.gain.value >= LEAST_GAIN]
    if helpful:
        return sorted(helpful, key=lambda each: -each.gain.value)
    share = profile.share("forward", "backward")
    why = f"the model's own forward and backward pass take {share:.0%} of a step"
    return [Advice(part="nothing", what="nothing", gain=Interval.exact(1.0), why=why)]


def _about_data(profile: Profile, _: Mapping[str, Interval]) -> Iterator[Advice]:
    facts, share = profile.facts, profile.share("data")
    why = f"the loop waits for data in {share:.0%} of its time, and no more can be saved"
    gain = profile.gain(VANISHES, "data")
    if facts.workers == 0 and profile.device.startswith("cuda"):
        low = 1 / max(share, 1 - share)
        gain = Interval(value=math.sqrt(low * gain.high), low=low, high=gain.high)
        why += "; made in parallel, batches overlap with the rest"
    threads = f"num_workers={os.cpu_count()}, with worker='thread' and without"
    path = facts.path or ""
    if facts.loader in {None, "torch.DataLoader"} and facts.dataset in IN_MEMORY:
        what = f"fastamp.DataLoader, which gathers the {facts.dataset} in compiled code"
    elif path.startswith("gathered"):
        what = "larger batches, or a smaller dtype in the dataset: they are copied at memory speed"
    elif facts.loader == "fastamp.DataLoader":
        what = f"{threads}: batches are made {path or 'item by item'}"
    else:
        what = f"fastamp.DataLoader(..., {threads})"
    yield Advice(part="loader", what=what, gain=gain, why=why)
    fits = facts.dataset in IN_MEMORY or path.startswith("gathered")
    if fits and not path.startswith("gathered on ") and profile.device.startswith("cuda"):
        what = "fastamp.DataLoader(..., device='cuda', resident=True), if the dataset fits there"
        yield Advice(part="resident", what=what, gain=gain, why=why)


def _about_step(profile: Profile, ratios: Mapping[str, Interval]) -> Iterator[Advice]:
    facts, share = profile.facts, profile.share("step")
    if facts.optimizer is not None and not {*facts.optimizer.split(" and ")} <= NATIVE:
        return  # torch's own step of it stays, so nothing is promised
    name = facts.optimizer or "the optimizer"
    by_fastamp = (facts.scaler or "").startswith("fastamp.")
    changes = {}
    if not facts.fused and facts.optimizer in {None, *(() if by_fastamp else NATIVE)}:
        changes["fused"] = f"fused=True for {name}" + ", if it is not" * (facts.fused is None)
    if facts.scaler is None:
        changes["step"] = f"{UNSCALED}, unless the loop has it"
    elif not by_fastamp:
        scaled = "scaler.step(optimizer, max_norm=...) of fastamp.GradScaler"
        changes["step"] = UNSCALED if facts.scaler == "none" else scaled
    for part, what in changes.items():
        ratio = ratios.get(part, VANISHES)
        why = f"clip and step take {share:.0%} of a step"
        if part in ratios:
            why += f", and become {ratio.text('.2f', 'x')} as fast in a race of their kind"
        yield Advice(part=part, what=what, gain=profile.gain(ratio, "step"), why=why)


def _about_precision(profile: Profile, known: Mapping[str, Interval]) -> Iterator[Advice]:
    device, dtype = profile.device.partition(":")[0], profile.facts.dtype
    reason = no_speed_reason(device, "fp16" if dtype == "float16" else "bf16")
    share = profile.share("forward", "backward")
    why = f"the model's forward and backward pass take {share:.0%} of a step"
    raced = "precision" in known  # this precision against FP32
    if reason is None and dtype in {None, "float32"} and not raced:
        gain = profile.gain(VANISHES, "forward", "backward")
        what = f"torch.autocast({device!r}, dtype=torch.bfloat16)" + (
            "" if dtype else ", if it trains in FP32"
        )
        why += ", and no more can be saved: `python -m fastamp.bench --task` measures your model"
        yield Advice(part="precision", what=what, gain=gain, why=why)
    elif (reason is not None or raced) and dtype in {"bfloat16", "float16"}:
        gain = profile.gain(VANISHES, "forward", "backward")
        what = "train in FP32 here: leave out torch.autocast"
        yield Advice(part="precision", what=what, gain=gain, why=f"{reason}, and {why}")


def _about_waits(profile: Profile, _: Mapping[str, Interval]) -> Iterator[Advice]:
    share = profile.share("waits")
    counted = "" if profile.syncs is None else f", {profile.syncs:.3g} times a step"
    why = f"host and device wait for each other in {share:.0%} of a step{counted}"
    what = "no .item() or .cpu() in the loop: fastamp.MetricsTracker reads values later"
    if profile.syncs == 0:  # then it is the device that waits
        why = f"the device does nothing in {share:.0%} of a step"
        what = "torch.compile, or larger batches: the host launches too many short kernels"
    yield Advice(part="waits", what=what, gain=profile.gain(VANISHES, "waits"), why=why)
