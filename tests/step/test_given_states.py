"""An optimizer's state as torch and other people make it: counts of steps, dtypes and groups."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from support.gradients import parameters_with

import fastamp

ADAMS = pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam])


def ones(*sizes, device="cpu"):
    return parameters_with(*[torch.ones(size, device=device) for size in sizes])


def step_count(optimizer, parameter):
    return optimizer.state[parameter]["step"]


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("enabled", [False, True])
@ADAMS
def test_a_count_is_made_on_the_cpu_whatever_the_default_device_is(cls, enabled, compiled, device):
    parameters = ones(3, 5, device=device)
    optimizer = cls(parameters, lr=1.0, eps=0)
    scaler = fastamp.GradScaler(device, init_scale=4.0, enabled=enabled)
    scaler.scale(torch.ones((), device=device))
    with torch.device("meta"):
        scaler.step(optimizer, max_norm=1.0)
    assert scaler.last_step.norm.device.type == device
    for parameter in parameters:
        assert step_count(optimizer, parameter).item() == 1
        torch.testing.assert_close(parameter.detach().cpu(), torch.full_like(parameter, -1.0).cpu())


@pytest.mark.parametrize("fused", [True, None])
@ADAMS
def test_a_count_has_torchs_dtype_where_the_default_is_float64(cls, fused, compiled, device):
    (parameter,) = ones(3, device=device)
    optimizer = cls([parameter], fused=fused)
    with default_dtype(torch.float64):
        report = fastamp.optimizer_step(optimizer, max_norm=1.0)
    assert step_count(optimizer, parameter).dtype == (torch.float32 if fused else torch.float64)
    way = "native" if fused else "torch's: torch counts steps in float64, the default dtype"
    assert report.way == way


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("how", ["nothing", "step", "clip, then step"])
def test_reports_are_float32_whatever_the_default_dtype(how, default, backend, device):
    (parameter,) = parameters_with(None if how == "nothing" else torch.ones(3, device=device))
    with default_dtype(default):
        optimizer = torch.optim.RMSprop([parameter])
        scaler = fastamp.GradScaler(device, enabled=False)
        if how == "clip, then step":
            norm = scaler.clip_grad_norm_(optimizer, 1e9)
            assert norm.item() == pytest.approx(math.sqrt(3))
        scaler.step(optimizer, max_norm=1.0 if how == "step" else None)
    report = scaler.last_step
    values = report.norm, report.found_inf, report.clip_coef, report.scale
    assert {value.dtype for value in values} == {torch.float32}


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("hold", [tuple, lambda ps: dict.fromkeys(ps).keys(), set], ids="tks")
def test_the_parameters_of_a_group_may_be_held_as_torch_takes_them(hold, max_norm, backend, device):
    parameters = ones(1, 3, device=device)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    optimizer.param_groups[0]["params"] = hold(parameters)
    fastamp.optimizer_step(optimizer, max_norm=max_norm, zero_grad=True)
    for parameter in parameters:
        assert parameter.grad is None
        moved = -1.0 if max_norm is None else -0.5
        torch.testing.assert_close(parameter.detach().cpu(), torch.full(parameter.shape, moved))
