"""Several optimizers that step together: one norm, one verdict, and parameters of more than one."""

import functools
import math

import pytest
import torch
from support.bits import bits
from support.gradients import parameters_with
from support.training import OPTIMIZERS, make_scaler, one_step

import fastamp


def two_optimizers(first, second, device, *, scale=1024.0, **options):
    """Return parameters of norm 3 and 4 with their optimizers, and a scaler for both."""
    parameters = parameters_with(*[torch.full((1,), x * scale, device=device) for x in (3.0, 4.0)])
    made = [OPTIMIZERS[n]([p]) for n, p in zip((first, second), parameters, strict=True)]
    scaler = make_scaler(fastamp.GradScaler, device, **options)
    scaler.scale(torch.ones((), device=device))
    return parameters, made, scaler


@pytest.mark.parametrize("bad", [None, 0, 1])
@pytest.mark.parametrize("max_norm", [None, 5.0])
@pytest.mark.parametrize("names", [("own", "sgd momentum"), ("adamw fused", "sgd fused")], ids=str)
def test_two_unscaled_ones_have_one_verdict_and_one_norm_or_nan(
    bad, max_norm, names, backend, device
):
    """`unscale_` has read each one's gradients, but nobody has those of both."""
    parameters, optimizers, scaler = two_optimizers(*names, device)
    if bad is not None:
        parameters[bad].grad[0] = math.inf
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    before = [bits(p.detach()).copy() for p in parameters]
    scaler.step(optimizers, max_norm=max_norm)
    report = scaler.last_step
    assert (report.scale.item(), report.skipped) == (1024.0, bad is not None)
    assert scaler.skipped_steps == (bad is not None)
    if bad is None:
        assert str(report.norm.item()) == ("nan" if max_norm is None else "5.0")
    else:
        assert all((bits(p.detach()) == b).all() for p, b in zip(parameters, before, strict=True))


@pytest.mark.parametrize("second", ["adam fused", "own"])
@pytest.mark.parametrize("first", OPTIMIZERS)
@pytest.mark.parametrize(("hooked", "enabled"), [(True, True), (False, True), (False, False)])
def test_several_optimizers_have_one_norm_and_one_verdict(
    first, second, hooked, enabled, backend, device
):
    scale = 1024.0 if enabled else 1.0
    parameters, optimizers, scaler = two_optimizers(
        first, second, device, scale=scale, enabled=enabled
    )
    if hooked:
        optimizers[1].register_step_pre_hook(lambda *_: None)
    assert scaler.step(optimizers, max_norm=2.5) == [None, None]
    scaler.update()
    assert scaler.last_step.norm.item() == 5.0
    for parameter, grad in zip(parameters, (1.5, 2.0), strict=True):
        assert parameter.grad.item() == pytest.approx(grad, rel=1e-6)
    moved = [p.detach().clone() for p in parameters]
    alone, each_alone, _ = two_optimizers(first, second, device, scale=0.5)
    for optimizer in each_alone:
        optimizer.step()
    torch.testing.assert_close(moved, [p.detach() for p in alone], rtol=1e-5, atol=1e-6)
    parameters[1].grad.fill_(math.nan)
    scaler.step(tuple(optimizers), max_norm=2.5)
    scaler.update()
    assert (scaler.last_step.skipped, scaler.skipped_steps) == (True, 1)
    assert all(map(torch.equal, parameters, moved))
    assert scaler.get_scale() == scale / (2 if enabled else 1)


@pytest.mark.parametrize("in_groups", [False, True])
@pytest.mark.parametrize("max_norm", [None, 9.0])
@pytest.mark.parametrize(
    ("make", "odd"),
    [
        (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), {"dampening": 0.5}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.AdamW, {"amsgrad": True, "fused": True}),
    ],
    ids=["dampening", "amsgrad", "fused amsgrad"],
)
def test_a_first_step_that_torch_makes_begins_with_torchs_states(
    make, odd, max_norm, in_groups, backend, device
):
    """Also of the parameters in front of the one that only torch can step."""

    def train(step):
        first, second = parameters_with(*[torch.ones(2, device=device)] * 2)
        optimizers = [make([first]), make([second], **odd)]
        if in_groups:
            optimizers = [make([{"params": [first]}, {"params": [second], **odd}])]
        for _ in range(3):
            first.grad, second.grad = (torch.ones(2, device=device) * n for n in (1, 2))
            step(optimizers)
        return [p.detach() for p in (first, second)]

    ours = train(lambda optimizers: fastamp.optimizer_step(optimizers, max_norm))
    assert all(map(torch.equal, ours, train(lambda optimizers: [o.step() for o in optimizers])))


def test_a_list_of_optimizers_is_checked():
    parameters, optimizers, scaler = two_optimizers("own", "own", "cpu")
    with pytest.raises(ValueError, match="optimizer: expected at least one"):
        scaler.step([], max_norm=1.0)
    with pytest.raises(ValueError, match=r"^optimizer\[2\] and optimizer\[0\] have a parameter"):
        scaler.step([*optimizers, optimizers[0]], max_norm=1.0)
    with pytest.raises(TypeError, match=r"optimizer\[2\]: expected an optimizer, got a Linear"):
        scaler.step([*optimizers, torch.nn.Linear(1, 1)], max_norm=1.0)
    scaler.unscale_(optimizers[0])
    with pytest.raises(RuntimeError, match="optimizer: of several, some were unscaled"):
        scaler.step(optimizers, max_norm=1.0)
    assert [p.grad.item() for p in parameters] == [3.0, 4096.0]


@pytest.mark.parametrize("enabled", [True, False])
def test_what_is_no_optimizer_is_refused_by_name(enabled):
    scaler = make_scaler(fastamp.GradScaler, "cpu", enabled=enabled)
    scaler.scale(torch.ones(()))
    calls = [scaler.step, lambda bad: scaler.clip_grad_norm_(bad, 1.0), fastamp.optimizer_step]
    calls += [scaler.unscale_] * enabled  # without scaling it does nothing, as torch's
    for call in calls:
        for bad in ((each for each in []), torch.nn.Linear(1, 1), None, "adam"):
            name = type(bad).__name__
            with pytest.raises(TypeError, match=f"^optimizer: expected an optimizer, got a {name}"):
                call(bad)
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(parameters_with(torch.ones(1))), 1)
    with pytest.raises(TypeError, match=r"^optimizer: expected an optimizer, got a StepLR"):
        fastamp.optimizer_step(schedule)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_parameter_in_two_optimizers_of_a_list_is_refused(enabled, backend, device):
    parameters = parameters_with(*[torch.ones(1, 2, device=device) for _ in range(3)])
    optimizers = [torch.optim.SGD(parameters[:2]), torch.optim.AdamW(parameters[2:])]
    optimizers.append(torch.optim.AdamW([parameters[1]]))
    scaler = fastamp.GradScaler(device, enabled=enabled)
    shared = r"optimizer\[2\] and optimizer\[0\] have a parameter in common, of shape \(1, 2\)"
    with pytest.raises(ValueError, match=shared):
        one_step(scaler, optimizers, device, max_norm=1.0)
    assert [p.grad.tolist() for p in parameters] == [[[1.0, 1.0]]] * 3
    assert [p.tolist() for p in parameters] == [[[0.0, 0.0]]] * 3
    with pytest.raises(ValueError, match=shared):
        fastamp.optimizer_step(optimizers)
