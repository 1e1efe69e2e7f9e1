"""Other people's AdamW against torch's default one and fastamp's: compiled, and DeepSpeed's.

`python benchmarks/step_peers.py --shapes gpt2`: unscale, clip and step, as `adamw-open` of `bench
step`. torch.compile takes about a second for each tensor, which is not timed. DeepSpeedCPUAdam
needs `pip install deepspeed`, g++ and ninja. bitsandbytes and apex need a GPU, and are not raced.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import AdamW, Optimizer

from fastamp.bench.options import DEFAULT, number
from fastamp.bench.race import run_race, show
from fastamp.bench.rows import WORK, Shapes, parse_shapes
from fastamp.bench.step import PLAN, STOCK_RTOL, Side, count_calls, draw_grads
from fastamp.timer.timer import align

if TYPE_CHECKING:
    from collections.abc import Sequence


def compiled(groups: list[dict[str, Any]], lr: float) -> Optimizer:
    """Return torch's AdamW with a compiled step."""
    torch.compiler.reset()  # torch keeps only a few compilations of one function
    optimizer = AdamW(groups, lr=lr)
    optimizer.step = torch.compile(optimizer.step)
    return optimizer


def deepspeed(groups: list[dict[str, Any]], lr: float) -> Optimizer:
    """Return DeepSpeed's AdamW for CPUs."""
    with redirect_stdout(sys.stderr):  # it logs to stdout
        adam = importlib.import_module("deepspeed.ops.adam")
        optimizer: Optimizer = adam.DeepSpeedCPUAdam(groups, lr=lr, weight_decay=0.01)
    return optimizer


PEERS = {"torch.compile": compiled, "DeepSpeedCPUAdam": deepspeed}


def race(shape: Shapes, rounds: int) -> dict[str, str]:
    """Check each arm against plain float64 arithmetic, and race them; return a row."""
    grads, norm = draw_grads(shape.sizes, "cpu", seed=0, dtype=shape.dtype)
    work = WORK["adamw-open"]
    makers: dict[str, Any] = {"torch": work.optimizer, **PEERS, "fastamp": work.optimizer}
    if importlib.util.find_spec("deepspeed") is None:
        del makers["DeepSpeedCPUAdam"]
    make = partial(Side, drawn=grads, grouped=shape.grouped)
    sides = {arm: make(work._replace(optimizer=maker)) for arm, maker in makers.items()}
    arms = {arm: side.fastamp if arm == "fastamp" else side.torch for arm, side in sides.items()}
    for arm, side in sides.items():
        side.check(arms[arm], norm, rtol=STOCK_RTOL)
    found = run_race(
        arms,
        replace(PLAN, rounds=rounds),
        calls=count_calls(shape),
        before=lambda arm: sides[arm].restore(),
    )
    times_ms = {f"{arm} ms": show(1e3 * found.quartiles_s(arm)[1], ".3f") for arm in arms}
    ratios = {f"{arm} [95 %]": found.ratio(arm).text(".2f", "x") for arm in found.arms[1:]}
    return {"gradients": shape.text} | times_ms | ratios


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row for each shape: times, and how many times as fast as torch's each arm is."""
    parser = argparse.ArgumentParser(description=__doc__)
    shapes = f"as of `bench step` {DEFAULT}"
    parser.add_argument("--shapes", type=parse_shapes, default="gpt2", help=shapes)
    parser.add_argument("--rounds", type=number(int, 8), default=PLAN.rounds, help="at most")
    args = parser.parse_args(argv)
    rows = [race(shape, args.rounds) for shape in args.shapes.values()]
    print("\n".join(align([[*rows[0]], *([*row.values()] for row in rows)])))


if __name__ == "__main__":
    main()
