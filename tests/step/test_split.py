"""A step in two calls, without a framework; with one it is tested in tests/integrations."""

import pytest
import torch
from support.gradients import parameters_with

import fastamp
from fastamp.step.split import SplitStep


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("enabled", [False, True])
def test_after_a_clip_whose_step_is_left_out_the_next_ones_are_as_ever(
    enabled, to_none, compiled, device
):
    (parameter,) = parameters_with(torch.zeros(3, device=device))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = fastamp.GradScaler(device, init_scale=4.0, enabled=enabled)
    split = SplitStep(scaler)
    for left_out in (True, False):
        split.before_backward()
        scaler.scale(2 * parameter.sum()).backward()
        assert split.clip_grad_norm_([optimizer], 1.0).item() == pytest.approx(12**0.5)
        if left_out:
            optimizer.zero_grad(set_to_none=to_none)
    split.step(optimizer)
    torch.testing.assert_close(parameter.detach().cpu(), torch.full((3,), -(3**-0.5)))


def test_what_is_written_between_clip_and_step_is_an_error(compiled, device):
    (parameter,) = parameters_with(torch.zeros(3, device=device))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    split = SplitStep(fastamp.GradScaler(device, enabled=False))
    parameter.grad = torch.ones_like(parameter)
    split.clip_grad_norm_([optimizer], 1.0)
    parameter.grad[0] = 0
    with pytest.raises(RuntimeError, match="changed between"):
        split.step(optimizer)
    assert parameter.eq(0).all()
