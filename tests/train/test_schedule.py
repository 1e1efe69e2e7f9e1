"""fine_tune's learning rate: on a GPU it learns of a skipped step one step late, without a wait.

The GPU is played, or is the model of streams.
"""

from __future__ import annotations

import math

import pytest
import torch
from support.fake_gpu import FakeGpu, install
from support.stream_devices import Event
from support.stream_model import Model
from support.trainable import CrashError, act_at, crash, outcome, run
from torch.optim.lr_scheduler import LambdaLR

import fastamp
from fastamp.train import CheckpointError
from fastamp.train.optimizer import Schedule

OVERFLOWS = {0, 2, 3}
STEPS = 8
SHORT = {"max_steps": 20, "device": "cpu"}
ADVANCE = Schedule.advance


class ReportOnGpu:
    """What is asked of a step's report on CUDA."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, gpu, report):
        self.gpu, self.report = gpu, report

    def to(self, device, *, non_blocking):
        assert device == "cpu"
        assert non_blocking
        return self.gpu.copy(self.report)


@pytest.fixture
def gpu(monkeypatch):
    """Let the reports lie on a GPU that tests play: one that is read too early is NaN."""
    gpu = FakeGpu()
    install(gpu, monkeypatch)

    def advance_there(schedule, report):
        gpu.work(5.0)
        waits = gpu.waits
        ADVANCE(schedule, ReportOnGpu(gpu, report))
        assert gpu.waits == waits  # the report before has been read by then, this one has not

    monkeypatch.setattr(Schedule, "advance", advance_there)
    return gpu


@pytest.fixture(params=["cpu", "gpu"])
def place(request):
    """Return the GPU, or None on the CPU."""
    return request.getfixturevalue("gpu") if request.param == "gpu" else None


def halved(n_taken):
    return 0.5**n_taken


def make(lr_factor=halved):
    """Return a parameter, its optimizer and its schedule."""
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    return parameter, optimizer, Schedule(optimizer, lr_factor, lambda _: None)


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
def test_each_step_has_the_rate_of_torchs_schedule_and_nothing_waits_for_it(kind, place):
    config = fastamp.TrainConfig(schedule=kind, warmup_steps=3, device="cpu")

    def lr_factor(n):
        return config.lr_factor(n, STEPS)

    (parameter, optimizer, schedule), (expected, stock, _) = make(lr_factor), make()
    by_torch = LambdaLR(stock, lr_factor)
    for step in range(STEPS):
        assert schedule.read() == stock.param_groups[0]["lr"]
        assert place is None or place.waits == step  # for the reports of the steps before
        for each in (parameter, expected):
            each.grad = torch.tensor(math.inf if step in OVERFLOWS else 1.0)
        report = fastamp.optimizer_step(optimizer, 10.0)
        schedule.advance(torch.stack([report.norm, report.found_inf]))
        if step not in OVERFLOWS:
            stock.step()
            by_torch.step()
        assert parameter.item() == pytest.approx(expected.item())
    assert schedule.read() == stock.param_groups[0]["lr"]


@pytest.mark.filterwarnings("error")  # as torch's, of a schedule that steps before its optimizer
def test_a_run_on_a_gpu_is_that_on_the_cpu_and_asks_once_a_step(gpu):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Schedule, "advance", ADVANCE)
        expected = outcome(*run(**SHORT))
    assert gpu.waits == 0
    n_skipped = expected[-1]
    assert 0 < n_skipped < 20  # else there is nothing to wait for
    assert outcome(*run(**SHORT)) == expected
    assert gpu.waits == 20


@pytest.mark.parametrize("step", [2, 7, 13])
def test_a_run_on_a_gpu_that_crashed_goes_on_to_the_bit(step, gpu, tmp_path):
    """A checkpoint knows of the step before it, in the schedule and in the optimizer."""
    expected = outcome(*run(**SHORT))
    fields = SHORT | {"checkpoint_every": 1}
    with pytest.raises(CrashError):
        run(tmp_path, loss_fn=act_at(step, crash), **fields)
    assert outcome(*run(tmp_path, **fields)) == expected


def test_a_learning_rate_of_a_callable_that_has_changed_is_refused_with_both(tmp_path):
    """As one of `lr` is."""
    rates = [0.1, 0.2, 0.1]
    fields = {"max_steps": 4, "checkpoint_every": 2}

    def make_optimizer(parameters):
        weights, *rest = parameters
        return torch.optim.SGD([{"params": [weights]}, {"params": rest, "lr": 1.0}], lr=rates.pop())

    with pytest.raises(CrashError):
        run(tmp_path, optimizer=make_optimizer, loss_fn=act_at(4, crash), **fields)
    names_both = r"learning rates of groups=\[0.1, 1.0\], this run \[0.2"
    with pytest.raises(CheckpointError, match=names_both):
        run(tmp_path, optimizer=make_optimizer, **fields)
    _, result = run(tmp_path, optimizer=make_optimizer, **fields)
    assert result.lr.values[0] == pytest.approx(0.1 / 5)


def advance_on_streams(seed):
    """Advance after steps on several streams of a device, and return what was found."""
    model = Model(seed)
    with model.installed():
        _, optimizer, schedule = make()
        optimizer.step()  # or torch warns of a schedule that steps first
        streams = [model.Stream(1), model.Stream(1)]
        n_taken = 0
        for step in range(12):
            before, stream = model.current_stream(1), model.rng.choice(streams)
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                report = torch.empty(2, device="cuda:1").fill_(float(step in OVERFLOWS))
                schedule.advance(report)
                del report  # its memory, and the copy's, may be used again
                n_taken += step not in OVERFLOWS
                if model.rng.random() < 0.7:
                    assert schedule.read() == 0.5**n_taken
            model.set_stream(stream)
        schedule.read()
    assert optimizer.param_groups[0]["lr"] == 0.5**n_taken
    assert model.num_staged == 0
    return model.found


def test_a_report_has_arrived_when_it_is_read():
    for seed in range(20):
        assert advance_on_streams(seed) == [], seed


BREAKS = {
    "read without a wait": ("synchronize", lambda _: None),
    "noted on another stream": (
        "record",
        lambda event, _, record=Event.record: record(event, event.model.defaults[1]),
    ),
}


@pytest.mark.parametrize("fault", BREAKS)
def test_a_report_that_may_not_have_arrived_is_found(fault, monkeypatch):
    monkeypatch.setattr(Event, *BREAKS[fault])
    assert any("a read of pinned" in each for each in advance_on_streams(0))
