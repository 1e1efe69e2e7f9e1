"""What a region of the timer costs, beside two bare reads of the clock and what else is in use.

python benchmarks/timer.py [--rounds N] [--json FILE]

Every round times each arm once, in random order, so that a machine that drifts moves all of them;
what disturbs a round only adds to it, so the quietest one counts. The limit is two calls of
`time.perf_counter_ns()`: no region that is timed from Python costs less.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
import timeit
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from measure import interleaved

import fastamp
from fastamp import _backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIMIT = "two perf_counter_ns()"
CALLS = 2_000


@contextlib.contextmanager
def timed(found: list[int]) -> Iterator[None]:
    """Time a region as one finds it in the wild."""
    start = time.perf_counter_ns()
    try:
        yield
    finally:
        found.append(time.perf_counter_ns() - start)


def loop(statement: str, **names: Any) -> Callable[[], object]:
    """Return a call that runs a statement CALLS times."""
    timer = timeit.Timer(statement, globals=names)
    return lambda: timer.timeit(CALLS)


def region_cost(rounds: int = 200) -> dict[str, float]:
    """Return the nanoseconds of one region in the quietest round, for every way to time it."""
    arms = {
        LIMIT: loop("clock(); clock()", clock=time.perf_counter_ns),
        "contextlib": loop("with timed(found): pass", timed=timed, found=[]),
        "record_function": loop("with rf('x'): pass", rf=torch.profiler.record_function),
    }
    for name in fastamp.backends():
        with _backend.use_only(name):
            timer = fastamp.Timer("cuda" if name == "cuda" else "cpu")
        arms[f"fastamp, {name}"] = loop("with timer('x'): pass", timer=timer)
    timings = interleaved(arms, torch.device("cpu"), rounds=rounds)
    return {name: min(timing.samples_s) / CALLS * 1e9 for name, timing in timings.items()}


def main() -> None:
    """Measure every arm and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cost_ns = region_cost(args.rounds)
    print("| one region | time | of the limit |\n|---|--:|--:|")
    for name, ns in cost_ns.items():
        print(f"| {name} | {ns:,.0f} ns | {ns / cost_ns[LIMIT]:.2f}x |")
    if args.json:
        args.json.write_text(json.dumps(cost_ns, indent=1) + "\n")


if __name__ == "__main__":
    main()
