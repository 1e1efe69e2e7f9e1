"""A clock that only the arms of a race move: the test decides how long each visit takes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from fastamp.bench import race

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


class FakeClock:
    """A clock that only `spend` moves."""

    def __init__(self, patch: pytest.MonkeyPatch, noise: float = 0.0, seed: int = 0) -> None:
        self.now_s = 0.0
        self.noise = noise
        self.rng = np.random.default_rng(seed)
        patch.setattr(race, "perf_counter", lambda: self.now_s)

    def spend(self, elapsed_s: float) -> None:
        """Let time pass, with random noise."""
        self.now_s += elapsed_s * math.exp(self.noise * self.rng.normal())

    def time(self, call: Callable[[], object]) -> float:
        """Return how long a call took."""
        start_s = self.now_s
        call()
        return self.now_s - start_s
