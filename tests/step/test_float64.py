"""float64 where a device has none, and where a gradient is."""

from __future__ import annotations

import math

import pytest
import torch
from support import played_mps
from support.gradients import parameters_with, random
from support.played_mps import WIDE, Played, PlayMps
from support.training import SignMomentum

import fastamp
from fastamp._ops import fallback, over_ranks

# --- devices without float64 ---


class PlayDevice(PlayMps):
    """Lets tensors be made on the played device, whatever its name is."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = super().__torch_dispatch__(func, types, args, kwargs)
        asked = (kwargs or {}).get("device")
        is_plain = isinstance(made, torch.Tensor) and not isinstance(made, Played)
        if is_plain and asked is not None and torch.device(asked) == played_mps.MPS:
            return Played(made)
        return made


@pytest.fixture(params=["xla", "maia"])
def narrow(request, monkeypatch):
    """Yield the name of a device whose float64 is a TypeError, as on MPS, or a RuntimeError.

    Of "xpu" and "privateuseone" torch looks for the driver, and cannot be told not to.
    """
    monkeypatch.setattr(played_mps, "MPS", torch.device(request.param))
    for module in (fallback, over_ranks):
        monkeypatch.setattr(module, "PLAIN_TYPES", (*module.PLAIN_TYPES, Played))
    error, make = TypeError if request.param == "xla" else RuntimeError, Played.__new__

    def refuse_float64(cls, held):
        if held.dtype in WIDE:
            raise error(request.param + " has no float64")
        return make(cls, held)

    monkeypatch.setattr(Played, "__new__", refuse_float64)
    with PlayDevice():
        yield request.param


def played_parameters(*values):
    parameters = []
    for value in values:
        parameters.append(Played(torch.zeros(len(value))).requires_grad_())
        parameters[-1].grad = Played(torch.tensor(value))
    return parameters


def test_clipping_asks_for_no_float64_where_a_device_has_none(narrow):
    parameters = played_parameters([3.0, 0.0], [4.0])
    norm = fastamp.clip_grad_norm_(parameters, 1.0)
    assert norm.device.type == narrow
    assert norm.item() == 5
    torch.testing.assert_close(parameters[0].grad.held, torch.tensor([0.6, 0.0]))
    largest = fastamp.get_total_norm([p.grad for p in parameters], math.inf)
    assert largest.item() == pytest.approx(0.8, rel=1e-5)


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("how", ["step", "clip, then step"])
def test_a_step_asks_for_no_float64_where_a_device_has_none(narrow, how, enabled, bad):
    factor = 4.0 if enabled else 1.0
    parameters = played_parameters([3 * factor, 0.0], [math.inf if bad else 4 * factor])
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = fastamp.GradScaler(narrow, init_scale=4.0, enabled=enabled)
    scaler.scale(Played(torch.ones(())))
    if how == "clip, then step":
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer, max_norm=1.0)
    scaler.update()
    assert scaler.last_step.norm.device.type == narrow
    assert scaler.last_step.skipped == bad
    expected = torch.zeros(1) if bad else torch.tensor([-0.8])
    torch.testing.assert_close(parameters[1].held, expected)


# --- gradients in float64 ---


@pytest.mark.parametrize("with_float32", [False, True])
@pytest.mark.parametrize("how", ["step", "clip, then step", "clip_grad_norm_"])
@pytest.mark.parametrize("name", ["sgd", "sgd fused", "somebody's"])
def test_gradients_in_float64_are_clipped_in_float64(name, how, with_float32, backend):
    dtypes = [torch.float64, torch.float32 if with_float32 else torch.float64]
    grads = [random(7, dtype, "cpu", seed=i) for i, dtype in enumerate(dtypes)]
    parameters = parameters_with(*[grad * 4 for grad in grads])
    expected = parameters_with(*[grad.double() for grad in grads])
    norm = torch.nn.utils.clip_grad_norm_(expected, 0.1)
    optimizer = SignMomentum(parameters, 1.0)
    if name != "somebody's":
        optimizer = torch.optim.SGD(parameters, lr=1.0, fused=name == "sgd fused" or None)
    scaler = fastamp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    if how == "clip_grad_norm_":
        scaler.unscale_(optimizer)
        found = fastamp.clip_grad_norm_(parameters, 0.1)
    if how == "clip, then step":
        found = scaler.clip_grad_norm_(optimizer, 0.1)
    scaler.step(optimizer, max_norm=0.1 if how == "step" else None)
    found = scaler.last_step.norm if how == "step" else found
    torch.testing.assert_close(found, norm, rtol=1e-15, atol=0)
    for p, clipped in zip(parameters, expected, strict=True):
        tolerance = 1e-15 if p.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(p.grad.double(), clipped.grad, rtol=tolerance, atol=0)
        if name != "somebody's":  # whose steps are of other sizes
            torch.testing.assert_close(p.detach(), -p.grad, rtol=0, atol=0)
