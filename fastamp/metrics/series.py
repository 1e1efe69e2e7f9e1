"""One scalar's history: statistics of every value, and an even sample that stays bounded."""

import math
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self


@dataclass(frozen=True)
class ScalarStats:
    """Statistics of all values of one scalar.

    Mean, min and max are of the finite values (an overflow has norm inf), NaN if there is none.

    Example:
        >>> tracker = fastamp.MetricsTracker()
        >>> for step in range(2):
        ...     tracker.log_scalar("train/loss", 2.0 - step, step)
        >>> tracker.summary()["train/loss"]
        ScalarStats(count=2, mean=1.5, min=1.0, max=2.0, last=1.0)
    """

    count: int
    mean: float
    min: float
    max: float
    last: float


class Series:
    """The values of one scalar: every `stride`-th one, and the statistics of all.

    When the sample is full, every second value is dropped and the stride doubles.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._steps, self._values, self._stride = array("q"), array("d"), 1
        self._count, self.last = 0, (0, math.nan)  # the last step and its value
        self._n_finite, self._sum, self._min, self._max = 0, 0.0, math.nan, math.nan

    def extend(self, steps: list[int], values: list[float]) -> None:
        """Add at least one value, in logging order."""
        start = -self._count % self._stride
        self._steps.extend(steps[start :: self._stride])
        self._values.extend(values[start :: self._stride])
        self._count += len(values)
        self.last = (steps[-1], values[-1])
        while len(self._steps) + self._is_last_apart() > self._capacity:
            del self._steps[1::2], self._values[1::2]
            self._stride *= 2
        new = np.array(values)
        finite = new[np.isfinite(new)]
        self._n_finite += len(finite)
        self._sum += float(finite.sum())
        self._min = float(np.fmin.reduce(finite, initial=self._min))
        self._max = float(np.fmax.reduce(finite, initial=self._max))

    def history(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the steps and values of the first, the last and an even sample in between."""
        steps, values = np.array(self._steps, np.int64), np.array(self._values, np.float64)
        if self._is_last_apart():
            return np.append(steps, self.last[0]), np.append(values, self.last[1])
        return steps, values

    def stats(self) -> ScalarStats:
        """Return the statistics of every value so far."""
        mean = self._sum / self._n_finite if self._n_finite else math.nan
        return ScalarStats(self._count, mean, self._min, self._max, self.last[1])

    def state_dict(self) -> dict[str, Any]:
        """Return the state in numbers and lists of them."""
        lists = {"_steps": [*self._steps], "_values": [*self._values], "last": [*self.last]}
        return vars(self) | lists

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Self:
        """Return the series of a state."""
        made = cls(state["_capacity"])
        arrays = {"_steps": array("q", state["_steps"]), "_values": array("d", state["_values"])}
        vars(made).update(state | arrays)
        return made

    def _is_last_apart(self) -> bool:
        return (self._count - 1) % self._stride > 0
