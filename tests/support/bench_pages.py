"""A page of every command of the bench, from small runs and from invented figures.

`python tests/support/bench_pages.py FOLDER` writes them, to look at, and for browser.py beside it.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from fastamp.bench import apart, cores, environment, latency, loader, main_job, measure, step, timer
from fastamp.bench.__main__ import main
from fastamp.bench.gpt import Shape
from fastamp.bench.race import Build, Plan, Race, Visit
from fastamp.bench.trainer import Score, list_arms

TINY = Shape(layers=1, heads=2, width=32, block_size=16)
COMMANDS = {
    "train": "train rl --precision bf16 --batch-size 4 --steps 12 --device cpu",
    "step": "step --rows in-a-loop/adamw in-a-loop/adamw-open --device cpu",
    "loader": "loader --device cpu",
    "timer": "timer --device cpu",
    "latency": "latency --batch-sizes 1 2 --device cpu",
}
QUICK = Plan(rounds=8, warmup=2, builds=(3,))
ARMS = ("torch fp32", "fastamp fp32", "torch bf16", "fastamp bf16")
RUNS = {  # how many times as fast as FP32 fastamp is in bf16, in each build
    "gain": [1.86, 1.85, 1.87, 1.86, 1.84, 1.86],
    "loss": [0.73, 0.74, 0.72, 0.73, 0.75, 0.73],
    "inconclusive": [1.2, 1.9, 1.5, 1.1, 1.8],
}
JOBS = ("mlp", "rl")


def make_results(*, speedups=(2.0,), added=1.0, gap=0.0, loss=1.0):
    """Return what a race found: a build for each speed-up, of which fastamp has `added` a part.

    A score has 64 windows.
    """
    gains = added if isinstance(added, list) else [added] * len(speedups)
    builds = []
    for speedup, gain in zip(speedups, gains, strict=True):
        times_s = (1.0, 1.0, gain / speedup, 1.0 / speedup)
        round_ = {arm: Visit(time_s) for arm, time_s in zip(ARMS, times_s, strict=True)}
        builds.append(Build(arms=[*ARMS], rounds=[round_] * 2))
    windows = [0.5 + 0.001 * (i % 2) for i in range(64)]
    scores = dict.fromkeys(ARMS, Score(loss=1.0, accuracies=windows))
    last = Score(loss=loss, accuracies=[share + gap for share in windows])
    shares = {"data": 0.06, "forward": 0.3, "backward": 0.5, "step": 0.12, "other": 0.02}
    return measure.Results(
        arms=list_arms("x", ["fp32", "bf16"], []),
        race=Race(arms=[*ARMS], builds=builds),
        parameters=11_200_000,
        batch_sizes=[8] * 40,
        losses={arm: [3.0, 2.0, 1.5] for arm in ARMS},
        scores=scores | {ARMS[-1]: last},
        shares=dict.fromkeys(ARMS, shares),
    )


DATA = {  # a whole pass in each of the race's rounds
    "tensors": (
        "1,000 rows of 3",
        256,
        lambda: TensorDataset(torch.rand(1000, 3), torch.arange(1000)),
    ),
    "dicts": ("24 items", 8, lambda: [{"x": torch.full((2,), float(i))} for i in range(24)]),
}


def write(name, words, folder, patch):
    """Run a command; return its page, its record and what it printed."""
    files = [folder / f"{name}.html", folder / f"{name}.json"]
    shown = io.StringIO()
    patch.setattr(sys, "stdout", shown)
    status = main([*words, "--report", str(files[0]), "--json", str(files[1])])
    assert status == 0, shown.getvalue()
    return files[0], json.loads(files[1].read_text()), shown.getvalue()


def write_all(folder, patch):
    """Run every command once; return what `write` does, by name."""
    patch.setattr(main_job, "peak_memory", lambda *_: 100 << 20)
    patch.setattr(environment, "cpu_features", lambda: {"amx_bf16"})
    patch.setattr(apart, "run_apart", lambda work, *args: work(*args))
    patch.setattr(cores, "_read", dict)
    patch.setattr(measure, "PLAN", Plan(build_s=0.01, builds=(3,)))
    patch.setattr(measure, "SHARES_BLOCKS", 3)
    patch.setattr(loader, "DATA", DATA)
    for command in (step, loader, timer, latency):
        patch.setattr(command, "PLAN", QUICK)
    patch.setattr(latency, "SHAPES", {"cpu": TINY})
    found = {}
    for name, command in COMMANDS.items():
        found[name] = write(name, command.split(), folder, patch)
    for name, speedups in RUNS.items():
        made = make_results(speedups=speedups, added=1.04)
        patch.setattr(main_job, "race_task", lambda *_, m=made, **__: m)
        found[name] = write(name, ["--device", "cpu"], folder, patch)
    patch.setattr(main_job, "race_task", lambda *_: make_results(speedups=[2.0] * 6, added=1.1))
    found["all"] = write("all", ["all", *JOBS, "--device", "cpu"], folder, patch)
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch_:
        write_all(Path(sys.argv[1]), patch_)
