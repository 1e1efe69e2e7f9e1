"""Which optimizers fastamp steps itself, who learns of it, and who gets torch's own step."""

import math
import warnings
from unittest import mock

import pytest
import torch
from support.gradients import parameters_with
from support.updates import RULES, SIZES, everything, give, make, scaler_of
from torch._subclasses.fake_tensor import FakeTensorMode

import fastamp
from fastamp import _ops


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("adamw", {"foreach": True}, "foreach=True"),
        ("adamw", {"foreach": False}, "foreach=False"),
        ("sgd", {"fused": False}, "fused=False"),
        ("adamw", {"betas": (torch.tensor(0.9), torch.tensor(0.99))}, "betas is not a number"),
        ("sgd, dampening", {}, "the first step of SGD with dampening"),
    ],
)
def test_what_was_asked_for_is_torchs(name, options, reason, compiled):
    results = []
    for ours in (True, False):
        parameters, optimizer = make(name, sizes=SIZES[:2], **options)
        give(parameters)
        if ours:
            report = fastamp.optimizer_step(optimizer, max_norm=1e9)
            assert report.way == f"torch's: {reason}"
        else:
            optimizer.step()
        results.append(everything(parameters, optimizer))
    assert results[0] == results[1]


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize("max_norm", [1.0, None])
def test_without_compiled_code_torch_updates(fused, max_norm):
    """fastamp's update in Python would take several times as long as torch's."""
    expected, stock = make("adamw", sizes=SIZES[:4], fused=fused)
    parameters, optimizer = make("adamw", sizes=SIZES[:4], fused=fused)
    for step in range(3):
        for each in (expected, parameters):
            give(each, seed=step)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(expected, max_norm)
        stock.step()
        with _ops.use_only("fallback"):
            way = fastamp.optimizer_step(optimizer, max_norm=max_norm).way
        assert way == "torch's: no compiled code for cpu"
    for ours, theirs in zip(parameters, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def hooked(optimizer):
    optimizer.register_step_post_hook(lambda *_: None)


def patched(optimizer):
    own = optimizer.step

    def step(*args):
        return own(*args)

    optimizer.step = step


@pytest.mark.parametrize(
    ("change", "reason"), [(hooked, "there is a step hook"), (patched, "optimizer.step is patched")]
)
def test_hooks_and_patches_that_are_not_known_see_the_step(change, reason, backend):
    parameters, optimizer = make("adamw", sizes=SIZES[:2])
    change(optimizer)
    give(parameters)
    report = fastamp.optimizer_step(optimizer, max_norm=1.0)
    assert report.way == f"torch's: {reason}"


class Empty(torch.optim.AdamW):
    """It overrides nothing that torch's step calls."""

    def more(self):
        return self.state


class OwnStep(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


class OwnGroup(torch.optim.AdamW):
    def _init_group(self, *args):
        return super()._init_group(*args)


class OwnAccess(torch.optim.AdamW):
    def __getattribute__(self, name):
        return super().__getattribute__(name)


class OwnState(torch.optim.AdamW):
    state = property(lambda self: self.own, lambda self, value: setattr(self, "own", value))


class OwnOptimizer(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.5})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad, alpha=0.5)


OVERRIDES = "overrides what torch's step calls"


@pytest.mark.parametrize(
    ("cls", "way"),
    [
        (Empty, "native"),
        (OwnStep, "torch's: OwnStep.step is patched, or its own"),
        (OwnGroup, f"torch's: OwnGroup {OVERRIDES}"),
        (OwnAccess, f"torch's: OwnAccess {OVERRIDES}"),
        (OwnState, f"torch's: OwnState {OVERRIDES}"),
        (OwnOptimizer, "torch's: OwnOptimizer is not torch's own"),
        (torch.optim.RMSprop, "torch's: fastamp has no update for RMSprop"),
    ],
)
def test_a_subclass_that_overrides_what_a_step_calls_steps_itself(cls, way, compiled):
    found = []
    for ours in (True, False):
        parameters, _ = make("adamw", sizes=SIZES[:2])
        optimizer = cls(parameters)
        for seed in range(2):
            give(parameters, seed=seed)
            if ours:
                assert fastamp.optimizer_step(optimizer, max_norm=1e9).way == way
            else:
                optimizer.step()
        found.append(parameters)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


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


@pytest.mark.parametrize("autospec", [None, True])
@pytest.mark.parametrize("on_class", [True, False])
def test_a_mock_in_place_of_step_sees_one_call_and_nothing_else(on_class, autospec, backend):
    parameters, optimizer = make("sgd", sizes=SIZES[:2])
    give(parameters)
    target = torch.optim.SGD if on_class else optimizer
    with mock.patch.object(target, "step", autospec=autospec) as step:
        report = fastamp.optimizer_step(optimizer, max_norm=1.0)
    assert "patched" in report.way
    assert step.call_count == 1


def test_a_scheduler_learns_of_the_step(compiled):
    parameters, optimizer = make("adamw", sizes=SIZES[:2])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    give(parameters)
    report = fastamp.optimizer_step(optimizer, max_norm=1.0)
    assert report.way == "native"
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


def test_layouts_that_differ_are_torchs(compiled):
    parameter = torch.nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    before = parameter.detach().clone()
    parameter.grad = torch.randn(2, 3, 4, 4)
    grad = parameter.grad.clone()
    report = fastamp.optimizer_step(optimizer, max_norm=1e9)
    assert report.way == "torch's: a gradient's dtype, layout or device"
    torch.testing.assert_close(parameter.detach(), before - grad)


def test_dense_layouts_are_updated_as_they_lie(compiled):
    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        data = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
        parameter = torch.nn.Parameter(data)
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        for _ in range(2):
            parameter.grad = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
            if ours:
                assert fastamp.optimizer_step(optimizer, 1e9).way == "native"
            else:
                optimizer.step()
        found.append(parameter.detach())
    torch.testing.assert_close(*found)


def test_parameters_that_share_memory_are_torchs(compiled):
    memory = torch.ones(10)
    parameters = [torch.nn.Parameter(memory[:6]), torch.nn.Parameter(memory[:6])]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    give(parameters)
    way = fastamp.optimizer_step(optimizer, max_norm=1e9).way
    assert way == "torch's: tensors share their memory"


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_gradients_that_are_negated_views_are_torchs(cls, max_norm, compiled):
    """Autograd makes them where a part of a complex number is one parameter."""
    results = []
    for ours in (True, False):
        parts = [torch.nn.Parameter(torch.tensor(value)) for value in (0.5, -2.0)]
        optimizer = cls(parts, lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            ((torch.complex(*parts).conj() * (1 + 2j) - (3 - 1j)).abs() ** 2).backward()
            assert parts[1].grad.is_neg()
            if ours:
                way = fastamp.optimizer_step(optimizer, max_norm).way
                assert way == "torch's: a negated view"
            else:
                if max_norm is not None:
                    torch.nn.utils.clip_grad_norm_(parts, max_norm, foreach=False)
                optimizer.step()
        results.append([part.item() for part in parts])
    assert results[0] == pytest.approx(results[1], rel=1e-6)


def test_a_parameter_that_stands_twice_in_a_group_is_torchs(compiled):
    results = []
    for ours in (True, False):
        parameter = torch.nn.Parameter(torch.ones(3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = torch.optim.SGD([parameter, parameter], lr=0.1, momentum=0.9)
        for _ in range(3):
            give([parameter])
            fastamp.optimizer_step(optimizer) if ours else optimizer.step()
        results.append(parameter.tolist())
    assert results[0] == results[1]


def test_float16_gradients_of_an_optimizer_left_open_are_refused_as_in_torch(backend):
    parameters, optimizer = make("adamw", torch.float16)
    give(parameters)
    before = everything(parameters, optimizer)
    scaler = scaler_of()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.step(optimizer, max_norm=1.0)
    assert everything(parameters, optimizer)[: len(before)] == before


def test_two_optimizers_are_clipped_to_one_norm(compiled):
    parameters = parameters_with(torch.full((1,), 3.0), torch.full((1,), 4.0))
    optimizers = [torch.optim.SGD(parameters[:1], lr=1.0), torch.optim.AdamW(parameters[1:])]
    report = fastamp.optimizer_step(optimizers, max_norm=1.0)
    assert report.way == "native"
    assert (report.norm.item(), parameters[0].grad.item()) == (5.0, pytest.approx(0.6))


@pytest.mark.parametrize(
    ("max_norm", "value", "written"),
    [
        (1.0, 1.0, [True, True]),
        (1e9, 1.0, [True, False]),  # not clipped
        (None, 1.0, [True, False]),
        (1.0, math.inf, [False, False]),
    ],
)
def test_versions_count_what_is_written(max_norm, value, written, backend):
    """A graph that is kept may be gone through again where nothing of it is."""
    parameters, optimizer = make("adamw", sizes=SIZES[:1])
    give(parameters)
    parameters[0].grad[0] = value
    tensors = parameters[0], parameters[0].grad
    before = [tensor._version for tensor in tensors]
    fastamp.optimizer_step(optimizer, max_norm=max_norm)
    if backend == "emulated" and max_norm is not None:  # as a GPU, it does not tell the host
        written = [True, True]
    assert [t._version > b for t, b in zip(tensors, before, strict=True)] == written


def test_a_graph_whose_saved_tensors_are_cloned_is_gone_through_again(backend):
    def gradients(step):
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            loss = parameter.square().sum()
            loss.backward(retain_graph=True)
            step(optimizer)
            optimizer.zero_grad()
            loss.backward()
        return parameter.grad.tolist()

    assert gradients(fastamp.optimizer_step) == gradients(torch.optim.SGD.step) == [2.0, 2.0]
    if torch.__version__ >= (2, 10):  # before, torch's own clipping fails there
        clip = gradients(lambda o: fastamp.clip_grad_norm_(o.param_groups[0]["params"], 0.1))
        assert clip == [2.0, 2.0]


def test_a_hook_may_step_another_optimizer(backend):
    parameters, optimizer = make("sgd", sizes=SIZES[:1])
    others, other = make("adamw", sizes=SIZES[:1])
    give(parameters)
    give(others, math.inf)
    optimizer.register_step_post_hook(lambda *_: fastamp.optimizer_step(other, max_norm=1.0))
    report = fastamp.optimizer_step(optimizer, max_norm=1.0)
    assert report.norm.isfinite()
    assert not report.skipped


def test_several_optimizers_may_have_no_gradients(backend):
    optimizers = [make("sgd", sizes=SIZES[:1])[1] for _ in range(2)]
    assert fastamp.optimizer_step(optimizers, max_norm=1.0).norm == 0
    scaler = fastamp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizers)


def test_who_replaces_the_unscaling_is_asked(backend):
    """As scripts do that train in float16, where torch refuses it."""
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    parameter.grad = torch.ones_like(parameter)
    scaler = fastamp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    unscale = scaler._unscale_grads_
    scaler._unscale_grads_ = lambda *args: unscale(*args[:-1], True)
    scaler.step(torch.optim.SGD([parameter], lr=0.5))
    assert parameter.tolist() == [0.75] * 3


def test_the_scaler_of_a_transform_steps_outside_of_it(compiled):
    scaler, weight = fastamp.GradScaler("cpu"), torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.func.grad(lambda w: scaler.scale(w.square().sum()))(weight.detach())
    scaler.step(torch.optim.SGD([weight], lr=0.25), max_norm=10.0)
    assert weight.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("optimizer", [None, 5, "adam"])
def test_what_is_no_optimizer_is_refused_by_name(optimizer):
    with pytest.raises(TypeError, match="optimizer"):
        fastamp.optimizer_step(optimizer)


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize(("given", "drops"), [("yes", True), ([], False)])
def test_whether_to_zero_gradients_may_be_any_object(given, drops, max_norm, compiled):
    parameters = [torch.nn.Parameter(torch.ones(3))]
    give(parameters)
    optimizer = torch.optim.AdamW(parameters)
    assert fastamp.optimizer_step(optimizer, max_norm, given).way == "native"
    assert (parameters[0].grad is None) == drops


def test_a_bare_step_makes_no_tensor_until_its_report_is_read(compiled):
    parameters, optimizer = make("adamw", sizes=SIZES[:2])
    give(parameters)
    fastamp.optimizer_step(optimizer)  # makes the state
    with torch.autograd.profiler.profile() as profile:
        report = fastamp.optimizer_step(optimizer)
    assert report.way == "native"
    assert [event.key for event in profile.key_averages()] == ["Optimizer.step#AdamW.step"]
    assert (report.norm.isnan(), report.clip_coef, report.found_inf, report.scale) == (1, 1, 0, 1)


@pytest.mark.parametrize("name", RULES)
def test_a_bare_step_is_native_too(name, compiled):
    found = []
    for max_norm in (None, 1e9):
        parameters, optimizer = make(name, sizes=SIZES)
        for seed in range(3):
            give(parameters, seed=seed)
            way = fastamp.optimizer_step(optimizer, max_norm).way
            assert way == "native" or "the first step of SGD with dampening" in way
        found.append(everything(parameters, optimizer))
    assert found[0] == found[1]


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("on_class", [True, False])
def test_a_zero_grad_that_is_patched_is_called_with_gradients(
    on_class, max_norm, compiled, monkeypatch
):
    parameters, optimizer = make("adamw", sizes=SIZES[:2])
    seen, own = [], optimizer.zero_grad

    def zero_grad(*_):
        seen.append([parameter.grad is not None for parameter in parameters])
        own()

    monkeypatch.setattr(torch.optim.AdamW if on_class else optimizer, "zero_grad", zero_grad)
    give(parameters)
    report = fastamp.optimizer_step(optimizer, max_norm=max_norm, zero_grad=True)
    assert report.way == "native"
    assert seen == [[True, True]]
    assert [parameter.grad for parameter in parameters] == [None, None]


@pytest.mark.parametrize("is_fake", [True, False])
def test_a_step_without_values_is_taken(is_fake):
    """Under FakeTensorMode and on the meta device, as to find out how much memory a step takes."""
    with FakeTensorMode() if is_fake else torch.device("meta"):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], momentum=0.9)  # torch 2.6 reads Adam's count
        weight.grad = torch.ones(3)
        report = fastamp.optimizer_step(optimizer, max_norm=1.0, zero_grad=True)
    assert optimizer.state[weight]["momentum_buffer"].shape == (3,)
    assert not report.skipped
