"""A figure and its 95 % interval: the bootstrap over blocks, and the verdict against a target."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

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
