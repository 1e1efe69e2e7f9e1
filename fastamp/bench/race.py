"""The core of every comparison: arms that are built anew, and the ratios of their times.

A build makes all arms anew, where it can in a fresh process: where memory happens to lie changes
times by up to 15 %, and stays as it is as long as an arm lives. Within a build the arms are timed
in mirrored blocks: a round in random order, and its reverse (ABBA), so a steady drift cancels. A
build has one ratio; the builds give it its interval, which is Student's.
"""

import gc
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, median, stdev
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch

from fastamp._progress import progress
from fastamp.bench.cores import MOST_WAITING, Cores, Waiting

CONFIDENCE = 0.95
# A race ends when its intervals are narrow, as they sometimes are by chance: they would then hold
# the truth in 93 % of all cases. So Student's interval may use this share of the error alone.
STUDENTS_SHARE = 0.6
LEAST_VALUES = 3  # fewer say nothing of the spread: their interval is infinite
LARGEST_LOG = 709.0  # of a float
EQUAL = 0.02  # an interval within 2 % of 1 is no difference that matters
UNTOLD = "cannot tell"
SAID = ("faster", "slower", "equal", UNTOLD)  # verdicts on a ratio without a target


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A figure and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> "Interval":
        """Return a figure that was counted, not estimated."""
        return cls(value=value, low=value, high=value)

    @property
    def verdict(self) -> str:
        """Say what a ratio of speeds means: one of SAID."""
        if self.low > 1 or self.high < 1:
            return SAID[self.high < 1]
        return SAID[2 if self.low >= 1 / (1 + EQUAL) and self.high <= 1 + EQUAL else 3]

    def scaled(self, change: Callable[[float], float]) -> "Interval":
        """Apply a growing function to the figure and both ends."""
        return Interval(value=change(self.value), low=change(self.low), high=change(self.high))

    def text(self, spec: str, unit: str = "", factor: float = 1) -> str:
        """Return the figure and, where it was estimated, its ends."""
        value, low, high = (show(each * factor, spec) for each in (self.value, self.low, self.high))
        if 0 < self.low < self.high == math.inf:  # as of a time that did not end
            return f"> {low}{unit}"
        return value + unit + ("" if self.low == self.high else f" [{low}, {high}]")


def show(value: float, spec: str) -> str:
    """Return a number as text; n/a for NaN."""
    return format(value, spec) if math.isfinite(value) else "n/a"


def estimate(values: Collection[float], confidence: float = CONFIDENCE) -> Interval:
    """Return the mean of independent values with Student's interval."""
    n = len(values)
    value = fmean(values) if n else math.nan
    if n < LEAST_VALUES or not math.isfinite(value):
        return Interval(value=value, low=-math.inf, high=math.inf)
    half = student((1 - confidence) / 2, n - 1) * stdev(values) / math.sqrt(n)
    return Interval(value=value, low=value - half, high=value + half)


def exp(log: float) -> float:
    """Return e to a power; infinity where that is no float."""
    return math.inf if log >= LARGEST_LOG else math.exp(log)


def student(tail: float, freedom: int) -> float:
    """Return the quantile at 1 - `tail` of Student's t: Abramowitz and Stegun, 26.7.5."""
    z = NormalDist().inv_cdf(1 - tail)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, start=1))


def verdict_on(found: Interval, low: float = -math.inf, high: float = math.inf) -> str:
    """Judge a figure that should lie between `low` and `high`: pass, fail or inconclusive.

    It passes when its whole interval lies there, and fails when none of it does.
    """
    if low <= found.low and found.high <= high:
        return "pass"
    return "fail" if found.high < low or high < found.low else "inconclusive"


class Visit(NamedTuple):
    """The median time of some calls; if they `skipped` work, no ratio uses the visit."""

    elapsed_s: float
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to measure."""

    rounds: int = 4000  # of a build, at most, warm-up included
    warmup: int = 4  # rounds, and one more where that leaves whole blocks
    build_s: float = math.inf  # after which a build starts no block but its first
    # A race ends after one of these numbers of builds, the last or where its intervals are narrow.
    # Few looks, at widths and never at a figure: an early end does not bias the figure.
    builds: tuple[int, ...] = (5, 8, 12)
    half_width: float = 0.02  # of a narrow interval, as a log-ratio
    limit_s: float = math.inf  # of a race, after which no build starts but the first of `builds`


@dataclass(frozen=True, kw_only=True)
class Case:
    """The arms of one build: the first is the base, the last is judged."""

    arms: Mapping[str, Callable[[], object]]
    before: Callable[[str], object] = lambda _: None  # prepares an arm for a call, off the clock
    skipped: Callable[[str], bool] = lambda _: False  # says whether a visit left out work
    calls: int = 1  # in a visit
    amounts: Mapping[str, float] = field(default_factory=dict)  # of a visit, by name of the rate


@dataclass(kw_only=True)
class Build:
    """The timed rounds of a build, each in the order of its visits."""

    arms: list[str]
    rounds: list[dict[str, Visit]]
    warmup: list[dict[str, Visit]] = field(default_factory=list)  # rounds that are not timed
    waiting: Waiting | None = None  # None where the platform does not count it
    amounts: Mapping[str, float] = field(default_factory=dict)  # of a visit, as the case has it

    def middle(self, figure: Callable[[dict[str, Visit]], float], *arms: str) -> list[float]:
        """Return the median over blocks of a figure's mean logarithm; [] without any.

        A block is a pair of rounds, and counts if none of the arms left out work.
        """
        pairs = zip(self.rounds[::2], self.rounds[1::2], strict=False)
        blocks = [pair for pair in pairs if not any(r[arm].skipped for r in pair for arm in arms)]
        logs = [fmean(math.log(figure(r)) for r in pair) for pair in blocks]
        return [median(logs)] if logs else []


@dataclass(kw_only=True)
class Race:
    """What was measured: the arms, the first of which is the base, in every build."""

    arms: list[str]
    builds: list[Build] = field(default_factory=list)

    @property
    def rounds(self) -> list[dict[str, Visit]]:
        """The rounds of all builds."""
        return [round_ for build in self.builds for round_ in build.rounds]

    def times_s(self, arm: str) -> list[float]:
        """Return the times of an arm's visits that count."""
        return [round_[arm].elapsed_s for round_ in self.rounds if not round_[arm].skipped]

    def quartiles_s(self, arm: str) -> list[float]:
        """Return the three quartiles of an arm's times, NaN where no visit counts."""
        times_s = self.times_s(arm) or [math.nan]
        return [float(each) for each in np.percentile(times_s, [25, 50, 75])]

    def time_s(self, arm: str) -> Interval:
        """Return the typical time of a visit."""
        return self._estimate(lambda r: r[arm].elapsed_s, arm)

    def ratio(self, arm: str, base: str | None = None) -> Interval:
        """Return how many times as fast as the base an arm is."""
        base = base or self.arms[0]
        return self._estimate(lambda r: r[base].elapsed_s / r[arm].elapsed_s, base, arm)

    def _estimate(self, figure: Callable[[dict[str, Visit]], float], *arms: str) -> Interval:
        logs = [log for build in self.builds for log in build.middle(figure, *arms)]
        return estimate(logs, 1 - (1 - CONFIDENCE) * STUDENTS_SHARE).scaled(exp)

    def is_narrow(self, half_width: float) -> bool:
        """Say whether the interval of every ratio to the base is as narrow."""
        ratios = [self.ratio(arm) for arm in self.arms[1:]]
        return all(r.low > 0 and math.log(r.high / r.low) <= 2 * half_width for r in ratios)

    def waiting(self) -> float | None:
        """Return the share of their time that threads waited for a core; None if not counted."""
        known = [build.waiting for build in self.builds if build.waiting is not None]
        return Waiting(*map(math.fsum, zip(*known, strict=True))).share if known else None


def find_noise(races: Mapping[str, Race]) -> str:
    """Return why no verdict of these races counts, in words; "" if they count."""
    for name, race in races.items():
        share = race.waiting()
        if share is not None and share > MOST_WAITING:
            found = f"in {name} its threads waited for a core in {share:.0%} of their time"
            return f"this machine is too busy for a verdict: {found}"
    return ""


def run_build(case: Case, plan: Plan, *, device: str = "cpu", seed: int = 0) -> Build:
    """Time the arms of one build in random mirrored blocks, after a warm-up.

    A visit is `calls` calls, and its time their median.
    """
    synchronize = torch.get_device_module(device).synchronize  # returns at once on a CPU
    rng = np.random.default_rng(seed)

    def visit(name: str) -> Visit:
        times_s = []
        for _ in range(case.calls):
            case.before(name)
            synchronize()
            start_s = perf_counter()
            case.arms[name]()
            synchronize()
            times_s.append(perf_counter() - start_s)
        return Visit(median(times_s), case.skipped(name))

    build = Build(arms=[*case.arms], rounds=[], amounts=dict(case.amounts))
    count, end_s = plan.warmup + (plan.rounds - plan.warmup) % 2, perf_counter() + plan.build_s
    while len(build.warmup) < count and (not build.warmup or perf_counter() < end_s):
        build.warmup.append({name: visit(name) for name in rng.permutation(build.arms).tolist()})
    cores, end_s, rounds = Cores(), perf_counter() + plan.build_s, build.rounds
    while len(rounds) + 2 <= plan.rounds - count and (not rounds or perf_counter() < end_s):
        order = rng.permutation(build.arms).tolist()
        rounds += [{name: visit(name) for name in each} for each in (order, order[::-1])]
    build.waiting = cores.waiting()
    return build


def collect(
    build: Callable[[list[str], int], Mapping[str, Build]],
    names: Collection[str],
    plan: Plan,
) -> dict[str, Race]:
    """Build races by name, several times; `build` makes the build of a number for these names."""
    races: dict[str, Race] = {}
    unfinished, end_s = [*names], perf_counter() + plan.limit_s * len(names)
    with progress(plan.builds[-1]) as tick:
        for number in range(1, plan.builds[-1] + 1):
            if not unfinished or (number > plan.builds[0] and perf_counter() > end_s):
                break
            for name, found in build(unfinished, number).items():
                races.setdefault(name, Race(arms=found.arms)).builds.append(found)
            tick()
            if number in plan.builds:
                unfinished = [n for n in unfinished if not races[n].is_narrow(plan.half_width)]
    return races


def run_race(make: Callable[[], Case], plan: Plan, *, device: str = "cpu", seed: int = 0) -> Race:
    """Race arms that `make` builds anew, in this process: for those that no other can make."""

    def build(_: list[str], number: int) -> dict[str, Build]:
        gc.collect()  # the build before
        return {"": run_build(make(), plan, device=device, seed=seed * 1000 + number)}

    return collect(build, [""], plan)[""]
