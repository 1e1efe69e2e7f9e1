"""Schedules that a step steps: stock's learning rates, without a wait in the same step."""

import copy
import gc
import io
import math
import pickle
import warnings
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from support.fake_gpu import FakeGpu, install
from torch.optim import lr_scheduler

import fastamp
from fastamp.step import scaler as scaler_module
from fastamp.step import schedule

OVERFLOWS = {0, 2, 3}
STEPS = 8


def sequential(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.StepLR(optimizer, 1)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


def chained(optimizer):
    parts = [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.StepLR(optimizer, 2)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


class OwnScheduler:
    """It is no LRScheduler."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.param_groups[0]["lr"] *= 0.5


class SlottedScheduler:
    """It has no place to keep what it waits for."""

    __slots__ = ("optimizer",)
    __init__, step = OwnScheduler.__init__, OwnScheduler.step


SCHEDULERS = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, STEPS),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n)),
    "sequential": sequential,
    "chained": chained,
    "no LRScheduler": OwnScheduler,
}


class FlagOnGpu:
    """What is asked of found_inf on CUDA."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self, gpu, found_inf):
        self.gpu, self.found_inf = gpu, found_inf

    def to(self, device, *, non_blocking):
        assert device == "cpu"
        assert non_blocking
        return self.gpu.copy(self.found_inf)


@pytest.fixture
def gpu(monkeypatch):
    """Let flags lie on a GPU that tests play."""
    gpu = FakeGpu()
    install(gpu, monkeypatch)

    def advance(schedulers, optimizers, report):
        gpu.work(5.0)
        there = SimpleNamespace(found_inf=FlagOnGpu(gpu, report.found_inf))
        schedule.advance(schedulers, optimizers, there)

    monkeypatch.setattr(scaler_module, "advance", advance)
    return gpu


@pytest.fixture(params=["cpu", "gpu"])
def place(request):
    """Return the GPU, or None on the CPU."""
    return request.getfixturevalue("gpu") if request.param == "gpu" else None


def make(kind="step", cls=torch.optim.SGD, **options):
    """Return a parameter, its optimizer and its scheduler."""
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = cls([parameter], lr=1.0, **options)
    return parameter, optimizer, SCHEDULERS[kind](optimizer)


def give(parameter, *, overflows=False):
    parameter.grad = torch.tensor(math.inf if overflows else 1.0)


def stepped(kind="step"):
    """Return what is there after one step that was taken."""
    parameter, optimizer, scheduler = make(kind)
    give(parameter)
    fastamp.optimizer_step(optimizer, 10.0, scheduler=scheduler)
    return parameter, optimizer, scheduler


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # torch 2.6 warns of its own call
@pytest.mark.parametrize("options", [{"fused": True}, {}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("with_scaler", [True, False])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_each_step_has_stocks_learning_rate_and_nothing_waits(kind, with_scaler, options, place):
    found = []
    for ours in (True, False):
        parameter, optimizer, scheduler = make(kind, momentum=0.9, **options)
        scaler = fastamp.GradScaler("cpu", init_scale=1.0, enabled=with_scaler)
        scaler.scale(torch.ones(()))
        values = []
        for step in range(STEPS):
            give(parameter, overflows=step in OVERFLOWS)
            waits = place and place.waits
            if not ours:
                if step not in OVERFLOWS:
                    optimizer.step()
                    scheduler.step()
            elif with_scaler:
                scaler.step(optimizer, max_norm=10.0, scheduler=scheduler)
                scaler.update(1.0)
            else:
                fastamp.optimizer_step(optimizer, 10.0, scheduler=scheduler)
            if ours and place:  # for the flag of the step before
                assert place.waits - waits == (step > 0)
            values.append(parameter.item())
        rate = [scheduler.optimizer.param_groups[0][name] for name in ("lr", "momentum")]
        found.append((values, rate))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert found[0][1] == found[1][1]


def saved(scheduler):
    file = io.BytesIO()
    torch.save(scheduler.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)["last_epoch"]


ASKS = {
    "get_last_lr": lambda _, scheduler: scheduler.get_last_lr() == [0.5],
    "state_dict": lambda _, scheduler: scheduler.state_dict()["_last_lr"] == [0.5],
    "torch.save": lambda _, scheduler: saved(scheduler) == 1,
    "last_epoch": lambda _, scheduler: scheduler.last_epoch == 1,
    "vars": lambda _, scheduler: vars(scheduler)["last_epoch"] == 1,
    "__class__": lambda _, scheduler: scheduler.__class__ is lr_scheduler.StepLR,
    "copy": lambda _, scheduler: copy.copy(scheduler).last_epoch == 1,
    "deepcopy": lambda _, scheduler: copy.deepcopy(scheduler).last_epoch == 1,
    "pickle": lambda _, scheduler: pickle.loads(pickle.dumps(scheduler)).last_epoch == 1,
    "optimizer.state_dict": lambda o, _: o.state_dict()["param_groups"][0]["lr"] == 0.5,
}


@pytest.mark.parametrize("ask", ASKS)
def test_whoever_asks_hears_of_the_step(ask, place):
    _, optimizer, scheduler = stepped()
    assert isinstance(scheduler, lr_scheduler.LRScheduler)
    if place is not None:
        assert (place.waits, optimizer.param_groups[0]["lr"]) == (0, 1.0)
    assert ASKS[ask](optimizer, scheduler)
    if place is not None:
        assert place.waits == 1
    assert type(scheduler) is lr_scheduler.StepLR
    assert scheduler.state_dict().keys() == make()[2].state_dict().keys()
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_bare_step_of_the_optimizer_has_the_new_rate(place):
    parameter, optimizer, _ = stepped()
    for _ in range(2):
        give(parameter)
        optimizer.step()
    assert parameter.item() == -2.0


def test_a_step_without_the_argument_has_the_new_rate_and_is_native(place):
    parameter, optimizer, scheduler = stepped()
    give(parameter)
    assert fastamp.optimizer_step(optimizer).way.startswith("native, bare")
    give(parameter)
    assert fastamp.optimizer_step(optimizer, 10.0).way.startswith("native")
    assert (parameter.item(), scheduler.last_epoch) == (-2.0, 1)


def test_a_state_that_is_loaded_is_not_stepped_afterwards(place):
    _, optimizer, scheduler = make()
    state = optimizer.state_dict(), scheduler.state_dict()
    parameter, optimizer, scheduler = stepped()
    optimizer.load_state_dict(state[0])
    scheduler.load_state_dict(state[1])
    assert (optimizer.param_groups[0]["lr"], scheduler.last_epoch) == (1.0, 0)
    give(parameter)
    fastamp.optimizer_step(optimizer, scheduler=scheduler)
    assert (parameter.item(), scheduler.get_last_lr()) == (-2.0, [0.5])


def test_what_is_set_by_hand_is_not_stepped_over(place):
    _, _, scheduler = stepped()
    scheduler.last_epoch = 7
    assert scheduler.last_epoch == 7


def test_the_users_own_step_is_one_more(place):
    _, _, scheduler = stepped()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.25]


def test_several_schedulers_step_with_several_optimizers_or_not_at_all(place):
    made = [make(), make("lambda")]
    parameters, optimizers, schedulers = map(list, zip(*made, strict=True))
    for overflows in (False, True, False):
        give(parameters[0])
        give(parameters[1], overflows=overflows)
        fastamp.optimizer_step(optimizers, 10.0, scheduler=schedulers)
    assert [p.item() for p in parameters] == [-1.5, -1.5]
    assert [s.get_last_lr() for s in schedulers] == [[0.25], [1 / 3]]


def test_optimizers_that_step_in_turn_have_schedules_of_their_own(place):
    made = [make(), make()]
    for overflows in (False, True, False):
        for bad, (parameter, optimizer, scheduler) in zip((False, overflows), made, strict=True):
            give(parameter, overflows=bad)
            waits = place and place.waits
            fastamp.optimizer_step(optimizer, 10.0, scheduler=scheduler)
            assert place is None or place.waits <= waits + 1
    assert [s.last_epoch for _, _, s in made] == [3, 2]


def test_a_scheduler_that_cannot_be_watched_steps_at_once(gpu):
    parameter, optimizer, _ = make()
    give(parameter)
    fastamp.optimizer_step(optimizer, 10.0, scheduler=SlottedScheduler(optimizer))
    assert (gpu.waits, optimizer.param_groups[0]["lr"]) == (1, 0.5)


def test_an_optimizer_that_cannot_be_watched_waits_at_once(gpu):
    _, optimizer, scheduler = make()
    wrapper = mock.Mock(spec=["param_groups", "step"], param_groups=optimizer.param_groups)
    wrapper.step.side_effect = optimizer.step
    fastamp.optimizer_step(wrapper, scheduler=scheduler)
    assert (gpu.waits, type(scheduler)) == (1, lr_scheduler.StepLR)
    assert scheduler.last_epoch == 1


def test_nothing_is_kept_alive(place):
    _, optimizer, scheduler = stepped()
    dead = [weakref.ref(optimizer), weakref.ref(scheduler)]
    del optimizer, scheduler
    gc.collect()
    assert [ref() for ref in dead] == [None, None]


PLATEAU = r"^scheduler\[1\]: ReduceLROnPlateau steps by a metric"


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda _, s: [s, lr_scheduler.ReduceLROnPlateau(s.optimizer)], TypeError, PLATEAU),
        (lambda o, _: o, TypeError, "^scheduler: expected a learning rate scheduler, got a SGD"),
        (lambda *_: 0.1, TypeError, "^scheduler: expected a learning rate scheduler, got a float"),
        (lambda _, s: (s, s), ValueError, r"^scheduler\[1\]: expected each once"),
    ],
)
def test_what_is_no_scheduler_is_refused_before_anything_is_touched(change, error, text):
    parameter, optimizer, scheduler = make()
    give(parameter)
    for step in (fastamp.GradScaler("cpu").step, fastamp.optimizer_step):
        with pytest.raises(error, match=text):
            step(optimizer, max_norm=0.1, scheduler=change(optimizer, scheduler))
    assert (parameter.item(), parameter.grad.item(), scheduler.last_epoch) == (0.0, 1.0, 0)


def test_a_captured_step_steps_no_schedule(gpu):
    parameter, optimizer, scheduler = make()
    give(parameter)
    gpu.capturing = True
    with pytest.raises(RuntimeError, match="a captured step cannot"):
        fastamp.optimizer_step(optimizer, scheduler=scheduler)
    assert parameter.item() == 0.0


def test_torchs_warning_comes_only_if_it_is_right(place):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepped()[2].last_epoch  # noqa: B018 - it is asked
    _, _, scheduler = make()
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()
