"""Time to equal loss: when a curve crosses a target, and what the seeds say of it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from fastamp.bench import measure, until
from fastamp.bench.race import student
from fastamp.bench.tasks import BrokenTask


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


@pytest.mark.parametrize(
    ("tail", "freedom", "wanted"),
    [(0.025, 4, 2.776), (0.025, 9, 2.262), (0.005, 4, 4.604), (0.00625, 4, 4.315)],
)
def test_students_quantiles_are_those_of_the_tables(tail, freedom, wanted):
    assert student(tail, freedom) == pytest.approx(wanted, rel=5e-3)


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
            ratio = until._compare(seeds, arm, "base", 2.3, confidence=1 - 0.05 / 3)
            signs.append((ratio.low > 1) - (ratio.high < 1))
            holds.append(ratio.low <= math.prod(factors[arm]) <= ratio.high)
    assert said["slow"].count(1) >= 18
    assert said["long"].count(1) >= 18
    assert said["equal"].count(0) >= 18
    assert holds.count(True) >= 54  # of 60


def test_an_arm_that_does_not_arrive_takes_the_upper_end_away():
    seeds = draw_seeds(np.random.default_rng(0), {"base": (1.0, 1.0), "never": (1.0, 9.0)})
    ratio = until._compare(seeds, "never", "base", 2.3, confidence=0.95)
    assert ratio.high == math.inf
    assert ratio.low == pytest.approx(until.MOST)
    assert ratio.text(".2f", "x") == "> 2.00x"
    assert until._compare(seeds[:1], "never", "base", 2.3, confidence=0.95) is None
    assert seeds[0]["never"].cross(2.3) is None
    # Seeds in which the base itself does not arrive say nothing.
    assert until._compare(seeds, "base", "never", 2.3, confidence=0.95) is None


class Linear(nn.Linear):
    """Counts the calls that train."""

    calls = 0

    def forward(self, x):
        Linear.calls += torch.is_grad_enabled()
        return super().forward(x)


def make(_device, seed):
    """Return a task that learns in some steps, with a schedule and two arms."""
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    y = (x.sum(dim=1) > 0).long()

    def evaluate(model):
        out = model(x)
        assert out.dtype == torch.float32
        return {"accuracy": (out.argmax(1) == y).float().mean(), "loss": loss(out, y)}

    def schedule(optimizer, steps):
        horizons.append(steps)
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)

    loss = nn.functional.cross_entropy
    options = {
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02),
        "evaluate": evaluate,
        "schedule": schedule,
        "batch_size": 32,
        "arms": {"same": lambda model: model, "parts": {"batch_size": 8, "accumulate": 4}},
    }
    torch.manual_seed(seed)
    return Linear(8, 2), torch.utils.data.TensorDataset(x, y), loss, options


horizons = []


def test_all_arms_cross_one_loss_with_every_seed():
    job = measure.Job(
        device="cpu", precision="bf16", seed=0, steps=None, make=make, memory_make=make
    )
    horizons.clear()
    report = until.run(job, 80, range(5), None)
    assert {*horizons} == {80}
    names = [row["arm"] for row in report.table]
    assert names == ["fp32", "lean", "same", "parts", "amp", "amp+fastamp"]
    curves = report.details["curves"]
    for seed in range(5):
        base, same, parts = (curves[name][seed] for name in ("fp32", "same", "parts"))
        assert base["losses"] == same["losses"]
        n = min(len(base["losses"]), len(parts["losses"]))
        assert parts["losses"][:n] == pytest.approx(base["losses"][:n], abs=1e-5)
        # The weights of bfloat16 arms are scored in FP32, and differ.
        assert curves["lean"][seed]["losses"][0] == pytest.approx(base["losses"][0], abs=1e-2)
        assert curves["lean"][seed]["losses"] != base["losses"]
    target = report.details["target"]
    reached = [row for row in report.table if row["arm"] in {"fp32", "same", "parts"}]
    assert len({row["median steps"] for row in reached}) == 1
    assert f"{target:.4f}" in report.notes[0]
    assert {each.name for each in report.measurements} == {
        f"time_to_loss/{name}" for name in names if name != "fp32"
    }
    assert "5 comparisons, each at 99 %: all together hold at 95 %" in report.notes


def test_a_loss_that_nobody_reaches_ends_with_no_figure():
    job = measure.Job(
        device="cpu", precision="bf16", seed=0, steps=None, make=make, memory_make=make
    )
    Linear.calls = 0
    report = until.run(job, 10, range(2), -1.0)
    assert {each.verdict for each in report.measurements} == {"n/a"}
    assert report.notes[-1].startswith("2 seeds are left out: fp32 itself does not reach the loss")
    assert Linear.calls < 2 * 9 * 90  # all arms stop after about twice the horizon


def test_a_task_without_a_held_out_loss_is_refused():
    def silent(device, seed):
        model, data, loss, options = make(device, seed)
        return model, data, loss, options | {"evaluate": lambda _: 0.5}

    job = measure.Job(
        device="cpu", precision="bf16", seed=0, steps=None, make=silent, memory_make=silent
    )
    with pytest.raises(BrokenTask, match=r"options\['evaluate'\]: expected a dict with \"loss\""):
        until.run(job, 10, range(2), None)


@pytest.mark.parametrize("steps", [30, 79, 80])
def test_the_target_is_the_bases_loss_at_90_percent_of_its_steps(steps):
    job = measure.Job(
        device="cpu", precision="bf16", seed=0, steps=None, make=make, memory_make=make
    )
    (base,) = (config for config in job.list_arms() if config.name == "fp32")
    curve = until._train(job, [base], "fp32", 0, steps, -math.inf)["fp32"]
    assert steps <= curve.steps[-1] <= steps + 2
    wanted = np.interp(0.9 * steps, curve.steps, curve.smooth())
    assert until._loss_at(job, base, 0, steps) == pytest.approx(wanted)


def make_with(**changed):
    """Return `make` with changed options."""

    def made(device, seed):
        model, data, loss, options = make(device, seed)
        own = {name: value for name, value in changed.items() if name != "model"}
        return changed.get("model", model), data, loss, options | own

    return made


def test_a_schedule_ends_with_its_horizon():
    rates = []

    class Falling(torch.optim.lr_scheduler.LambdaLR):
        def step(self, *args):
            super().step(*args)
            rates.extend(self.get_last_lr())

    task = make_with(schedule=lambda o, n: Falling(o, lambda step: 1 - step / n), arms={})
    job = measure.Job(
        device="cpu", precision="bf16", seed=0, steps=None, make=task, memory_make=task
    )
    (base,) = (config for config in job.list_arms() if config.name == "fp32")
    curve = until._train(job, [base], "fp32", 0, 20, -1.0)["fp32"]
    assert curve.steps[-1] == 40
    assert min(rates) == pytest.approx(0.0)
    assert len(rates) == 20 + 1  # and the one when it is made


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"schedule": lambda o, n: None}, "options['schedule']: expected a scheduler of torch's"),
        ({"schedule": lambda o, n: 1 / 0}, "options['schedule']: its call or its step raised"),
        (
            {"arms": {"own": lambda m: m.register_buffer("n", torch.zeros(1)) or m}},
            "model: expected the parameters and buffers of the task's model in every arm",
        ),
    ],
)
def test_what_cannot_be_raced_to_a_loss_is_refused(changed, said):
    task = make_with(**changed)
    job = measure.Job(
        device="cpu", precision="bf16", seed=0, steps=None, make=task, memory_make=task
    )
    with pytest.raises(BrokenTask) as error:
        until.run(job, 10, range(2), 0.5)
    assert said in error.value.line


def test_a_loss_that_is_no_number_is_never_reached():
    assert make_curve([4.0, math.inf, 0.9, math.inf, 4.0]).cross(1.5) is None
