"""The core of every comparison: arms timed in mirrored blocks, and the ratios of their times.

A round visits every arm once. A block is a round in random order and a round in the reverse order
(ABBA), so a steady drift of the machine cancels within the block. The bootstrap over the blocks
gives each figure its 95 % interval, and the interval its verdict against a target.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist, median
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch

AGAIN = "again"  # the name of an arm that is the base a second time: the placebo
CONFIDENCE = 0.95
NOISE_CONFIDENCE = 0.99  # of the placebos of a run together: a false alarm costs every verdict
RESAMPLES = 2000
LEAST_BLOCKS = 3  # fewer say nothing of the spread: their interval is infinite
# A placebo within 1 % of 1 voids no verdict: very many blocks show that an arm differs from itself
# by hundredths of a percent, far less than the gains that are judged.
NOISE_MARGIN = 0.01
NOISE_BLOCKS = 8  # fewer say nothing of the noise: on one side of 1 they are no rarity
RUNS = 32  # more blocks than this are drawn in runs: neighbours may resemble each other


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
    def says_nothing(self) -> bool:
        """Say whether a ratio may be anything: too few blocks, or times that vary too much."""
        return not 0 < self.high < 4 * self.low

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


def bootstrap(
    values: list[float], *, mean: bool = False, confidence: float = CONFIDENCE
) -> Interval:
    """Return the median of the values of all blocks, or their mean, with its interval.

    Runs of blocks are drawn with replacement. The ends, percentiles of the results, are moved
    outwards by the ratio of Student's quantile to the normal one and by sqrt(n / (n - 1)): without
    this, five blocks would cover the truth in 80 % of all cases only.
    """
    statistic = np.mean if mean else np.median
    n = len(values)
    if n == 0:
        return Interval(value=math.nan, low=-math.inf, high=math.inf)
    array = np.asarray(values)
    value = float(statistic(array))
    if n < LEAST_BLOCKS:
        return Interval(value=value, low=-math.inf, high=math.inf)
    length = -(-n // RUNS)
    rng = np.random.default_rng(0)
    tail = (1 - confidence) / 2
    found: list[float] = []
    for _ in range(math.ceil((1 - CONFIDENCE) / (1 - confidence) - 1e-9)):
        starts = rng.integers(0, n, (RESAMPLES, -(-n // length), 1))
        drawn = array[((starts + np.arange(length)) % n).reshape(RESAMPLES, -1)[:, :n]]
        found += statistic(drawn, axis=1).tolist()
    low, high = np.quantile(found, [tail, 1 - tail])
    freedom = n // length - 1
    widen = student(tail, freedom) / NormalDist().inv_cdf(1 - tail)
    widen *= math.sqrt((freedom + 1) / freedom)
    return Interval(
        value=value,
        low=value - widen * max(value - float(low), 0.0),
        high=value + widen * max(float(high) - value, 0.0),
    )


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
    """How long to measure; three blocks in any case."""

    rounds: int  # at most, warm-up included
    warmup: int = 4  # rounds, and one more where that leaves whole blocks
    half_width: float = 0.0  # stop when all intervals are as narrow, as a log-ratio; 0: never
    least_blocks: int = 12  # before that
    limit_s: float = math.inf  # after which no block starts


@dataclass(kw_only=True)
class Race:
    """What was measured: the arms, the first of which is the base, and the visits of all rounds."""

    arms: list[str]
    warmup_rounds: int = 0
    rounds: list[dict[str, Visit]] = field(default_factory=list)  # in the order of the visits
    comparisons: int = 1  # whose intervals hold at CONFIDENCE all together (Bonferroni)

    @property
    def timed(self) -> list[dict[str, Visit]]:
        """The rounds after the warm-up."""
        return self.rounds[self.warmup_rounds :]

    def blocks(self, *arms: str) -> list[list[dict[str, Visit]]]:
        """Return the pairs of rounds in which none of these arms left out work."""
        pairs = (self.timed[i : i + 2] for i in range(0, len(self.timed) - 1, 2))
        return [pair for pair in pairs if not any(r[arm].skipped for r in pair for arm in arms)]

    def times_s(self, arm: str) -> list[float]:
        """Return the times of an arm's visits that count."""
        return [round_[arm].elapsed_s for round_ in self.timed if not round_[arm].skipped]

    def quartiles_s(self, arm: str) -> tuple[float, float, float]:
        """Return the quartiles of an arm's times, NaN where no visit counts."""
        low, median, high = np.percentile(self.times_s(arm) or [math.nan], [25, 50, 75]).tolist()
        return low, median, high

    def skipped(self, arm: str) -> int:
        """Count the visits of an arm that left out work."""
        return sum(round_[arm].skipped for round_ in self.rounds)

    def time_s(self, arm: str) -> Interval:
        """Return the typical time of a visit."""
        return typical([[r[arm].elapsed_s for r in block] for block in self.blocks(arm)])

    @property
    def confidence(self) -> float:
        """That of the interval of each ratio."""
        return 1 - (1 - CONFIDENCE) / self.comparisons

    def ratio(self, arm: str, base: str | None = None, confidence: float | None = None) -> Interval:
        """Return how many times as fast as the base an arm is."""
        base, confidence = base or self.arms[0], confidence or self.confidence
        blocks = self.blocks(base, arm)
        ratios = [[r[base].elapsed_s / r[arm].elapsed_s for r in b] for b in blocks]
        return typical(ratios, confidence)

    def placebo(self, confidence: float = CONFIDENCE) -> Interval:
        """Return the ratio of the base to itself: smaller differences cannot be told apart here.

        That is the arm AGAIN where there is one, else the base's two visits in each block.
        """
        if AGAIN in self.arms:
            return self.ratio(AGAIN, confidence=confidence)
        pairs = [[r[self.arms[0]].elapsed_s for r in block] for block in self.blocks(self.arms[0])]
        # The first over the second, then the second over the first: drift cancels.
        swapped = [[(a / b) ** (-1) ** i] for i, (a, b) in enumerate(pairs)]
        return typical(swapped, confidence)


def typical(blocks: list[list[float]], confidence: float = CONFIDENCE) -> Interval:
    """Return the median over blocks of the geometric means of their values, with its interval."""
    logs = [float(np.mean(np.log(block))) for block in blocks]
    return bootstrap(logs, confidence=confidence).scaled(math.exp)


def find_noise(races: Mapping[str, Race]) -> str:
    """Return why no verdict of these races counts, in words; "" if they count.

    None does if a placebo's interval leaves 1 out, unless it lies within NOISE_MARGIN of 1. Fewer
    than NOISE_BLOCKS blocks cannot tell: by chance they often lie on one side of 1.
    """
    for name, race in races.items():
        if len(race.blocks()) < NOISE_BLOCKS:
            continue
        placebo = race.placebo(1 - (1 - NOISE_CONFIDENCE) / len(races))
        leaves_1_out = placebo.low > 1 or placebo.high < 1
        is_small = placebo.low >= 1 - NOISE_MARGIN and placebo.high <= 1 + NOISE_MARGIN
        if leaves_1_out and not is_small:
            found = f"{race.arms[0]} against itself is {placebo.text('.4f', 'x')} in {name}"
            return f"the machine is too noisy for a verdict: {found}"
    return ""


def run_race(
    arms: Mapping[str, Callable[[], object]],
    plan: Plan,
    *,
    device: str = "cpu",
    seed: int = 0,
    calls: int = 1,
    before: Callable[[str], object] = lambda _: None,
    skipped: Callable[[str], bool] = lambda _: False,
    tick: Callable[[], object] = lambda: None,
) -> Race:
    """Time the arms, the first of which is the base, in random mirrored blocks.

    A visit is `calls` calls, and its time their median. Off the clock, `before` prepares an arm for
    each call, `skipped` says whether the visit left out work, and `tick` follows each round. `seed`
    sets the orders.
    """
    race = Race(arms=list(arms))
    synchronize = torch.get_device_module(device).synchronize  # returns at once on a CPU
    for order in _orders(race, plan, np.random.default_rng(seed)):
        visits = {}
        for name in order:
            times_s = []
            for _ in range(calls):
                before(name)
                synchronize()
                start_s = perf_counter()
                arms[name]()
                synchronize()
                times_s.append(perf_counter() - start_s)
            visits[name] = Visit(median(times_s), skipped(name))
        race.rounds.append(visits)
        tick()
    return race


def _orders(race: Race, plan: Plan, rng: np.random.Generator) -> Iterator[list[str]]:
    """Yield the order of each round: the warm-up's, then a random one and its reverse in turn."""
    end_s = perf_counter() + plan.limit_s
    race.warmup_rounds = plan.warmup + (plan.rounds - plan.warmup) % 2
    for _ in range(race.warmup_rounds):
        yield rng.permutation(race.arms).tolist()
    look_at, blocks = plan.least_blocks, 0
    while len(race.rounds) + 2 <= plan.rounds and (blocks < LEAST_BLOCKS or perf_counter() < end_s):
        order = rng.permutation(race.arms).tolist()
        yield order
        yield order[::-1]
        blocks += 1
        # Few looks, at the width and not at the figure: stopping early does not bias the figure.
        if plan.half_width and blocks >= look_at:
            look_at = blocks * 3 // 2
            ratios = [race.ratio(arm) for arm in race.arms[1:]]
            if all(r.low > 0 and math.log(r.high / r.low) / 2 <= plan.half_width for r in ratios):
                return
