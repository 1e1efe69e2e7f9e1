"""Steps that go wrong in the middle, or that somebody has changed: nothing is lost or left over."""

from __future__ import annotations

import math

import pytest
import torch
from support.gradients import parameters_with

import fastamp

SCALE = 4.0


SGDS = {
    "open": lambda ps: torch.optim.SGD(ps, lr=1.0),
    "fused": lambda ps: torch.optim.SGD(ps, lr=1.0, fused=True),
    "foreach": lambda ps: torch.optim.SGD(ps, lr=1.0, foreach=True),
}


def make_scaler(*, enabled=True, cls=fastamp.GradScaler):
    scaler = cls("cpu", init_scale=SCALE, enabled=enabled)
    scaler.scale(torch.ones(()))
    return scaler


def scaled_ones(*sizes, enabled=True):
    """Return parameters whose unscaled gradients are ones."""
    return parameters_with(*[torch.full((n,), SCALE if enabled else 1.0) for n in sizes])


def assert_all(parameters, value):
    for p in parameters:
        torch.testing.assert_close(p.detach(), torch.full_like(p, value))


@pytest.mark.parametrize("name", SGDS)
@pytest.mark.parametrize("enabled", [False, True])
def test_a_clip_that_found_inf_skips_the_next_step_and_no_other(name, enabled):
    parameters = scaled_ones(1, 3, enabled=enabled)
    optimizers = [SGDS[name]([p]) for p in parameters]
    scaler = make_scaler(enabled=enabled)
    parameters[0].grad.fill_(math.inf)
    assert scaler.clip_grad_norm_(optimizers, 1.0).isinf()
    for optimizer in optimizers:
        scaler.step(optimizer)
        assert scaler.last_step.skipped
    scaler.update()
    assert_all(parameters, 0.0)
    for number, p in enumerate(parameters, 1):
        p.grad = torch.ones_like(p) * (scaler.get_scale() if enabled else 1.0)
        scaler.step(optimizers[number - 1])
        assert (scaler.last_step.skipped, scaler.skipped_steps) == (False, 2)
    assert_all(parameters, -1.0)


@pytest.mark.parametrize("call", ["clip_grad_norm_", "update"])
def test_without_a_scale_what_a_clip_found_is_forgotten(call):
    """By the next clip or update, of a loop that left the step out."""
    (p,) = scaled_ones(3, enabled=False)
    optimizer, scaler = SGDS["open"]([p]), make_scaler(enabled=False)
    p.grad.fill_(math.inf)
    scaler.clip_grad_norm_(optimizer, 1.0)
    p.grad.fill_(1.0)
    if call == "update":
        scaler.update()
    else:
        scaler.clip_grad_norm_(optimizer, 10.0)
    scaler.step(optimizer)
    assert_all([p], -1.0)


# --- a scaler's methods that a subclass overrides ---


def recording(base, name, calls):
    """Return a subclass of a scaler, which notes the calls of one method."""

    def method(self, *args, **kwargs):
        calls.append(name)
        return getattr(base, name)(self, *args, **kwargs)

    return type("Recording", (base,), {name: method})


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("optimizer_name", ["open", "fused", "foreach"])
@pytest.mark.parametrize("name", ["_maybe_opt_step", "_unscale_grads_", "_check_inf_per_device"])
def test_what_torchs_scaler_calls_on_itself_is_called(name, optimizer_name, max_norm, backend):
    seen = []
    for base in (torch.amp.GradScaler, fastamp.GradScaler):
        calls = []
        parameters = scaled_ones(1, 3)
        optimizer = SGDS[optimizer_name](parameters)
        scaler = make_scaler(cls=recording(base, name, calls))
        if base is fastamp.GradScaler:
            scaler.step(optimizer, max_norm=max_norm)
        else:
            if max_norm is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, max_norm)
            scaler.step(optimizer)
        scaler.update()
        seen.append((calls, [p.detach() for p in parameters]))
    (expected, theirs), (found, ours) = seen
    torch.testing.assert_close(ours, theirs)
    assert found == expected
