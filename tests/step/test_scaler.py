"""The step: what torch's GradScaler and clipping do, with one read, on every backend."""

import copy
import math
import pickle

import pytest
import torch
from support.gradients import parameters_with, random
from support.training import FUSED, OPTIMIZERS, make_scaler, one_step
from support.waits import ReadsRefused, sync_refused

import fastamp


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", ["step", "unscale then step", "clip then step"])
def test_gradients_end_unscaled_and_clipped(backend, device, how, name):
    grads = [random(size, torch.float32, device, seed=size) for size in (1, 300, 70_001)]
    norm = math.sqrt(sum(g.double().square().sum().item() for g in grads))
    parameters = parameters_with(*[g * 1024 for g in grads], None)
    optimizer = OPTIMIZERS[name](parameters)
    scaler = make_scaler(fastamp.GradScaler, device)
    scaler.scale(torch.ones((), device=device))
    if how == "step":
        scaler.step(optimizer, max_norm=norm / 2)
    elif how == "unscale then step":
        scaler.unscale_(optimizer)
        scaler.step(optimizer, max_norm=norm / 2)
    else:
        assert scaler.clip_grad_norm_(optimizer, norm / 2).item() == pytest.approx(norm, rel=1e-7)
        scaler.step(optimizer)
    for parameter, grad in zip(parameters, grads, strict=False):
        torch.testing.assert_close(parameter.grad, grad / 2, rtol=1e-6, atol=0)
    report = scaler.last_step
    assert report.norm.item() == pytest.approx(norm, rel=1e-7)
    assert report.clip_coef.item() == pytest.approx(0.5, rel=1e-5)
    assert report.found_inf.item() == 0.0
    assert not report.skipped
    assert scaler.skipped_steps == 0
    assert report.scale.item() == 1024.0
    assert {t.device.type for t in (report.norm, report.clip_coef, report.found_inf)} == {device}


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_earlier_read_that_found_inf_skips_though_gradients_were_mended(
    backend, device, name, max_norm
):
    (parameter,) = parameters_with(torch.tensor([math.inf, 1.0], device=device))
    optimizer, scaler = OPTIMIZERS[name]([parameter]), make_scaler(fastamp.GradScaler, device)
    scaler.scale(torch.ones((), device=device))
    scaler.unscale_(optimizer)
    parameter.grad.fill_(1.0)
    scaler.step(optimizer, max_norm=max_norm)
    assert scaler.last_step.skipped
    assert not parameter.any()
    assert scaler.skipped_steps == 1


@pytest.mark.parametrize("name", FUSED)
def test_a_scale_that_the_user_set_is_torchs(backend, device, name):
    found = []
    for cls in (fastamp.GradScaler, torch.amp.GradScaler):
        parameters = parameters_with(random(1000, torch.float32, device) * 1024 * 4)
        optimizer = OPTIMIZERS[name](parameters)
        optimizer.grad_scale = torch.tensor(4.0, device=device)
        scaler = make_scaler(cls, device)
        one_step(scaler, optimizer, device)
        assert not hasattr(optimizer, "grad_scale")
        assert not hasattr(optimizer, "found_inf")
        found.append(parameters[0].detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_without_scaling_a_step_clips_and_skips(backend, device, bad, name):
    grad = random(1000, torch.float32, device)
    norm = grad.double().norm().item()
    if bad is not None:
        grad[7] = bad
    parameters = parameters_with(grad.clone())
    before = parameters[0].detach().clone()
    scaler = fastamp.GradScaler(device, enabled=False)
    scaler.step(OPTIMIZERS[name](parameters), max_norm=norm / 2)
    scaler.update()
    assert torch.equal(parameters[0], before) == (bad is not None)
    assert scaler.last_step.skipped == (bad is not None)
    assert scaler.skipped_steps == (bad is not None)
    if bad is None:
        torch.testing.assert_close(parameters[0].grad, grad / 2, rtol=1e-6, atol=0)


def test_without_scaling_and_clipping_the_step_is_the_optimizers(backend, device):
    parameters = parameters_with(torch.tensor([math.nan, 1.0], device=device))
    scaler = fastamp.GradScaler(device, enabled=False)
    loss = scaler.step(torch.optim.SGD(parameters, lr=1.0), lambda: 3.0)
    assert loss == 3.0
    assert parameters[0].isnan()[0]
    assert not scaler.last_step.skipped
    assert scaler.last_step.norm.isnan()


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.NAdam, torch.optim.AdamW])
def test_a_disabled_scaler_without_clipping_reads_nothing_of_the_device(kind):
    parameters = parameters_with(torch.ones(10, device="meta"))  # an error for all that reads
    scaler = fastamp.GradScaler("cpu", enabled=False)
    optimizer = kind(parameters, foreach=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(2):
        scaler.scale(parameters[0].sum())
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if not scaler.last_step.skipped:
            scheduler.step()
    assert scaler.skipped_steps == 0
    assert scheduler.last_epoch == 2


@pytest.mark.parametrize("rule", ["AdamW", "Adam", "SGD"])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_native_step_reads_nothing_on_the_host(compiled, device, enabled, rule):
    for fused in (None, True):
        grads = [random(1000, torch.float32, device, seed=i) for i in range(3)]
        lr = 0.01 if fused or compiled == "cpu" else torch.tensor(0.01, device=device)
        options = {"lr": lr, "fused": fused} | ({"momentum": 0.9} if rule == "SGD" else {})
        optimizer = getattr(torch.optim, rule)(parameters_with(*grads), **options)
        scaler = make_scaler(fastamp.GradScaler, device, enabled=enabled)
        one_step(scaler, optimizer, device, max_norm=1.0)  # makes the optimizer's state
        scaler.update()
        with sync_refused(device), ReadsRefused():
            one_step(scaler, optimizer, device, max_norm=1.0)
            scaler.update()
            one_step(scaler, optimizer, device)
            scaler.update()
            assert scaler.last_step.way == "native"
            if enabled and device == "cuda":  # in place, the CPU looks whether the factor is 1
                scaler.clip_grad_norm_(optimizer, 1.0)
                scaler.step(optimizer)
                scaler.update()


def test_the_probe_notices_a_read():
    with ReadsRefused(), pytest.raises(AssertionError, match="reads a value"):
        torch.ones(()).item()


def test_an_overflow_on_two_devices_skips_where_torchs_step_does_not(backend, device):
    results = {}
    for cls in (torch.amp.GradScaler, fastamp.GradScaler):
        parameters = parameters_with(torch.full((4,), math.inf, device=device))
        before = parameters[0].detach().clone()
        optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
        scaler = cls(device)
        scaler.scale(torch.ones((), device=device))
        scaler.unscale_(optimizer)
        flag = torch.ones((), device=device)
        state = scaler._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = {"one device": flag, "another": flag.clone()}
        scaler.step(optimizer)
        results[cls] = torch.equal(parameters[0], before)
    assert results == {torch.amp.GradScaler: False, fastamp.GradScaler: True}


def test_found_inf_stays_0_or_1_with_several_optimizers(backend, device):
    pairs = [parameters_with(torch.full((4,), math.inf, device=device)) for _ in range(3)]
    optimizers = [torch.optim.SGD(p, lr=0.1, fused=True) for p in pairs]
    scaler = fastamp.GradScaler(device)
    scaler.scale(torch.ones((), device=device))
    reports = []
    for optimizer in optimizers:
        scaler.step(optimizer)
        reports.append(scaler.last_step)
    scaler.update()
    assert [report.found_inf.item() for report in reports] == [1.0, 1.0, 1.0]
    assert scaler.get_scale() == 2.0**15
    assert scaler.skipped_steps == 3


@pytest.mark.parametrize("name", ["adamw fused", "adamw foreach", "own"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_one_bad_parameter_among_148_is_named(backend, device, bad, name):
    module = torch.nn.ParameterDict(
        {f"w{i}": torch.nn.Parameter(torch.zeros(7, 11, device=device)) for i in range(148)}
    )
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    module["w93"].grad[4, 5] = bad
    module["w93"].grad[6, 1] = math.inf
    scaler = fastamp.GradScaler(device)
    one_step(scaler, OPTIMIZERS[name](module.parameters()), device, max_norm=1.0)
    assert scaler.last_step.skipped
    n_nan = int(math.isnan(bad))
    [found] = scaler.nonfinite_parameters(module)
    assert found == ("w93", n_nan, 2 - n_nan, 4 * 11 + 5)
    assert found.first_index == 49
    assert fastamp.nonfinite_parameters(module) == [found]


def test_the_scale_stays_within_its_bounds(backend, device):
    scaler = fastamp.GradScaler(device, 8.0, growth_interval=1, min_scale=4.0, max_scale=16.0)
    good, bad = parameters_with(
        torch.ones(3, device=device), torch.full((3,), math.inf, device=device)
    )
    seen = []
    for parameter in (bad, bad, good, good, good, good):
        one_step(scaler, torch.optim.SGD([parameter], lr=0.0, fused=True), device)
        scaler.update()
        seen.append(scaler.get_scale())
    assert seen == [4.0, 4.0, 8.0, 16.0, 16.0, 16.0]
    scaler.load_state_dict(scaler.state_dict() | {"scale": 0.5})  # the next update bounds it
    one_step(scaler, torch.optim.SGD([bad], lr=0.0), device)
    scaler.update()
    assert scaler.get_scale() == 4.0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_misuse_is_refused_as_torch_refuses_it(backend, name):
    def failures(cls):
        seen = []

        def fails(call):
            try:
                call()
            except (RuntimeError, AssertionError, ValueError) as error:
                seen.append((type(error), str(error)))
            else:
                seen.append(None)

        parameters = parameters_with(torch.ones(3))
        optimizer = OPTIMIZERS[name](parameters)
        empty = torch.optim.SGD(parameters_with(None), lr=0.1)
        scaler = cls("cpu")
        fails(lambda: scaler.step(optimizer))
        fails(scaler.update)
        scaler.scale(torch.ones(()))
        fails(scaler.update)
        fails(lambda: scaler.step(empty))
        fails(lambda: scaler.step(optimizer, closure=lambda: 1.0))
        scaler.unscale_(optimizer)
        fails(lambda: scaler.unscale_(optimizer))
        fails(lambda: pickle.dumps(scaler))
        scaler.step(optimizer)
        fails(lambda: scaler.step(optimizer))
        fails(lambda: scaler.unscale_(optimizer))
        scaler.update()
        fails(lambda: scaler.scale(3.0))
        fails(lambda: scaler.load_state_dict({}))
        return seen

    theirs = failures(torch.amp.GradScaler)
    assert failures(fastamp.GradScaler) == theirs
    assert None not in theirs


def test_clipping_after_the_step_is_refused(backend):
    optimizer = torch.optim.SGD(parameters_with(torch.ones(3)), lr=0.1)
    scaler = fastamp.GradScaler("cpu")
    one_step(scaler, optimizer, "cpu")
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        scaler.clip_grad_norm_(optimizer, 1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_scale": 0.0}, "min_scale: expected a number above 0, got 0.0"),
        ({"max_scale": 0.0}, "max_scale: expected a number above 0, got 0.0"),
        ({"max_scale": math.nan}, "max_scale: expected a number above 0, got nan"),
        ({"init_scale": "x"}, "init_scale: expected a number, got 'x'"),
        ({"max_scale": 10**400}, "max_scale: expected a number, got 1000"),
        ({"init_scale": 2.0, "min_scale": 4.0}, "init_scale: expected min_scale=4.0 <= 2.0"),
        ({"init_scale": 2.0, "max_scale": 1.0}, "init_scale: expected .* <= max_scale=1.0"),
    ],
)
def test_bad_scales_are_named(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        fastamp.GradScaler("cpu", **arguments)


def test_it_is_a_torch_scaler_whose_report_says_that_there_was_no_step():
    scaler = fastamp.GradScaler("cpu")
    for each in (scaler, copy.deepcopy(scaler)):
        assert isinstance(each, torch.amp.GradScaler)
        assert (each.is_enabled(), each.get_scale()) == (True, 65536.0)
        assert (each.last_step.skipped, each.last_step.way) == (False, "no step yet")
        assert each.last_step.norm.isnan()


def test_a_pickled_scaler_holds_no_tensor_that_another_process_would_need():
    scaler = fastamp.GradScaler("cpu", enabled=False)
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    scaler.step(torch.optim.SGD([parameter]), max_norm=1.0)
    assert b"torch._utils" not in pickle.dumps(scaler)
    assert pickle.loads(pickle.dumps(scaler)).last_step.way == "no step yet"


def test_a_pickled_scaler_goes_on(backend, device):
    parameters = parameters_with(torch.full((4,), math.inf, device=device))
    scaler = fastamp.GradScaler(device, min_scale=4.0)
    one_step(scaler, torch.optim.SGD(parameters, lr=0.1, fused=True), device)
    scaler.update()
    copied = pickle.loads(pickle.dumps(scaler))
    assert copied.state_dict() == scaler.state_dict()
    assert copied.skipped_steps == scaler.skipped_steps == 1
    copied.scale(torch.ones((), device=device))
    assert copied.get_scale() == 2.0**15


@pytest.mark.parametrize("options", [{}, {"foreach": True}], ids=["native", "torch's"])
def test_a_report_keeps_its_values_when_the_next_steps_are_made(options, backend, device):
    [weight] = parameters_with(torch.zeros(2, device=device))
    optimizer = torch.optim.AdamW([weight], **options)
    reports = []
    for factor in (1.0, 2.0, math.inf):
        weight.grad = torch.tensor([3.0, 4.0], device=device) * factor
        reports.append(fastamp.optimizer_step(optimizer, max_norm=5.0))
    weight.grad = None
    assert [report.norm.item() for report in reports] == [5.0, 10.0, math.inf]
    assert [report.skipped for report in reports] == [False, False, True]
    assert [round(report.clip_coef.item(), 4) for report in reports[:2]] == [1.0, 0.5]


def test_a_report_can_be_printed_copied_and_pickled(backend, device):
    [weight] = parameters_with(torch.ones(100_000, device=device))
    report = fastamp.optimizer_step(torch.optim.SGD([weight]), max_norm=1.0)
    whole = pickle.dumps(report)
    assert len(whole) < 4_000  # without what the read needed for each 8,192 elements
    for other in (copy.deepcopy(report), pickle.loads(whole)):
        assert repr(other) == repr(report)
    names = ("norm", "clip_coef", "found_inf", "scale", "way")
    assert repr(report) == (
        f"StepReport({', '.join(f'{name}={getattr(report, name)!r}' for name in names)})"
    )


def test_what_is_no_module_is_refused_by_name():
    for find in (fastamp.nonfinite_parameters, fastamp.GradScaler("cpu").nonfinite_parameters):
        with pytest.raises(TypeError, match=r"module: expected a torch\.nn\.Module, got int"):
            find(3)


def test_naming_bad_values_waits_once_for_all_finite_gradients(monkeypatch):
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(5)])
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    waits = []
    for name in ("item", "__bool__", "tolist"):
        read = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda *given, read=read: waits.append(0) or read(*given)
        )
    assert fastamp.nonfinite_parameters(model) == []
    assert len(waits) == 1
