"""What each repair of a training loop brings: loader, step, timing, precision, alone and together.

The naive loop is the one found in the wild: a Python list stacked for each batch, blocking copies,
a synchronize around every step, a check of the norm on the host, FP32. Every other arm is that loop
with one part taken from the stock or the fastamp loop, or all of them.
"""

from __future__ import annotations

import argparse
import copy
from typing import TYPE_CHECKING

import torch

import fastamp
from fastamp import TokenDataset
from fastamp.bench import compare
from fastamp.bench.compare import AGAIN, Plan
from fastamp.bench.loader import fastamp_batches, make_sampler, stock_batches
from fastamp.bench.report import Cell, Figure, Report, heading, interval_cell, progress
from fastamp.bench.train import STEPS, Arm, Run, make_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.data import RandomSampler

    from fastamp.bench.data import Corpus
    from fastamp.bench.loader import Batches
    from fastamp.bench.train import Job

LOOPS = ("naive", "stock", "fastamp")
VISIT_STEPS = 4  # a short epoch: whatever a loader prepares, it does so on the clock
NAMES = ("layers", "heads", "width", "block_size", "batch_size", "steps")
# Small: what is not the model's own work has to be seen beside it.
SIZES = {
    "cpu": dict(zip(NAMES, (2, 2, 256, 64, 8, 25 * VISIT_STEPS), strict=True)),
    "cuda": dict(zip(NAMES, (6, 6, 384, 256, 64, 65 * VISIT_STEPS), strict=True)),
}


def parse_arms(text: str) -> list[str]:
    """Return the loops to compare, naive first, for argparse."""
    names = text.split(",")
    if not {"naive"} < set(names) <= set(LOOPS) or len(names) != len(set(names)):
        message = f"{text!r} is not naive and one or both of stock and fastamp: naive,stock,fastamp"
        raise argparse.ArgumentTypeError(message)
    return sorted(names, key=LOOPS.index)


def _naive_batches(
    windows: TokenDataset, sampler: RandomSampler, batch_size: int, device: str
) -> Batches:
    def batches() -> Iterator[list[torch.Tensor]]:
        for _ in range(len(sampler) // batch_size):
            samples = [windows[int(i)] for i in torch.randint(len(windows), (batch_size,))]
            yield [torch.stack(list(part)).to(device) for part in zip(*samples, strict=True)]

    return batches


class Loop:
    """One training loop, made of a part of each kind; a visit is a short epoch."""

    def __init__(self, parts: dict[str, str], run: Run, windows: TokenDataset, job: Job) -> None:
        self.run = run
        self.device = job.device
        sampler = make_sampler(windows, VISIT_STEPS * job.batch_size, job.seed)
        self.batches = LOADERS[parts["loader"]](windows, sampler, job.batch_size, job.device)
        self.timed = TIMINGS[parts["timing"]]
        self.times: list[object] = []
        self.timer = fastamp.Timer(job.device)

    def epoch(self) -> None:
        """Train the steps of one visit."""
        for tokens, targets in self.batches():
            self.timed(self, tokens, targets)


def _naive_timing(loop: Loop, tokens: torch.Tensor, targets: torch.Tensor) -> None:
    loop.times.append(compare.timed(lambda: loop.run.train_step(tokens, targets), loop.device))


def _stock_timing(loop: Loop, tokens: torch.Tensor, targets: torch.Tensor) -> None:
    if loop.device != "cuda":
        _naive_timing(loop, tokens, targets)
        return
    start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    start.record()
    loop.run.train_step(tokens, targets)
    end.record()
    loop.times.append((start, end))


def _fastamp_timing(loop: Loop, tokens: torch.Tensor, targets: torch.Tensor) -> None:
    with loop.timer("step"):
        loop.run.train_step(tokens, targets)


LOADERS = {"naive": _naive_batches, "stock": stock_batches, "fastamp": fastamp_batches}
TIMINGS = {"naive": _naive_timing, "stock": _stock_timing, "fastamp": _fastamp_timing}
# Which loops bring a part of their own; in another all-together arm the stock one stands in.
PARTS = {
    "loader": tuple(LOADERS),
    "step": tuple(STEPS),
    "timing": tuple(TIMINGS),
    "precision": ("naive", "stock"),
}


def make_loops(arms: list[str]) -> dict[str, dict[str, str]]:
    """Return the loops to race by name: the naive one twice, each repair alone, and all of them."""
    naive = dict.fromkeys(PARTS, "naive")
    loops = {"naive": naive, AGAIN: naive}
    for part, known in PARTS.items():
        loops |= {f"{part}: {a}": naive | {part: a} for a in arms if a != "naive" and a in known}
    for arm in arms[1:]:
        loops[f"all: {arm}"] = {p: arm if arm in known else "stock" for p, known in PARTS.items()}
    return loops


def measure(job: Job, corpus: Corpus, arms: list[str]) -> Report:
    """Race all loops against the naive one."""
    model = make_model(job)
    windows = TokenDataset(corpus.train, job.shape.block_size)
    loops = {}
    for name, parts in make_loops(arms).items():
        dtype = None if parts["precision"] == "naive" else job.dtype
        arm = Arm(name=name, dtype=dtype, step=parts["step"])
        loops[name] = Loop(parts, Run(arm, job, copy.deepcopy(model)), windows, job)
    rounds = job.steps // VISIT_STEPS
    with progress(rounds) as tick:
        race = compare.measure(
            {name: loop.epoch for name, loop in loops.items()},
            Plan(rounds=rounds, warmup=5),
            device=job.device,
            seed=job.seed,
            skipped=lambda name: loops[name].run.skipped(),
            tick=tick,
        )
    ratios = {name: race.ratio(name) for name in loops if name not in {"naive", AGAIN}}
    metrics = {f"speedup/{name.replace(': ', '/')}": ratio for name, ratio in ratios.items()}
    size = f"{VISIT_STEPS} steps of {job.batch_size} x {job.shape.block_size} bytes in a visit"
    notes = ["times as fast as the naive loop, with that part alone and with all of them"]
    notes += [f"{size}; AMP is {job.precision}"]
    return Report(
        table=_table(arms, set(loops)), races={"story": race}, metrics=metrics, notes=notes
    )


def _table(arms: list[str], known: set[str]) -> list[list[Cell]]:
    time_ms = Figure("/races/story/arms/naive/time_s/median", ".1f", 1e3 / VISIT_STEPS)
    rows = [heading(",".join(["repair", *(f"{arm} [95 %]" for arm in arms[1:])]))]
    rows.append([("none: ", time_ms, " ms a step"), *([("1",)] * (len(arms) - 1))])
    for part in (*PARTS, "all"):
        names = [f"{part}: {arm}" for arm in arms[1:]]
        cells = (interval_cell(f"/races/story/arms/{n}/speedup", ".3f", "x") for n in names)
        rows.append(
            [
                (part,),
                *(c if n in known else ("as stock",) for c, n in zip(cells, names, strict=True)),
            ]
        )
    return rows
