"""Many tensors, and large tensors."""

import math

import pytest
import torch

import fastamp


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
