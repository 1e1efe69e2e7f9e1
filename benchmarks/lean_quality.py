"""The held-out loss of lean optimizers in less memory beside float32: paired seeds.

`python benchmarks/lean_quality.py`, two hours, trains the model of the bench's job `gpt` and that
of its main job; of the latter half the batch, and float32 weights under bf16 autocast. All arms
start from a seed's weights and take its batches. A job fails if a lean arm is worse than its
float32 by as much as two seeds of that differ on average, or AdamW's is no better than bfloat16
weights with nothing kept, with any seed. The losses are kept in benchmarks/results.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from functools import partial
from itertools import combinations, islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

import fastamp
from fastamp.bench import gpt
from fastamp.bench.options import DEFAULT, number
from fastamp.bench.tasks import Training, compute_loss, draw, make_loader, make_training
from fastamp.timer.timer import align

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fastamp.bench.gpt import Shape

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "lean_quality.json"


class Work(NamedTuple):
    """A model, its batches, and whether float32 weights train under autocast."""

    shape: Shape
    batch_size: int
    autocast: bool


JOBS = {
    "gpt": Work(gpt.SHAPES["cpu"], 8, autocast=False),
    "main": Work(gpt.MAIN_SHAPES["cpu"], 4, autocast=True),
}
WARMUP = 0.05  # of all steps
EVALUATIONS = 20  # in a training
Maker = tuple[torch.dtype, "Callable[..., torch.optim.Optimizer]", float]
"""The dtype of weights, the optimizer, and its learning rate as a multiple of AdamW's."""
ARMS: dict[str, Maker] = {
    "float32": (torch.float32, AdamW, 1),
    "lean": (torch.bfloat16, partial(fastamp.AdamW, moments="8bit"), 1),
    "lean, bf16 moments": (torch.bfloat16, partial(fastamp.AdamW, moments="bfloat16"), 1),
    "random": (torch.bfloat16, partial(fastamp.AdamW, moments="8bit", exact=False), 1),
    "nothing kept": (torch.bfloat16, AdamW, 1),
    "SGD": (torch.float32, partial(SGD, momentum=0.9), 300),
    "SGD, lean": (torch.bfloat16, partial(fastamp.SGD, momentum=0.9, moments="8bit"), 300),
    "Lion": (torch.float32, fastamp.Lion, 0.4),
    "Lion, lean": (torch.bfloat16, partial(fastamp.Lion, moments="8bit"), 0.4),
}
BESIDE = {"lean": "float32", "SGD, lean": "SGD", "Lion, lean": "Lion"}
"""The arm in float32 of each lean one."""
Losses = dict[str, list[list[float]]]  # by arm: of each seed, after each part of the steps


def train(
    training: Training, arm: Maker, seed: int, steps: int, rate: float, *, autocast: bool
) -> list[float]:
    """Train a copy of the model; return its held-out loss after each part of the steps."""
    dtype, make, factor = arm
    rate *= factor
    context = torch.autocast("cpu", torch.bfloat16, autocast and dtype is torch.float32)
    model = copy.deepcopy(training.model).to(dtype)
    optimizer = make(model.parameters(), lr=rate)
    batches = draw(make_loader(training, seed, device="cpu"), "cpu")
    looks = {-(-steps * (part + 1) // EVALUATIONS) for part in range(EVALUATIONS)}
    losses = []
    for step, batch in enumerate(islice(batches, steps), start=1):
        warm, left = step / (WARMUP * steps), math.cos(math.pi * (step - 1) / steps)
        optimizer.param_groups[0]["lr"] = rate * min(warm, (1 + left) / 2)
        with context:
            loss = compute_loss(training, model, batch)
        loss.backward()
        if isinstance(optimizer, fastamp.AdamW | fastamp.SGD | fastamp.Lion):
            fastamp.optimizer_step(optimizer, training.max_norm, zero_grad=True)
        else:
            clip_grad_norm_(model.parameters(), training.max_norm or math.inf)
            optimizer.step()
            optimizer.zero_grad()
        if step in looks:
            with torch.no_grad(), context:
                losses.append(float(cast("Any", training.evaluate)(model)["loss"]))
    return losses


def run(job: str, seeds: int, steps: int, arms: Sequence[str]) -> Losses:
    """Train float32 and other arms of a job with each seed."""
    work, losses = JOBS[job], {name: [] for name in ("float32", *arms)}
    rate = gpt.LEARNING_RATE * 256 / work.shape.width
    for seed in range(seeds):
        made = partial(gpt.make_model, shape=work.shape, batch_size=work.batch_size)
        training = make_training(lambda _, own, made=made: made(own), "cpu", seed)
        for name, of_seeds in losses.items():
            of_seeds.append(train(training, ARMS[name], seed, steps, rate, autocast=work.autocast))
            print(f"{job}, seed {seed}, {name}: {of_seeds[-1][-1]:.4f}", flush=True)
    return losses


def judge(losses: Losses) -> tuple[bool, str]:
    """Return whether lean is as good as float32, and a table of the last losses."""
    last = {name: [curve[-1] for curve in found] for name, found in losses.items()}
    base = last["float32"]
    over = {name: fmean(found) - fmean(base) for name, found in last.items()}
    rows = [["arm", *(f"seed {seed}" for seed in range(len(base))), "mean", "over float32"]]
    for name, found in last.items():
        shown = [f"{loss:.4f}" for loss in (*found, fmean(found))]
        rows.append([name, *shown, f"{over[name]:+.4f}"])
    pairs = zip(last.get("nothing kept", ()), last.get("lean", ()), strict=False)
    is_fine = all(worse > lean for worse, lean in pairs)
    found = []
    for lean, wide in BESIDE.items():
        if {lean, wide} <= last.keys():
            spread = fmean(abs(a - b) for a, b in combinations(last[wide], 2))
            is_fine &= over[lean] - over[wide] < spread
            found.append(f"two seeds of {wide} differ by {spread:.4f} on average")
    return is_fine, "\n".join([*align(rows), *found, "pass" if is_fine else "fail"])


def main(argv: Sequence[str] | None = None) -> int:
    """Print what is found of each job; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", choices=JOBS, nargs="*", default=[*JOBS], help=DEFAULT)
    parser.add_argument("--arms", choices=ARMS, nargs="*", default=[*ARMS], help="beside float32")
    parser.add_argument("--seeds", type=number(int, 2), default=3, help=DEFAULT)
    parser.add_argument("--steps", type=number(int, EVALUATIONS), default=2000, help=DEFAULT)
    args = parser.parse_args(argv)
    found = {job: run(job, args.seeds, args.steps, args.arms) for job in args.job}
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"jobs": {}}
    kept = {"steps": args.steps, "jobs": kept["jobs"] | found}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    are_fine = []
    for job, losses in kept["jobs"].items():
        is_fine, text = judge(losses)
        are_fine.append(is_fine)
        print(f"job {job}, {kept['steps']} steps\n{text}")
    return int(not all(are_fine))


if __name__ == "__main__":
    raise SystemExit(main())
