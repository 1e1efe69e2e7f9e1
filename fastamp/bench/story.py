"""What each repair of a training loop brings: loader, step, timing, precision, alone and together.

The naive loop is the one found in the wild: a Python list stacked for each batch, blocking copies,
a synchronize around every step, a check of the norm on the host, FP32. Every other arm is that loop
with one part, or all, from the stock or the fastamp loop.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import RandomSampler

import fastamp
from fastamp import TokenDataset
from fastamp.bench.arms import STEPS, Arm, Job, Run
from fastamp.bench.loader import Batches, fastamp_batches, torch_batches
from fastamp.bench.race import AGAIN, Plan, Race, run_race
from fastamp.bench.record import Report
from fastamp.train.gpt import Shape
from fastamp.train.options import progress

CHOICES = ("naive,stock,fastamp", "naive,stock", "naive,fastamp")
VISIT_STEPS = 4  # a short epoch: whatever a loader prepares, it does so on the clock
# Small: what is not the model's own work has to be seen beside it.
SIZES = {
    "cpu": asdict(Shape(layers=2, heads=2, width=256, block_size=64))
    | {"batch_size": 8, "steps": 25 * VISIT_STEPS},
    "cuda": asdict(Shape(layers=6, heads=6, width=384, block_size=256))
    | {"batch_size": 64, "steps": 65 * VISIT_STEPS},
}


def _naive_batches(
    windows: TokenDataset, batch_size: int, device: str, sampler: RandomSampler
) -> Batches:
    def batches() -> Iterator[list[torch.Tensor]]:
        for _ in range(len(sampler) // batch_size):
            samples = [windows[int(i)] for i in torch.randint(len(windows), (batch_size,))]
            yield [torch.stack(list(part)).to(device) for part in zip(*samples, strict=True)]

    return batches


class Loop:
    """One training loop, made of a part of each kind; a visit is a short epoch."""

    def __init__(self, parts: dict[str, str], run: Run, seed: int) -> None:
        self.run, data, batch_size = run, run.training.data, run.training.batch_size
        generator = torch.Generator().manual_seed(seed)
        count = VISIT_STEPS * batch_size
        # With replacement, or each short epoch would permute the whole dataset.
        sampler = RandomSampler(data, replacement=True, num_samples=count, generator=generator)
        make = LOADERS[parts["loader"]]
        self.batches = make(data, batch_size, run.device, sampler=sampler)
        self.timed = TIMINGS[parts["timing"]]
        self.times: list[object] = []
        self.timer = fastamp.Timer(run.device)

    def epoch(self) -> None:
        """Train the steps of one visit."""
        for batch in self.batches():
            self.timed(self, batch)


def _naive_timing(loop: Loop, batch: Any) -> None:
    synchronize = torch.get_device_module(loop.run.device).synchronize
    synchronize()
    start_s = perf_counter()
    loop.run.train_step(batch)
    synchronize()
    loop.times.append(perf_counter() - start_s)


def _stock_timing(loop: Loop, batch: Any) -> None:
    if loop.run.device != "cuda":
        _naive_timing(loop, batch)
        return
    start, end = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    start.record()
    loop.run.train_step(batch)
    end.record()
    loop.times.append((start, end))


def _fastamp_timing(loop: Loop, batch: Any) -> None:
    with loop.timer("step"):
        loop.run.train_step(batch)


LOADERS: dict[str, Callable[..., Batches]] = {
    "naive": _naive_batches,
    "stock": torch_batches,
    "fastamp": fastamp_batches,
}
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


def run_story(job: Job, windows: TokenDataset, arms: list[str]) -> Report:
    """Race all loops against the naive one."""
    training = replace(job.make_training(job.seed), data=windows)
    loops = {}
    for name, parts in make_loops(arms).items():
        dtype = None if parts["precision"] == "naive" else job.dtype
        arm = Arm(name=name, dtype=dtype, step=parts["step"])
        copied = replace(training, model=copy.deepcopy(training.model))
        loops[name] = Loop(parts, Run(arm, job.device, copied), job.seed)
    rounds = (job.steps or 0) // VISIT_STEPS
    with progress(rounds) as tick:
        race = run_race(
            {name: loop.epoch for name, loop in loops.items()},
            Plan(rounds=rounds, warmup=5),
            device=job.device,
            seed=job.seed,
            skipped=lambda name: loops[name].run.skipped(),
            tick=tick,
        )
    ratios = {name: race.ratio(name) for name in loops if name not in {"naive", AGAIN}}
    metrics = {f"speedup/{name.replace(': ', '/')}": ratio for name, ratio in ratios.items()}
    size = f"{VISIT_STEPS} steps of {training.batch_size} samples in a visit"
    notes = [
        "times as fast as the naive loop, with that part alone and with all of them",
        f"{size}; AMP is {job.precision}",
    ]
    return Report(table=_rows(arms, race), races={"story": race}, metrics=metrics, notes=notes)


def _rows(arms: list[str], race: Race) -> list[dict[str, str]]:
    time_ms = 1e3 / VISIT_STEPS * race.quartiles_s("naive")[1]
    columns = {arm: f"{arm} [95 %]" for arm in arms[1:]}
    rows = [{"repair": f"none: {time_ms:.1f} ms a step", **dict.fromkeys(columns.values(), "1")}]
    for part in (*PARTS, "all"):
        row = {"repair": part}
        for arm, column in columns.items():
            name = f"{part}: {arm}"
            row[column] = race.ratio(name).text(".3f", "x") if name in race.arms else "as stock"
        rows.append(row)
    return rows
