"""Gradients of every kind in a step: 16-bit, sparse, with gaps in their memory, empty."""

import math

import pytest
import torch
from support.bits import bits
from support.gradients import KINDS, odd_gradients, parameters_with, random
from support.training import one_step

import fastamp

"""torch has no fused Adagrad for CUDA."""


def test_the_bad_entry_of_a_sparse_gradient_is_named(backend, device):
    module = torch.nn.Embedding(50, 4, sparse=True, device=device)
    module(torch.tensor([7, 3, 7], device=device)).sum().backward()
    module.weight.grad._values()[1, 2] = math.inf  # row 3
    module.weight.grad._values()[2, 0] = math.nan  # row 7
    scaler = fastamp.GradScaler(device)
    one_step(scaler, torch.optim.SGD(module.parameters(), lr=0.1), device)
    assert scaler.nonfinite_parameters(module) == [("weight", 1, 1, 3 * 4 + 2)]


@pytest.mark.parametrize("how", ["unscale_", "clip_grad_norm_", "step"])
def test_float16_gradients_are_refused_before_they_change(backend, device, how):
    grads = [torch.ones(3, device=device), torch.ones(3, dtype=torch.float16, device=device)]
    parameters = parameters_with(*grads)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scaler = fastamp.GradScaler(device)
    scaler.scale(torch.ones((), device=device))
    arguments = (1.0,) if how == "clip_grad_norm_" else ()
    with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients\."):
        getattr(scaler, how)(optimizer, *arguments)
    assert all((grad == 1).all() for grad in grads)
    assert all((p == 0).all() for p in parameters)


def test_a_fused_optimizer_takes_float16_gradients(backend, device):
    if device == "cpu":
        pytest.skip("torch's fused CPU kernels have no loss scale for float16")
    grad = random(1000, torch.float16, device)
    parameters = parameters_with(grad * 16)
    scaler = fastamp.GradScaler(device, init_scale=16.0)
    one_step(scaler, torch.optim.SGD(parameters, lr=0.1, fused=True), device)
    torch.testing.assert_close(parameters[0].grad, grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_gradient_is_unscaled_and_clipped(backend, device, kind):
    grad = odd_gradients(device)[kind]
    dense = grad.to_dense().clone().resolve_conj().resolve_neg()
    parameters = parameters_with(grad)
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    scaler = fastamp.GradScaler(device, init_scale=4.0)
    one_step(scaler, optimizer, device, max_norm=math.inf)
    got = parameters[0].grad.to_dense().resolve_conj().resolve_neg()
    tolerance = 2**-8 if dense.dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(got, dense / 4, rtol=tolerance, atol=0)
    assert not scaler.last_step.skipped


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "empty"])
def test_every_kind_of_gradient_is_checked(backend, device, kind):
    grad = odd_gradients(device)[kind]
    parameters = parameters_with(grad)
    values = grad._values() if grad.is_sparse else grad
    values.reshape(-1)[-1:] = math.nan  # a copy where memory has gaps: written back below
    if not grad.to_dense().isnan().any():
        (values[(-1,) * values.ndim] if values.ndim else values).fill_(math.nan)
    scaler = fastamp.GradScaler(device)
    one_step(scaler, torch.optim.SGD(parameters, lr=0.0), device, max_norm=1.0)
    assert scaler.last_step.skipped


def test_unscaling_equals_torchs_to_the_bit(backend, device):
    grads = [random(size, torch.float32, device, seed=size) for size in (1, 129, 70_001)]
    results = []
    for cls in (torch.amp.GradScaler, fastamp.GradScaler):
        parameters = parameters_with(*[g.clone() for g in grads])
        scaler = cls(device, init_scale=3.0)
        scaler.scale(torch.ones((), device=device))
        scaler.unscale_(torch.optim.SGD(parameters, lr=0.1))
        results.append([bits(p.grad) for p in parameters])
    for a, b in zip(*results, strict=True):
        assert (a == b).all()
