"""Other people's AdamW against torch's and fastamp's: compiled, DeepSpeed's, and in 8 bits.

`python benchmarks/step_peers.py --shapes gpt2`: unscale, clip and step, as `adamw-open` of
`step_rows.py`. torch.compile takes about a second for each tensor, which is not timed.
DeepSpeedCPUAdam needs `pip install deepspeed`, g++ and ninja. apex needs a GPU, and is not raced.

`--work adamw-8bit --shapes gpt2 2000x64x64`: clip, step and zero_grad of bfloat16 weights, with
8-bit moments, against torch's fused AdamW on float32. `pip install bitsandbytes torchao`: both keep
moments of fewer than 4,096 elements as they are, and nothing of what bfloat16 cuts off the weights.
torchao's step is compiled, with g++, for each shape.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from step_rows import CODES_RTOL, SHAPES, LabRow, Lean, make_row
from torch import Tensor
from torch.optim import AdamW, Optimizer

import fastamp
from fastamp.bench.options import DEFAULT, number
from fastamp.bench.race import Case, run_race, show
from fastamp.bench.step import OUR_RTOL, PLAN, STOCK_RTOL, Side, count_calls, draw_grads
from fastamp.timer.timer import align

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


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


def in_8_bits(package: str, groups: list[dict[str, Any]], lr: float) -> Optimizer:
    """Return the 8-bit AdamW of a package."""
    optimizer: Optimizer = importlib.import_module(f"{package}.optim").AdamW8bit(groups, lr=lr)
    return optimizer


PEERS: dict[str, dict[str, Any]] = {
    "adamw-open": {"torch.compile": compiled, "deepspeed": deepspeed},
    "adamw-8bit": {name: partial(in_8_bits, name) for name in ("bitsandbytes", "torchao")},
}


class Peer(Side):
    """A side whose optimizer keeps moments in a format of its own."""

    zero = 1e-9  # a ten-thousandth of the moments of GPT-2's clipped gradients
    codes_rtol = CODES_RTOL

    def read(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the first moments, decoded, and the weights."""
        moments = [first_moment(self.optimizer.state[parameter]) for parameter in self.parameters]
        return moments, [parameter.detach() for parameter in self.parameters]


def first_moment(state: dict[str, Any]) -> Tensor:
    """Return a parameter's first moment, decoded; bitsandbytes calls it state1."""
    if "absmax1" in state:
        decode = importlib.import_module("bitsandbytes.functional").dequantize_blockwise
        values: Tensor = decode(
            state["state1"], absmax=state["absmax1"], code=state["qmap1"], blocksize=256
        )
        return values
    values = state["state1"] if "state1" in state else state["exp_avg"]
    return values.dequantize() if hasattr(values, "codes") else values


def make_side(row: LabRow, arm: str, make: Callable[..., Optimizer]) -> tuple[Side, float]:
    """Return an arm's side, and the norm of its gradients: of bfloat16 where moments are codes."""
    is_lean = bool(row.moments) and arm != "torch"
    kind = Side if not is_lean else Lean if arm == "fastamp" else Peer
    dtype = torch.bfloat16 if is_lean else row.dtype
    grads, norm = draw_grads(row.sizes, "cpu", seed=0, dtype=dtype)
    return kind(replace(row, optimizer=make), grads), norm


def race(row: LabRow, rounds: int) -> dict[str, str]:
    """Check each arm against plain float64 arithmetic, and race them; return a row."""
    ours = partial(fastamp.AdamW, moments=row.moments) if row.moments else row.optimizer
    peers = PEERS["adamw-8bit" if row.moments else "adamw-open"]
    made = {"torch": row.optimizer, **{arm: peers[arm] for arm in peers if is_installed(arm)}}

    def make() -> Case:
        sides, arms = {}, {}
        for arm, optimizer in {**made, "fastamp": ours}.items():
            side, norm = make_side(row, arm, optimizer)
            sides[arm], arms[arm] = side, side.fastamp if arm == "fastamp" else side.torch
            side.check(arms[arm], norm, OUR_RTOL if arm == "fastamp" else STOCK_RTOL)
        return Case(arms=arms, calls=count_calls(row), before=lambda arm: sides[arm].before())

    found = run_race(make, replace(PLAN, rounds=rounds))
    times_ms = {f"{arm} ms": show(1e3 * found.quartiles_s(arm)[1], ".3f") for arm in found.arms}
    ratios = {f"{arm} [95 %]": found.ratio(arm).text(".2f", "x") for arm in found.arms[1:]}
    return {"gradients": row.text} | times_ms | ratios


def is_installed(package: str) -> bool:
    """Say whether a package is there; what is part of torch is."""
    return package.startswith("torch.") or importlib.util.find_spec(package) is not None


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row for each shape: times, and how many times as fast as torch's each arm is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["gpt2"], help=DEFAULT)
    parser.add_argument("--rounds", type=number(int, 8), default=PLAN.rounds, help="at most")
    parser.add_argument("--work", choices=PEERS, default="adamw-open", help=DEFAULT)
    args = parser.parse_args(argv)
    for package in itertools.filterfalse(is_installed, PEERS[args.work]):
        print(f"not raced: {package} is not installed", file=sys.stderr)
    rows = [race(make_row(shape, args.work), args.rounds) for shape in args.shapes]
    print("\n".join(align([[*rows[0]], *([*row.values()] for row in rows)])))


if __name__ == "__main__":
    main()
