"""Where the time of a step goes, by fastamp's own timer: the share of each part, and its limit.

The shares are medians over visits: the wait for data, forward, backward, the step, and what no
region has: "waits" on a GPU, else "other". A part can at most vanish: a step is then
1 / (1 - share) times as fast (Amdahl).
"""

import math
from statistics import median
from time import perf_counter
from typing import TypeAlias

import fastamp
from fastamp.bench.trainer import Runner

Shares: TypeAlias = dict[str, float]  # of a step, by part

BLOCKS = 6  # visits of every arm
REGIONS = ("data", "forward", "backward", "step")


def find_shares(runner: Runner, device: str) -> Shares:
    """Train an arm for some more visits; return the share of each part."""
    blocks: list[Shares] = []
    for _ in range(BLOCKS):
        timer = fastamp.Timer(device)
        runner.prepare()
        start_s = perf_counter()
        runner.visit(timer)
        regions = timer.summary()  # waits for the device
        elapsed_s = max(perf_counter() - start_s, 1e-9)
        blocks.append({name: regions[name].total / elapsed_s for name in REGIONS})
    shares = {name: median(block[name] for block in blocks) for name in REGIONS}
    rest = max(1 - math.fsum(shares.values()), 0.0)
    return shares | {"waits" if device == "cuda" else "other": rest}


def limit(shares: Shares, *parts: str) -> float:
    """Return how many times as fast a step were if some parts took no time."""
    left = 1 - math.fsum(shares.get(part, 0.0) for part in parts)
    return 1 / left if left > 0 else math.inf


def show_shares(arm: str, shares: Shares) -> str:
    """Return where the time goes, in a line."""
    parts = ", ".join(f"{part} {share:.0%}" for part, share in shares.items() if share >= 0.005)
    return f"where a step's time goes, {arm}: {parts}"
