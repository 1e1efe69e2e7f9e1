"""Test the race: it must find a known slowdown, and no difference between identical arms.

`python benchmarks/selftest.py`: all arms repeat one unit of work, so the true ratio is known.
Exit status: 0; 1 if a ratio is more than 0.02 off; 3 if this machine is too noisy to tell.

`--until 20`, five minutes, plants truths in the time to equal loss: an arm of 1.05x the time a
step, one that needs 1.3x the steps, and one that is equal. Exit status: 0; 1 unless the first two
are found and the third is not in nine of ten runs each.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastamp.bench import until
from fastamp.bench.measure import Job
from fastamp.bench.options import DEFAULT, number
from fastamp.bench.race import AGAIN, Interval, Plan, run_race, verdict_on
from fastamp.bench.trainer import Config

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

UNIT = bytes(10_000)  # hashed once, a unit of work: about 6 us
UNITS = 100
SAME = 0.02  # how far a ratio may be from the true one
RATE = 2e-4  # so that the loss still falls at the end
PLAN = Plan(rounds=40_000, warmup=100, half_width=0.004, least_blocks=400, limit_s=20.0)


def work(units: int) -> None:
    """Repeat the unit of work."""
    for _ in range(units):
        hashlib.sha256(UNIT).digest()


def judge(name: str, found: Interval, truth: float, why: str) -> str:
    """Print a ratio beside its bounds; return the verdict."""
    low, high = truth - SAME, truth + SAME
    verdict = verdict_on(found, low, high)
    print(f"{name} {found.text('.4g', 'x')} (target {low:g}x to {high:g}x): {verdict}, {why}")
    return verdict


class Working(nn.Module):
    """A model whose training step does some units of work, beside its own little."""

    def __init__(self, model: nn.Module, units: int) -> None:
        super().__init__()
        self.model, self.units = model, units

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's output."""
        if torch.is_grad_enabled():
            work(self.units)
        output: Tensor = self.model(x)
        return output


class Skipping(torch.optim.AdamW):
    """Takes 10 of 13 steps."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        """Take a step, or none."""
        self.count += 1
        return None if self.count % 13 in {0, 4, 8} else super().step(closure)


def make(_device: str, seed: int) -> tuple[Any, ...]:
    """Return a task of the bench with the planted arms."""
    x = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
    y = (x @ torch.linspace(-1, 1, 32) / 3).tanh()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1), nn.Flatten(0))

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"accuracy": 0.0, "loss": nn.functional.mse_loss(model(x[:512]), y[:512]).item()}

    def slower(model: Any) -> nn.Module:
        # 5 % of a step: all but the work takes 0.6 of its time.
        return Working(model.model, model.units + model.units * 8 // 100)

    arms = {
        "1.05x the time": slower,
        "1.3x the steps": {"optimizer": lambda model: Skipping(model.parameters(), lr=RATE)},
        "equal": lambda model: model,
    }
    names = {name.replace(" ", "_"): change for name, change in arms.items()}
    data = torch.utils.data.TensorDataset(x[512:], y[512:])
    options = {"evaluate": evaluate, "batch_size": 64, "arms": names}
    options["optimizer"] = lambda model: torch.optim.AdamW(model.parameters(), lr=RATE)
    return Working(model, UNITS), data, nn.functional.mse_loss, options


class PlantedJob(Job):
    """Trains FP32 and the planted arms alone."""

    def list_arms(self, own: Iterable[str] = ()) -> list[Config]:
        """Return the arms."""
        return [Config(name="fp32"), *(Config(name=name, is_own=True) for name in own)]


def plant(runs: int) -> int:
    """Measure the time to equal loss with planted truths so often; return the exit status."""
    shared: dict[str, Any] = {"precision": "bf16", "make": make, "memory_make": make}
    said: dict[str, list[str]] = {}
    for run in range(runs):
        seeds = range(run * until.SEEDS, (run + 1) * until.SEEDS)
        job = PlantedJob(device="cpu", seed=seeds[0], steps=None, **shared)
        for each in until.run(job, until.STEPS, seeds, None).measurements:
            said.setdefault(each.arm, []).append(each.verdict)
            print(f"run {run}: {each.text()}", flush=True)
    enough, status = runs * 9 / 10, 0
    for arm, verdicts in said.items():
        wanted = until.SAID[2] if arm == "equal" else until.SAID[1]
        found = verdicts.count(wanted)
        status |= int(found < enough)
        print(f"{arm}: {wanted} in {found} of {runs} runs")
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Race identical arms and a slowed one; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    slowdown = f"of the slowed arm, in percent {DEFAULT}"
    parser.add_argument("--slowdown", type=number(int, 0, 100), default=10, help=slowdown)
    parser.add_argument("--rounds", type=number(int, 8), default=PLAN.rounds, help="at most")
    text = "plant truths in the time to equal loss, in so many runs"
    parser.add_argument("--until", type=number(int, 1), metavar="RUNS", help=text)
    args = parser.parse_args(argv)
    if args.until:
        return plant(args.until)
    slowed = UNITS + args.slowdown * UNITS // 100
    arms = {"plain": UNITS, AGAIN: UNITS, "slowed": slowed}
    plan = replace(PLAN, rounds=args.rounds, warmup=min(PLAN.warmup, args.rounds // 4))
    race = run_race({arm: partial(work, units) for arm, units in arms.items()}, plan)
    found, truth = race.ratio("plain", "slowed"), slowed / UNITS
    inside = "inside" if found.low <= truth <= found.high else "outside"
    verdicts = {
        judge("identical arms", race.placebo(), 1.0, "the plain arm against itself"),
        judge("slowed arm", found, truth, f"the true ratio, {truth:.4f}, is {inside} the interval"),
    }
    return 1 if "fail" in verdicts else 3 if "inconclusive" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
