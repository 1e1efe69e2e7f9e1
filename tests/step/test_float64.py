"""Gradients in float64 are clipped in float64."""

from __future__ import annotations

import pytest
import torch
from support.gradients import parameters_with, random
from support.training import SignMomentum

import fastamp


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
