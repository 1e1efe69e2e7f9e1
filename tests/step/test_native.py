"""Steps that fastamp makes itself: one result on all backends, which is torch's, and its state."""

import copy
import itertools
import math
import sys
import warnings
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch
from support.bits import bits
from support.gradients import parameters_with
from support.reference import update

import fastamp
from fastamp import _ops

SIZES = [(3,), (70, 5), (0,), (1025,), (70_000,)]
RULES = {
    "adamw": (torch.optim.AdamW, {}),
    "adamw, amsgrad, maximize": (torch.optim.AdamW, {"amsgrad": True, "maximize": True}),
    "adam, near end": (torch.optim.Adam, {"weight_decay": 0.1, "betas": (0.3, 0.99)}),
    "adam, amsgrad": (torch.optim.Adam, {"weight_decay": 0.1, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"weight_decay": 0.1}),
    "sgd, nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgd, dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.01}),
}


def make(name, dtype=torch.float32, *, sizes=SIZES, **options):
    """Return parameters, the same each time, and their optimizer with two groups."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in sizes]
    cls, given = RULES[name]
    groups = [{"params": made[:2]}, {"params": made[2:], "lr": 3e-3}]
    return made, cls([g for g in groups if g["params"]], **{"lr": 1e-2, **given, **options})


def give(parameters, scale=1.0, seed=0, dtype=None):
    """Give parameters random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        grad = torch.randn(p.shape, generator=generator) * scale
        p.grad = grad.to(p.dtype).as_strided(p.shape, p.stride())


def scaler_of(cls=fastamp.GradScaler, **options):
    scaler = cls("cpu", **{"init_scale": 1024.0, **options})
    scaler.scale(torch.ones(()))
    return scaler


def train(name, dtype, steps, *, overflows=(), **options):
    """Train with overflows at some steps; return all that came of it."""
    parameters, optimizer = make(name, dtype, **options)
    scaler = scaler_of()
    for step in range(steps):
        give(parameters, scaler.get_scale(), seed=step)
        if step in overflows:
            parameters[0].grad[0] = math.inf
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        scaler.step(optimizer, max_norm=0.5)
        assert scaler.last_step.skipped == (step in overflows)
        scaler.update()
    return parameters, optimizer, scaler


def everything(parameters, optimizer):
    """Return the bits of parameters, gradients and states."""
    states = [v for p in parameters for v in optimizer.state.get(p, {}).values() if v is not None]
    grads = [p.grad for p in parameters if p.grad is not None]
    return [bits(t.detach()).tobytes() for t in [*parameters, *grads, *states]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", RULES)
def test_all_backends_get_the_same_bits(name, dtype, compiled):
    found = []
    for backend in (nullcontext(), _ops.use_only("fallback")):
        with backend:
            parameters, optimizer, scaler = train(name, dtype, 6, overflows=(0, 1, 4), fused=True)
            assert scaler.last_step.way.startswith("native")
            found.append(everything(parameters, optimizer))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", RULES)
def test_one_step_is_the_float64_result_to_a_few_ulp(name, backend):
    parameters, optimizer = make(name, fused=True)
    kind = type(optimizer).__name__
    for step in range(1, 4):
        give(parameters, seed=step)
        expected = []
        for group, p in ((g, p) for g in optimizer.param_groups for p in g["params"]):
            state = {k: v.clone().numpy() for k, v in optimizer.state.get(p, {}).items()}
            state.pop("step", None)
            states = [*state.values()] or [np.zeros(p.shape)] * 3
            if step == 1 and kind == "SGD" and group["momentum"]:
                group, states = group | {"dampening": 0}, states[:1]  # noqa: PLW2901 - as torch
            tensors = (p.detach().clone().numpy(), p.grad.numpy(), *states)
            expected.append(update(kind, group, step, *tensors))
        fastamp.optimizer_step(optimizer)
        for parameter, (value, largest) in zip(parameters, expected, strict=True):
            # Up to seven products, sums, roots and quotients are rounded, each by half an ulp.
            error = np.abs(parameter.detach().numpy().astype(np.float64) - value)
            assert (error <= 4 * np.spacing(largest.astype(np.float32))).all()


@pytest.mark.parametrize("name", RULES)
def test_after_50_steps_it_is_as_near_to_float64_as_torchs_own(name, backend):
    errors = {}
    exact, exact_optimizer = make(name, torch.float64, foreach=True, sizes=SIZES[:4])
    for ours in (True, False):
        parameters, optimizer = make(name, fused=True, sizes=SIZES[:4])
        for step in range(50):
            give(parameters, seed=step)
            if not ours:
                give(exact, seed=step)
                exact_optimizer.step()
            fastamp.optimizer_step(optimizer) if ours else optimizer.step()
        errors[ours] = parameters
    ours, theirs = (
        torch.cat([(p.double() - e).abs().flatten() for p, e in zip(errors[o], exact, strict=True)])
        for o in (True, False)
    )
    assert ours.max() <= 2 * theirs.max()
    assert ours.median() <= 2 * theirs.median()


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize("name", RULES)
def test_torchs_own_step_goes_on_in_the_middle(name, fused, backend):
    found = []
    for native in ({0, 1, 2, 3}, {0, 3}, {1, 2}):
        parameters, optimizer = make(name, fused=fused)
        for step in range(4):
            give(parameters, seed=step)
            if step in native:
                fastamp.optimizer_step(optimizer)
            else:
                optimizer.step()
            if step == 1:  # as a checkpoint does
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = type(optimizer)(optimizer.param_groups)
                optimizer.load_state_dict(saved)
        steps = [s["step"].item() for s in optimizer.state.values() if "step" in s]
        assert steps == [4.0] * len(steps)
        found.append(torch.cat([p.detach().flatten() for p in parameters]))
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_a_skipped_step_writes_nothing(name, backend):
    parameters, optimizer, scaler = train(name, torch.float32, 2)
    give(parameters, scaler.get_scale())
    parameters[1].grad[3] = math.nan
    before = everything(parameters, optimizer)
    scaler.step(optimizer, max_norm=1.0)
    assert scaler.last_step.skipped
    assert everything(parameters, optimizer) == before


@pytest.mark.parametrize("options", [{"fused": True}, {}], ids=["fused", "left open"])
def test_momentum_of_a_first_step_that_overflows_is_that_of_none(options, backend):
    # torch's fused SGD takes what lies in fresh memory for momentum.
    parameters, *_ = train("sgd, nesterov", torch.float32, 3, overflows=(0,), **options)
    expected, own = make("sgd, nesterov", foreach=False)
    for step in (1, 2):
        give(expected, seed=step)
        own.param_groups[0]["lr"] = 1e-2 / (1 + step)
        torch.nn.utils.clip_grad_norm_(expected, 0.5)
        own.step()
    torch.testing.assert_close(parameters, expected)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("adamw", {"foreach": True}, "foreach=True"),
        ("adamw", {"foreach": False}, "foreach=False"),
        ("sgd", {"fused": False}, "fused=False"),
        ("adamw", {"betas": (torch.tensor(0.9), torch.tensor(0.99))}, "betas"),
        ("sgd, dampening", {}, "the first step of SGD with dampening"),
    ],
)
def test_what_was_asked_for_is_torchs(name, options, reason, backend):
    results = []
    for ours in (True, False):
        parameters, optimizer = make(name, sizes=SIZES[:2], **options)
        give(parameters)
        if ours:
            report = fastamp.optimizer_step(optimizer, max_norm=1e9)
            assert reason in report.way
        else:
            optimizer.step()
        results.append(everything(parameters, optimizer))
    assert results[0] == results[1]


class Subclass(torch.optim.AdamW):
    """It may do anything in its step."""


def hooked(optimizer):
    optimizer.register_step_post_hook(lambda *_: None)


def patched(optimizer):
    own = optimizer.step

    def step(*args):
        return own(*args)

    optimizer.step = step


@pytest.mark.parametrize("change", [hooked, patched])
def test_hooks_and_patches_that_are_not_known_see_the_step(change, backend):
    parameters, optimizer = make("adamw", sizes=SIZES[:2])
    change(optimizer)
    give(parameters)
    report = fastamp.optimizer_step(optimizer, max_norm=1.0)
    assert not report.way.startswith("native")


def test_a_subclass_steps_itself(backend):
    parameters, _ = make("adamw", sizes=SIZES[:2])
    give(parameters)
    report = fastamp.optimizer_step(Subclass(parameters), max_norm=1.0)
    assert "Subclass is not one of torch's own" in report.way


def test_a_class_whose_step_is_patched_steps_itself(backend, monkeypatch):
    parameters, optimizer = make("sgd", sizes=SIZES[:2])
    own, calls = torch.optim.SGD.step, []

    def step(self, closure=None):
        calls.append(self)
        return own(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", step)
    give(parameters)
    fastamp.optimizer_step(optimizer, max_norm=1.0)
    assert calls == [optimizer]


@pytest.mark.parametrize("on_class", [True, False])
def test_a_mock_in_place_of_step_sees_one_call_and_nothing_else(on_class, backend):
    parameters, optimizer = make("sgd", sizes=SIZES[:2])
    give(parameters)
    with mock.patch.object(torch.optim.SGD if on_class else optimizer, "step") as step:
        report = fastamp.optimizer_step(optimizer, max_norm=1.0)
    assert "patched" in report.way
    assert step.mock_calls == [mock.call()]


def test_a_scheduler_learns_of_the_step(backend):
    parameters, optimizer = make("adamw", sizes=SIZES[:2])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    give(parameters)
    report = fastamp.optimizer_step(optimizer, max_norm=1.0)
    assert report.way.startswith("native")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_a_profiler_finds_the_range_of_the_step(backend):
    parameters, optimizer = make("adamw", sizes=SIZES[:2])
    give(parameters)
    fastamp.optimizer_step(optimizer, max_norm=1.0)
    with torch.profiler.profile() as profile:
        fastamp.optimizer_step(optimizer, max_norm=1.0)
    names = [event.key for event in profile.key_averages()]
    assert "Optimizer.step#AdamW.step" in names


def add_parameter(parameters, optimizer):
    parameters.append(torch.nn.Parameter(torch.ones(7)))
    optimizer.add_param_group({"params": parameters[-1:]})


def drop_parameter(parameters, optimizer):
    optimizer.param_groups[1]["params"].pop()


def replace_data(parameters, _optimizer):
    parameters[1].data = parameters[1].data.clone() + 1


def replace_state(parameters, optimizer):
    state = optimizer.state[parameters[1]]
    state["exp_avg"] = state["exp_avg"].clone() * 2


def replace_states_data(parameters, optimizer):
    exp_avg = optimizer.state[parameters[1]]["exp_avg"]
    exp_avg.data = exp_avg.data.clone() * 2


def change_group(_parameters, optimizer):
    optimizer.param_groups[1].update(lr=0.5, betas=(0.5, 0.6), weight_decay=0.0, eps=1e-3)


def change_dtype(parameters, optimizer):
    parameters[1].grad = None
    parameters[1].data = parameters[1].data.bfloat16()
    del optimizer.state[parameters[1]]


def load(_parameters, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def lose_state(parameters, optimizer):
    del optimizer.state[parameters[0]]


@pytest.mark.parametrize(
    "change",
    [
        add_parameter,
        drop_parameter,
        replace_data,
        replace_state,
        replace_states_data,
        change_group,
        change_dtype,
        load,
        lose_state,
    ],
)
def test_every_change_between_steps_is_noticed(change, backend):
    found = []
    for ours in (True, False):
        parameters, optimizer = make("adamw", sizes=SIZES[:4])
        for step in range(4):
            if step == 2:
                change(parameters, optimizer)
            give(parameters, seed=step)
            fastamp.optimizer_step(optimizer) if ours else optimizer.step()
        found.append([p.detach().float() for p in parameters])
    coarse = change is change_dtype  # torch's loop over 16-bit parameters rounds each operation
    torch.testing.assert_close(*found, rtol=1e-5, atol=2e-2 if coarse else 1e-6)


def test_layouts_that_differ_are_torchs(backend):
    parameter = torch.nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    before = parameter.detach().clone()
    parameter.grad = torch.randn(2, 3, 4, 4)
    grad = parameter.grad.clone()
    report = fastamp.optimizer_step(optimizer, max_norm=1e9)
    assert "a gradient's dtype, layout or device" in report.way
    torch.testing.assert_close(parameter.detach(), before - grad)


def test_dense_layouts_are_updated_as_they_lie(backend):
    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        data = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
        parameter = torch.nn.Parameter(data)
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        for _ in range(2):
            parameter.grad = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
            if ours:
                assert fastamp.optimizer_step(optimizer, 1e9).way.startswith("native")
            else:
                optimizer.step()
        found.append(parameter.detach())
    torch.testing.assert_close(*found)


def test_parameters_that_share_memory_are_torchs(backend):
    memory = torch.ones(10)
    parameters = [torch.nn.Parameter(memory[:6]), torch.nn.Parameter(memory[:6])]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    give(parameters)
    assert "share their memory" in fastamp.optimizer_step(optimizer, max_norm=1e9).way


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("options", [{"fused": True}, {}, {"foreach": True}], ids=str)
def test_consumed_gradients_are_none_and_change_no_result(options, skips, backend):
    found = []
    for zero_grad in (True, False):
        parameters, optimizer = make("adamw", sizes=SIZES[:4], **options)
        scaler = scaler_of()
        for step in range(3):
            give(parameters, scaler.get_scale(), seed=step)
            if skips and step == 1:
                parameters[0].grad[0] = math.inf
            scaler.step(optimizer, max_norm=0.5, zero_grad=zero_grad)
            scaler.update()
            assert all((p.grad is None) == zero_grad for p in parameters)
        found.append([bits(p.detach()).tobytes() for p in parameters])
        if zero_grad:
            module = torch.nn.ParameterList(parameters)
            with pytest.raises(RuntimeError, match="zero_grad=True: the last step left no grad"):
                scaler.nonfinite_parameters(module)
    assert found[0] == found[1]


def test_float16_gradients_of_an_optimizer_left_open_are_refused_as_in_torch(backend):
    parameters, optimizer = make("adamw", torch.float16)
    give(parameters)
    before = everything(parameters, optimizer)
    scaler = scaler_of()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.step(optimizer, max_norm=1.0)
    assert everything(parameters, optimizer)[: len(before)] == before


def test_two_optimizers_are_clipped_to_one_norm(backend):
    parameters = parameters_with(torch.full((1,), 3.0), torch.full((1,), 4.0))
    optimizers = [torch.optim.SGD(parameters[:1], lr=1.0), torch.optim.AdamW(parameters[1:])]
    report = fastamp.optimizer_step(optimizers, max_norm=1.0)
    assert report.way.startswith("native")
    assert (report.norm.item(), parameters[0].grad.item()) == (5.0, pytest.approx(0.6))


def test_the_step_holds_no_gradient_afterwards(backend):
    parameters, optimizer = make("adamw")
    give(parameters)
    grad = parameters[0].grad
    before = sys.getrefcount(grad)
    fastamp.optimizer_step(optimizer, max_norm=1.0)
    assert sys.getrefcount(grad) == before


def test_versions_count_as_torch_counts_them(backend):
    parameters, optimizer = make("adamw", sizes=SIZES[:1])
    give(parameters)
    before = parameters[0]._version
    fastamp.optimizer_step(optimizer, max_norm=1.0)
    assert parameters[0]._version > before


@pytest.mark.parametrize("optimizer", [None, 5, "adam"])
def test_what_is_no_optimizer_is_refused_by_name(optimizer):
    with pytest.raises(TypeError, match="optimizer"):
        fastamp.optimizer_step(optimizer)


def test_dtypes_of_parameters_may_be_mixed(compiled):
    found = []
    for backend in (nullcontext(), _ops.use_only("fallback")):
        with backend:
            dtypes = (torch.float32, torch.bfloat16, torch.float16)
            parameters = [
                torch.nn.Parameter(torch.ones(n, dtype=d))
                for d, n in itertools.product(dtypes, (1, 600, 70_001))
            ]
            optimizer = torch.optim.AdamW(parameters, lr=0.1)
            for step in range(3):
                give(parameters, seed=step)
                fastamp.optimizer_step(optimizer, max_norm=1.0)
            found.append(everything(parameters, optimizer))
    assert found[0] == found[1]
