"""Time to equal loss: when a curve crosses a target, and what the seeds say of it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fastamp.bench.tasks import BrokenTask
from fastamp.bench.trainer import list_arms

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import until_equal as until


def make_curve(losses, seconds=None):
    """Return a curve of losses, a second apart."""
    curve = until.Curve(losses=[*losses])
    curve.seconds = [*(seconds or range(len(losses)))]
    curve.steps = [10 * i for i in range(len(losses))]
    return curve


def test_a_loss_is_reached_between_two_medians_of_three():
    assert make_curve([4.0, 3.0, 2.0, 1.0, 0.0]).cross(1.5) == (2.5, 25.0)
    # One evaluation far below does not count; neither does the last, without a neighbour.
    assert make_curve([4.0, 3.0, 0.0, 3.0, 3.0]).cross(1.5) is None
    assert make_curve([4.0, 3.0, 2.0, 1.0]).cross(1.5) is None
    assert make_curve([1.0, 1.0, 1.0]).cross(1.5) == (0.0, 0.0)


def test_first_visits_are_charged_the_time_of_later_ones():
    curve = until.Curve(losses=[3.0])
    for steps, elapsed_s in ((1, 9.0), (4, 3.0), (4, 2.0), (4, 2.0), (2, 1.0)):
        curve.add(steps, elapsed_s, 1.0)
    assert curve.seconds == [0.0, 0.5, 2.5, 4.5, 6.5, 7.5]
    assert curve.steps == [0, 1, 5, 9, 13, 15]
    assert curve.start_s == pytest.approx(9.5)


def draw_seeds(rng, factors, *, seeds=5):
    """Return curves of arms that need so many times the base's seconds a step, and steps."""
    found = []
    for _ in range(seeds):
        rate = 0.02 * math.exp(0.1 * rng.normal())  # of the seed, shared by its arms
        curves = {}
        for arm, (time, steps) in factors.items():
            part = np.arange(81)
            losses = 2 + 2 * np.exp(-rate * 10 * part / steps) + 0.002 * rng.normal(size=81)
            seconds = np.cumsum(time * np.exp(0.03 * rng.normal(size=81)))
            curves[arm] = make_curve(losses.tolist(), (seconds - seconds[0]).tolist())
        found.append(curves)
    return found


def test_planted_truths_are_found_and_an_equal_arm_is_not():
    factors = {"base": (1.0, 1.0), "slow": (1.05, 1.0), "long": (1.0, 1.3), "equal": (1.0, 1.0)}
    said = {arm: [] for arm in factors if arm != "base"}
    holds = []
    for run in range(20):
        seeds = draw_seeds(np.random.default_rng(run), factors)
        for arm, signs in said.items():
            ratio = until.compare(seeds, arm, "base", 2.3, confidence=1 - 0.05 / 3)
            signs.append((ratio.low > 1) - (ratio.high < 1))
            holds.append(ratio.low <= math.prod(factors[arm]) <= ratio.high)
    assert said["slow"].count(1) >= 18
    assert said["long"].count(1) >= 18
    assert said["equal"].count(0) >= 18
    assert holds.count(True) >= 54  # of 60


def test_an_arm_that_does_not_arrive_takes_the_upper_end_away():
    seeds = draw_seeds(np.random.default_rng(0), {"base": (1.0, 1.0), "never": (1.0, 9.0)})
    ratio = until.compare(seeds, "never", "base", 2.3, confidence=0.95)
    assert ratio.high == math.inf
    assert ratio.low == pytest.approx(until.MOST)
    assert ratio.text(".2f", "x") == "> 2.00x"
    assert until.compare(seeds[:1], "never", "base", 2.3, confidence=0.95) is None
    assert seeds[0]["never"].cross(2.3) is None
    # Seeds in which the base itself does not arrive say nothing.
    assert until.compare(seeds, "base", "never", 2.3, confidence=0.95) is None


def make(_device, seed):
    """Return a task that learns in some steps."""
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    y = (x.sum(dim=1) > 0).long()
    loss = nn.functional.cross_entropy

    def evaluate(model):
        out = model(x)
        assert out.dtype == torch.float32
        return {"loss": loss(out, y)}

    options = {"optimizer": lambda m: torch.optim.AdamW(m.parameters(), lr=0.02)}
    torch.manual_seed(seed)
    options |= {"evaluate": evaluate, "batch_size": 32}
    return nn.Linear(8, 2), torch.utils.data.TensorDataset(x, y), loss, options


def silent(device, seed):
    """Return the same task without a held-out loss."""
    *rest, options = make(device, seed)
    return *rest, options | {"evaluate": lambda _: 0.5}


TASK = f"{__name__}:make"


def test_all_arms_cross_one_loss_with_every_seed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(until, "choose_precisions", lambda _: ["fp32"])
    words = [TASK, f"same={TASK}", "--steps", "80", "--seeds", "2"]
    until.main([*words, "--json", str(tmp_path / "curves.json")])
    first, _, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("held-out loss 0.")
    assert [row.split("  ")[0] for row in rows] == ["torch fp32", "fastamp fp32", "same"]
    assert all("2 of 2 seeds" in row for row in rows)
    found = json.loads((tmp_path / "curves.json").read_text())
    for seed in found["seeds"]:
        base, ours, same = (curve["losses"] for curve in seed.values())
        assert base == same
        assert ours == pytest.approx(base, abs=1e-5)


def test_a_task_without_a_held_out_loss_is_refused():
    with pytest.raises(BrokenTask, match=r"options\['evaluate'\]: expected a dict with \"loss\""):
        until.train(list_arms(f"{__name__}:silent", ["fp32"]), 0, 10, 0.5)


@pytest.mark.parametrize("steps", [30, 80])
def test_the_target_is_the_first_arms_loss_at_90_percent_of_its_steps(steps):
    arm = list_arms(TASK, ["fp32"])[0]
    curve = until.train([arm], 0, steps, -math.inf)[arm.name]
    assert steps <= curve.steps[-1] <= steps + 2
    wanted = np.interp(0.9 * steps, curve.steps, curve.smooth())
    assert until.find_target(arm, steps, range(1)) == pytest.approx(wanted)
