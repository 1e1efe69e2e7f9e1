"""A page of every command of the bench, from small runs and from invented figures.

`python tests/support/bench_pages.py FOLDER` writes them, to look at and for `nox -s browser`.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fastamp.bench import (
    advice,
    apart,
    cores,
    job_table,
    latency,
    loader,
    main_job,
    measure,
    step,
    timer,
    where,
)
from fastamp.bench.__main__ import main
from fastamp.bench.gpt import Shape
from fastamp.bench.race import Build, Interval, Plan, Race, Visit
from fastamp.bench.trainer import Score

TINY = Shape(layers=1, heads=2, width=32, block_size=16)
COMMANDS = {
    "amp": "amp --precision bf16 --batch-size 4 --steps 12 --device cpu",
    "step": "step --shapes 3x1000,2gx10 --work norm adamw-open --device cpu",
    "loader": "loader --data tensors collate slow --device cpu",
    "timer": "timer --device cpu",
    "latency": "latency --batch-sizes 1,2 --device cpu",
}
QUICK = Plan(rounds=8, warmup=2, builds=(3,))
ARMS = ("fp32", "amp", "amp+fastamp")


class Figures(NamedTuple):
    """What a main job might have measured, of each arm."""

    times_ms: tuple[float, ...]
    peaks_mib: tuple[int, ...]
    builds: int
    noise: float


RUNS = {
    "gain": Figures((412.0, 231.0, 222.0), (3120, 1604, 1570), 12, 0.04),
    "loss": Figures((98.0, 131.0, 134.0), (820, 790, 784), 12, 0.03),
    "inconclusive": Figures((41.0, 27.5, 27.0), (612, 371, 366), 5, 0.35),
}
JOBS = {  # milliseconds of a step of the naive loop, the stock one and fastamp's
    "gpt": (950, 520, 512),
    "mlp": (6.1, 3.23, 1.71),
    "rl": (1.9, 0.71, 0.33),
}


def make_race(times_s, *, builds, noise, seed=0):
    """Return a race of arms that take these times, now and then three times as long."""
    rng = np.random.default_rng(seed)
    rounds = []
    for _ in range(4 * builds):
        factors = np.exp(noise * rng.normal(size=len(times_s)))
        factors *= np.where(rng.random(len(times_s)) < 0.02, 3, 1)
        pairs = zip(times_s.items(), factors, strict=True)
        rounds.append({arm: Visit(time_s * factor) for (arm, time_s), factor in pairs})
    parts = [rounds[place : place + 4] for place in range(0, len(rounds), 4)]
    found = {"workers": {}, "dtype": "torch.bfloat16", "steps": 64, "base": "stock"}
    found |= {"model_share": 0.1, "failures": []}
    made = [Build(arms=[*times_s], rounds=part, found=found) for part in parts]
    return Race(arms=[*times_s], builds=made)


def make_results(figures):
    """Return what the main job measures, for these figures."""
    rng = np.random.default_rng(0)
    times_s = dict(zip(ARMS, (1e-3 * time for time in figures.times_ms), strict=True))
    race = make_race(times_s, builds=figures.builds, noise=figures.noise)
    steps = np.arange(len(race.rounds))
    curve = 1.8 + 3.7 * np.exp(-steps / 40)
    profiles = {}
    for arm, time_s in times_s.items():
        shares = {"data": 0.06, "forward": 0.3, "backward": 0.5, "step": 0.12, "other": 0.02}
        parts = {part: Interval.exact(share * time_s) for part, share in shares.items()}
        profiles[arm] = advice.Profile(device="cpu", steps=6, parts=parts)
    shares = rng.normal(0.42, 0.05, 64)
    scores = {arm: shares + 0.0005 * rng.normal(size=64) for arm in ARMS}
    return measure.Results(
        parameters=11_200_000,
        batch_sizes=[8] * 40,
        peaks=dict(zip(ARMS, (mib << 20 for mib in figures.peaks_mib), strict=True)),
        race=race,
        losses={arm: [*(curve + 0.03 * rng.normal(size=len(steps)))] for arm in ARMS},
        scores={
            a: [Score(loss=1.9, accuracy=s.mean(), window_accuracies=[*s])]
            for a, s in scores.items()
        },
        profiles=profiles,
        nbytes={
            arm: {"weights": 4 * n, "gradients": 4 * n, "optimizer": 8 * n}
            for arm, n in dict.fromkeys(ARMS, 11_200_000).items()
        },
    )


def make_found(name, _device, _seed):
    """Return what `bench jobs` measures of a job."""
    steps = 64
    times_s = dict(zip(("naive", "stock", "fastamp"), JOBS[name], strict=True))
    times_s = {arm: steps * time_ms / 1e3 for arm, time_ms in times_s.items()}
    return make_race({"stock": times_s["stock"], **times_s}, builds=8, noise=0.03)


def small_tensors(generator):
    """1,000 rows of 3."""
    rows = torch.rand(1000, 3, generator=generator)
    return loader.Data(TensorDataset(rows), 256, [rows])


def slow_items(_generator):
    """24 of them, for a whole pass in each of the race's rounds."""
    return loader.Data(loader.Items(loader.wait, 24), 8)


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
    (folder / "text").write_bytes(bytes(range(200)) * 50)
    text = ["--data", str(folder / "text")]
    patch.setattr(measure, "peak_memory", lambda *_: None)
    patch.setattr(apart, "run_apart", lambda work, *args: work(*args))
    patch.setattr(cores, "_read", dict)
    patch.setattr(measure, "PLAN", Plan(build_s=0.01, builds=(3,)))
    patch.setattr(where, "BLOCKS", 3)
    patch.setitem(loader.DATA, "tensors", small_tensors)
    patch.setitem(loader.DATA, "slow", slow_items)
    for command in (step, loader, timer, latency):
        patch.setattr(command, "PLAN", QUICK)
    patch.setattr(main_job, "CPU_SHAPE", TINY)
    patch.setattr(latency, "SHAPES", {"cpu": TINY})
    found = {}
    for name, command in COMMANDS.items():
        words = [*command.split(), *(text if name == "amp" else [])]
        found[name] = write(name, words, folder, patch)
    patch.setattr(main_job, "no_speed_reason", lambda *_: None)
    for name, figures in RUNS.items():
        patch.setattr(main_job, "train_arms", lambda *_, f=figures, **__: make_results(f))
        words = [*COMMANDS["amp"].split(), *text]
        found[name] = write(name, words, folder, patch)
    patch.setattr(job_table, "_race", make_found)
    found["jobs"] = write("jobs", ["jobs", *JOBS, "--device", "cpu"], folder, patch)
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch_:
        write_all(Path(sys.argv[1]), patch_)
