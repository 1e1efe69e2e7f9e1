"""What a step refuses, and what it does for hooks."""

import functools
import math

import pytest
import torch
from support.bits import bits
from support.gradients import parameters_with, random
from support.training import FUSED, OPTIMIZERS, make_scaler
from torch.optim.optimizer import register_optimizer_step_pre_hook

import fastamp


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.LBFGS])
@pytest.mark.parametrize("by_name", [True, False])
def test_a_closure_with_max_norm_is_refused(enabled, optimizer_class, by_name, backend):
    parameters = parameters_with(torch.ones(4))
    optimizer = optimizer_class(parameters, lr=1.0)
    before = bits(parameters[0]).copy()
    scaler = fastamp.GradScaler("cpu", enabled=enabled)
    scaler.scale(torch.ones(()))
    step = functools.partial(scaler.step, optimizer, max_norm=1e-3)
    with pytest.raises(RuntimeError, match=r"[Cc]losure"):
        step(closure=pytest.fail) if by_name else step(pytest.fail)
    assert (bits(parameters[0]) == before).all()
    assert parameters[0].grad.tolist() == [1.0] * 4


def test_a_norm_in_the_place_of_a_closure_is_refused():
    scaler = fastamp.GradScaler("cpu", enabled=False)
    with pytest.raises(TypeError, match=r"expected a closure, got 1\.0; .*: max_norm=1\.0"):
        scaler.step(torch.optim.SGD(parameters_with(torch.ones(4))), 1.0)


def test_no_closure_is_none(backend):
    parameters = parameters_with(torch.ones(4))
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = fastamp.GradScaler("cpu", enabled=False)
    scaler.step(optimizer, None, max_norm=1.0)
    scaler.step(optimizer, closure=None, max_norm=9.0)
    assert scaler.last_step.norm.item() == pytest.approx(1.0)
    assert scaler.last_step.way != "torch's: the step has arguments"


CLIPS = {
    "step": lambda scaler, optimizer, _, bound: scaler.step(optimizer, max_norm=bound),
    "clip": lambda scaler, optimizer, _, bound: scaler.clip_grad_norm_(optimizer, bound),
    "norm": lambda _s, _o, ps, bound: fastamp.clip_grad_norm_(ps, bound),
    "norm of nothing": lambda *given: fastamp.clip_grad_norm_([], given[-1]),
}


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize(
    ("bound", "error"),
    [(math.nan, ValueError), (-1.0, ValueError), (-math.inf, ValueError)]
    + [(each, TypeError) for each in ([], "long", None, torch.ones(2))],
    ids=str,
)
def test_a_bound_that_is_no_length_is_refused_by_name(enabled, clip, bound, error):
    if bound is None and clip == "step":
        pytest.skip("None does not clip")
    parameters = parameters_with(torch.ones(4))
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = fastamp.GradScaler("cpu", enabled=enabled)
    scaler.scale(torch.ones(()))
    before = parameters[0].detach().clone()
    with pytest.raises(error, match="max_norm: "):
        CLIPS[clip](scaler, optimizer, parameters, bound)
    assert parameters[0].grad.tolist() == [1.0] * 4
    assert torch.equal(parameters[0], before)


@pytest.mark.parametrize("norm_type", [-math.inf, -2.0, -1, 0, 0.5, 1, 3, math.inf])
def test_norms_of_odd_orders_are_torchs(norm_type, backend, device):
    tensors = [random(size, torch.float32, device, seed=size) for size in (1, 5, 300)]
    tensors.append(torch.zeros(4, device=device) if norm_type >= 0 else tensors[0])
    ours, theirs = (
        module.get_total_norm(tensors, norm_type) for module in (fastamp, torch.nn.utils)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [0.5, None])
@pytest.mark.parametrize("for_all", [True, False])
def test_a_step_pre_hook_sees_gradients_as_torch_leaves_them(
    name, max_norm, for_all, backend, device
):
    seen = {}
    for cls in (torch.amp.GradScaler, fastamp.GradScaler):
        parameters = parameters_with(random(300, torch.float32, device) * 1024)
        optimizer = OPTIMIZERS[name](parameters)

        def look(*_, cls=cls, parameters=parameters):
            seen[cls] = parameters[0].grad.clone()

        register = register_optimizer_step_pre_hook if for_all else optimizer.register_step_pre_hook
        handle = register(look)
        try:
            scaler = make_scaler(cls, device)
            scaler.scale(torch.ones((), device=device))
            if cls is fastamp.GradScaler:
                scaler.step(optimizer, max_norm=max_norm)
                continue
            if max_norm is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, max_norm)
            scaler.step(optimizer)
        finally:
            handle.remove()
    theirs, ours = seen.values()
    if name in FUSED and max_norm is None:  # torch's kernel unscales after the hook
        theirs = theirs / 1024
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
