"""Gradients of every kind in a step: sparse, with gaps in their memory, empty, without memory."""

import math

import pytest
import torch
from support.gradients import KINDS, odd_gradients, parameters_with
from support.training import one_step

import fastamp


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


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_gradient_is_unscaled_clipped_and_checked(backend, device, kind):
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
    if kind == "empty":
        return
    grad = odd_gradients(device)[kind]
    values = grad._values() if grad.is_sparse else grad[:, :1] if kind == "expanded" else grad
    values[(-1,) * values.ndim].fill_(math.nan)
    parameters[0].grad = grad
    scaler.update()
    scaler.step(optimizer, max_norm=1.0)
    assert scaler.last_step.skipped


def test_torchs_zero_tensors_have_a_norm_and_are_refused_in_torchs_words(backend):
    """They have elements and no memory."""
    zeros = torch._efficientzerotensor((5,))
    assert fastamp.get_total_norm([zeros, torch.ones(4)]).item() == pytest.approx(2.0)
    parameters = parameters_with(zeros, torch.ones(5))
    optimizer, scaler = torch.optim.AdamW(parameters, fused=True), fastamp.GradScaler("cpu")
    for call in (
        lambda: fastamp.clip_grad_norm_(parameters, 0.5),
        lambda: one_step(scaler, optimizer, "cpu", max_norm=0.5),
    ):
        with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
            call()
    assert not any(p.any() for p in parameters)


def test_torchs_zero_tensors_are_collated(backend):
    last = torch._efficientzerotensor((100, 5))[-1]  # its "address" is its offset of 1,980 bytes
    for samples in ([last, last], [torch.ones(5), last]):
        assert torch.equal(fastamp.BatchCollator()(samples), torch.stack(samples))
