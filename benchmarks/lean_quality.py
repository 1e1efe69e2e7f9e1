"""The held-out loss of fastamp.AdamW in less memory beside float32: a small GPT, paired seeds.

`OMP_NUM_THREADS=1 python benchmarks/lean_quality.py`, ten minutes: all arms start from a seed's
weights and take its batches. It fails unless lean differs from float32 by less than two seeds of
float32 do, on average, and bfloat16 weights with nothing kept are worse than lean.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from itertools import combinations, islice
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

import fastamp
from fastamp.bench.gpt import Shape
from fastamp.bench.jobs.language import LEARNING_RATE, make_gpt
from fastamp.bench.options import DEFAULT, number
from fastamp.bench.tasks import Training, compute_loss, draw, make_loader, make_training, with_copy
from fastamp.timer.timer import align

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SHAPE = Shape(layers=2, heads=4, width=64, block_size=64)  # 0.13 M parameters
RATE, WARMUP = LEARNING_RATE * 256 / SHAPE.width, 0.05  # WARMUP of all steps
Maker = tuple[torch.dtype, "Callable[..., torch.optim.Optimizer]"]
ARMS: dict[str, Maker] = {
    "float32": (torch.float32, AdamW),
    "lean": (torch.bfloat16, partial(fastamp.AdamW, moments="8bit")),
    "lean, bf16 moments": (torch.bfloat16, partial(fastamp.AdamW, moments="bfloat16")),
    "nothing kept": (torch.bfloat16, AdamW),
    "random": (torch.bfloat16, partial(fastamp.AdamW, moments="8bit", exact=False)),
}


def train(training: Training, arm: Maker, seed: int, steps: int) -> float:
    """Train a copy of the model; return its held-out loss."""
    dtype, make = arm
    model = with_copy(training).model.to(dtype)
    optimizer = make(model.parameters(), lr=RATE)
    batches = draw(make_loader(training, seed, device="cpu"), "cpu")
    for step, batch in enumerate(islice(batches, steps)):
        warm, left = (step + 1) / (WARMUP * steps), math.cos(math.pi * step / steps)
        optimizer.param_groups[0]["lr"] = RATE * min(warm, (1 + left) / 2)
        compute_loss(training, model, batch).backward()
        if isinstance(optimizer, fastamp.AdamW):
            fastamp.optimizer_step(optimizer, training.max_norm, zero_grad=True)
        else:
            clip_grad_norm_(model.parameters(), training.max_norm or math.inf)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        return float(cast("Any", training.evaluate)(model)["loss"])


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each arm, then what is judged; return 1 if it fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=number(int, 2), default=3, help=DEFAULT)
    parser.add_argument("--steps", type=number(int, 1), default=2000, help=DEFAULT)
    args = parser.parse_args(argv)
    losses: dict[str, list[float]] = {name: [] for name in ARMS}
    for seed in range(args.seeds):
        training = make_training(partial(make_gpt, shape=SHAPE), "cpu", seed)
        for name, arm in ARMS.items():
            losses[name].append(train(training, arm, seed, args.steps))
    base = losses["float32"]
    spread = fmean(abs(a - b) for a, b in combinations(base, 2))
    over = {name: fmean(found) - fmean(base) for name, found in losses.items()}
    rows = [["arm", *(f"seed {seed}" for seed in range(args.seeds)), "mean", "over float32"]]
    for name, found in losses.items():
        shown = [f"{loss:.4f}" for loss in (*found, fmean(found))]
        rows.append([name, *shown, f"{over[name]:+.4f}"])
    print("\n".join(align(rows)))
    print(f"two seeds of float32 differ by {spread:.4f} on average")
    is_fine = abs(over["lean"]) < spread and over["nothing kept"] > over["lean"]
    print("pass" if is_fine else "fail")
    return int(not is_fine)


if __name__ == "__main__":
    raise SystemExit(main())
