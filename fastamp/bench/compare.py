"""The core of every comparison: arms in mirrored blocks, and what their ratios are worth.

A round visits every arm once. A block is a round in random order and a round in the reverse order
(ABBA), so a steady drift of the machine cancels within the block. The value of a block is its mean
log-ratio, the figure of a comparison is the median over the blocks, and its interval comes from a
block bootstrap, widened as Student's t is for few blocks.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

AGAIN = "again"  # the name of an arm that is the base once more
AGREEMENT = 0.05  # two windows of warm-up agree when no arm's time differs by more
CONFIDENCE = 0.95
RESAMPLES = 2000
LEAST_BLOCKS = 3  # fewer have no spread to speak of, and an interval without ends
RUNS = 32  # more blocks than these are drawn in runs of neighbours, which may resemble each other


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A figure and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Interval:
        """Return a figure that was counted, not estimated."""
        return cls(value=value, low=value, high=value)

    def scaled(self, change: Callable[[float], float]) -> Interval:
        """Apply a growing function to the figure and both ends."""
        return Interval(value=change(self.value), low=change(self.low), high=change(self.high))

    def text(self, spec: str, unit: str = "", factor: float = 1) -> str:
        """Return the figure and, where it was estimated, its ends."""
        value, low, high = (show(each * factor, spec) for each in (self.value, self.low, self.high))
        return value + unit + ("" if self.low == self.high else f" [{low}, {high}]")


def show(value: float, spec: str) -> str:
    """Return a number as text; n/a where there is none."""
    return format(value, spec) if math.isfinite(value) else "n/a"


class Visit(NamedTuple):
    """One timed call; `skipped` says that it left out work, so that no ratio may use it."""

    elapsed_s: float
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to measure; three blocks in any case."""

    rounds: int  # at most, warm-up included
    window: int = 1  # rounds; the warm-up ends when two windows agree
    warmup: int = 4  # rounds at most, and one more where that leaves whole blocks
    half_width: float = 0.0  # of all intervals, as a log-ratio, at which to stop; 0 never does
    least_blocks: int = 12  # before that
    limit_s: float = math.inf  # after which no block starts


@dataclass(kw_only=True)
class Race:
    """What was measured: the arms, the first of which is the base, and the visits of all rounds."""

    arms: list[str]
    warmup_rounds: int = 0
    rounds: list[dict[str, Visit]] = field(default_factory=list)  # in the order of the visits

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
        return _typical([[r[arm].elapsed_s for r in block] for block in self.blocks(arm)])

    def ratio(self, arm: str, base: str | None = None) -> Interval:
        """Return how many times as fast as the base an arm is."""
        base = base or self.arms[0]
        blocks = self.blocks(base, arm)
        return _typical([[r[base].elapsed_s / r[arm].elapsed_s for r in b] for b in blocks])

    def placebo(self) -> Interval:
        """Return how the base compares with itself: what this machine cannot tell apart.

        That is the arm AGAIN where there is one, else the base's two visits in each block.
        """
        if AGAIN in self.arms:
            return self.ratio(AGAIN)
        pairs = [[r[self.arms[0]].elapsed_s for r in block] for block in self.blocks(self.arms[0])]
        # Now the first over the second, now the second over the first: drift takes no side.
        return _typical([[(a / b) ** (-1) ** i] for i, (a, b) in enumerate(pairs)])


def _typical(blocks: list[list[float]]) -> Interval:
    logs = [float(np.mean(np.log(block))) for block in blocks]
    return bootstrap(logs).scaled(math.exp)


def bootstrap(values: list[float], *, mean: bool = False) -> Interval:
    """Return the median of the values of all blocks, or their mean, with its 95 % interval.

    Runs of blocks are drawn with replacement. The ends, percentiles of what comes out, are moved
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
    length = max(1, n // RUNS)
    rng = np.random.default_rng(0)
    starts = rng.integers(0, n, (RESAMPLES, -(-n // length), 1))
    drawn = array[((starts + np.arange(length)) % n).reshape(RESAMPLES, -1)[:, :n]]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(statistic(drawn, axis=1), [tail, 1 - tail])
    widen = _student(n // length - 1)
    return Interval(
        value=value,
        low=value - widen * max(value - float(low), 0.0),
        high=value + widen * max(float(high) - value, 0.0),
    )


def _student(freedom: int) -> float:
    """Return how much wider than the normal interval one of so many degrees of freedom has to be.

    The quantile is the expansion of Abramowitz and Stegun, 26.7.5, at the normal one, 1.96.
    """
    quantile = 1.96 + 2.3723 / freedom + 2.8225 / freedom**2 + 2.5555 / freedom**3
    return quantile / 1.96 * math.sqrt((freedom + 1) / freedom)


def verdict_on(found: Interval, low: float = -math.inf, high: float = math.inf) -> str:
    """Judge a figure that is to lie from `low` to `high`: pass, fail or inconclusive.

    It passes when its whole interval lies there, and fails when none of it does.
    """
    if low <= found.low and found.high <= high:
        return "pass"
    return "fail" if found.high < low or high < found.low else "inconclusive"


def measure(
    arms: Mapping[str, Callable[[], object]],
    plan: Plan,
    *,
    device: str = "cpu",
    seed: int = 0,
    before: Callable[[str], object] = lambda _: None,
    skipped: Callable[[str], bool] = lambda _: False,
    tick: Callable[[], object] = lambda: None,
) -> Race:
    """Run the arms, the first of which is the base, in random mirrored blocks.

    Off the clock `before` makes an arm ready for its visit, `skipped` tells whether the visit left
    out work, and `tick` follows each round. `seed` is of the orders.
    """
    race = Race(arms=list(arms))
    rng = np.random.default_rng(seed)
    end_s = time.perf_counter() + plan.limit_s

    def run(order: list[str]) -> None:
        visits = {}
        for name in order:
            before(name)
            visits[name] = Visit(timed(arms[name], device), skipped(name))
        race.rounds.append(visits)
        tick()

    while (race.warmup_rounds < plan.warmup and not _settled(race.rounds, plan.window)) or (
        plan.rounds - race.warmup_rounds
    ) % 2:
        run(rng.permutation(race.arms).tolist())
        race.warmup_rounds += 1
    look_at = plan.least_blocks
    n = 0
    while len(race.rounds) + 2 <= plan.rounds and (n < LEAST_BLOCKS or time.perf_counter() < end_s):
        order = rng.permutation(race.arms).tolist()
        run(order)
        run(order[::-1])
        n += 1
        # Few looks at the width, and none at the figure: stopping does not choose the figure.
        if plan.half_width and n >= look_at:
            look_at = n * 3 // 2
            if all(_is_narrow(race.ratio(arm), plan.half_width) for arm in race.arms[1:]):
                break
    return race


def _is_narrow(ratio: Interval, half_width: float) -> bool:
    return ratio.low > 0 and math.log(ratio.high / ratio.low) <= 2 * half_width


def _settled(rounds: list[dict[str, Visit]], window: int) -> bool:
    """Say whether every arm was as fast in the last window as in the one before."""
    if len(rounds) < 2 * window:
        return False
    times = ([r[arm].elapsed_s for r in rounds[-2 * window :]] for arm in rounds[0])
    medians = ((np.median(t[:window]), np.median(t[window:])) for t in times)
    return all(abs(math.log(before / after)) <= AGREEMENT for before, after in medians)


def timed(call: Callable[[], object], device: str) -> float:
    """Return the seconds of a call; the device has finished before and after it."""
    if device == "cuda":
        torch.cuda.synchronize()
    start_s = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start_s
