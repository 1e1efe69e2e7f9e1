"""Many tensors, and large tensors."""

import math

import numpy as np
import pytest
import torch
from support import reference
from support.bits import bits
from support.gradients import random, values_of
from support.training import make_scaler, one_step

import fastamp


def many_parameters(device, backend, small):
    """Make 100,000 parameters of 1 to 3 elements that share one memory, and that of their grads.

    Fewer for the fallback, which takes seconds, and where the test has to be small: still more than
    one table of tensors.
    """
    count = 2500 if small else 20_000 if backend == "fallback" else 100_000
    sizes = [1 + i % 3 for i in range(count)]
    values = torch.zeros(sum(sizes), device=device)
    grads = random(sum(sizes), torch.float32, device)
    parameters = list(values.split(sizes))
    for parameter, grad in zip(parameters, grads.split(sizes), strict=True):
        parameter.grad = grad
    return parameters, values, grads


def test_thousands_of_tensors_take_a_step_and_are_clipped_at_once(backend, device, small):
    parameters, values, grads = many_parameters(device, backend, small)
    before = grads.clone()
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = make_scaler(fastamp.GradScaler, device)
    one_step(scaler, optimizer, device, max_norm=1e9)
    assert torch.equal(values, before / -1024)
    norm = reference.exact_norm([values_of(before / 1024)])
    assert scaler.last_step.norm.item() == norm
    scaler.update()
    assert fastamp.clip_grad_norm_(parameters, 1.0).item() == norm
    factor = reference.finish(float(norm) ** 2, 1.0, 1.0)["factor"]
    expected = reference.rescale(bits(before / 1024), "float32", factor)
    np.testing.assert_array_equal(bits(grads), expected)
    grads[-1] = math.nan
    scaler.step(optimizer, max_norm=1e9)
    assert scaler.last_step.skipped
    assert torch.equal(values, before / -1024)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_more_than_2_to_the_31_elements(dtype, device):
    size = 2**31 + 2**16 + 3
    if torch.cuda.mem_get_info()[0] < 2 * size * dtype.itemsize:
        pytest.skip("not enough memory on the GPU")
    grad = torch.zeros(size, dtype=dtype, device=device)
    values = {0: 1.0, 2**31 - 1: 3.0, 2**31: 5.0, size - 1: 1.0}
    for i, value in values.items():
        grad[i] = value
    assert fastamp.get_total_norm(grad).item() == 6.0
    parameter = torch.zeros(1, dtype=dtype, device=device).expand(size)
    parameter.grad = grad
    fastamp.clip_grad_norm_(parameter, 3.0)
    for i, value in values.items():
        assert grad[i].item() == pytest.approx(value / 2, rel=1e-6)
        grad[i] = 0.0
    assert fastamp.get_total_norm(grad).item() == 0.0  # nothing else was written
    grad[-1] = math.nan
    assert fastamp.get_total_norm(grad).isnan()
