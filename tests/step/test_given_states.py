"""An optimizer's state, as other people make it: counts of steps and groups."""

from __future__ import annotations

import math

import pytest
import torch
from support.gradients import parameters_with

import fastamp

ADAMS = [torch.optim.AdamW, torch.optim.Adam]


def ones(*sizes, device="cpu"):
    return parameters_with(*[torch.ones(size, device=device) for size in sizes])


def step_count(optimizer, parameter):
    return optimizer.state[parameter]["step"]


# --- where and how the count of steps is made ---


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize("cls", ADAMS)
def test_a_count_has_torchs_dtype_where_the_default_is_float64(cls, fused, compiled, device):
    (parameter,) = ones(3, device=device)
    optimizer = cls([parameter], fused=fused)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        report = fastamp.optimizer_step(optimizer, max_norm=1.0)
    finally:
        torch.set_default_dtype(before)
    assert step_count(optimizer, parameter).dtype == (torch.float32 if fused else torch.float64)
    way = "native" if fused else "torch's: torch counts steps in float64, the default dtype"
    assert report.way == way


# --- what the count of steps says ---


@pytest.mark.parametrize("cls", ADAMS)
def test_a_count_that_is_read_from_the_state_leaves_out_skipped_steps(cls, apart, device):
    """On the emulated device the host's memory is the device's: that the count moves is unseen."""
    parameters = ones(3, 5, device=device)
    optimizer = cls(parameters)
    for step in range(5):
        parameters[1].grad = torch.full((5,), math.inf if step in (0, 3) else 1.0, device=device)
        assert fastamp.optimizer_step(optimizer, max_norm=1.0).way.startswith("native")
    for parameter in parameters:
        assert step_count(optimizer, parameter).item() == 3
        assert step_count(optimizer, parameter).device.type == device


# --- the parameters of a group ---


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize(
    "hold",
    [tuple, lambda ps: dict(enumerate(ps)).values(), lambda ps: dict.fromkeys(ps).keys(), set],
    ids=["tuple", "values", "keys", "set"],
)
def test_the_parameters_of_a_group_may_be_held_as_torch_takes_them(hold, max_norm, backend, device):
    parameters = ones(1, 3, device=device)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    optimizer.param_groups[0]["params"] = hold(parameters)
    fastamp.optimizer_step(optimizer, max_norm=max_norm, zero_grad=True)
    for parameter in parameters:
        assert parameter.grad is None
        moved = -1.0 if max_norm is None else -0.5
        torch.testing.assert_close(parameter.detach().cpu(), torch.full(parameter.shape, moved))
