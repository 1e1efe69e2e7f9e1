"""A scaler's state: pickled and loaded."""

import math
import pickle

import pytest
import torch
from support.gradients import parameters_with
from support.training import one_step

import fastamp


def test_a_pickled_scaler_holds_no_tensor_that_another_process_would_need():
    scaler = fastamp.GradScaler("cpu", enabled=False)
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    scaler.step(torch.optim.SGD([parameter]), max_norm=1.0)
    assert b"torch._utils" not in pickle.dumps(scaler)
    assert pickle.loads(pickle.dumps(scaler)).last_step.way == "no step yet"


def test_a_pickled_scaler_goes_on(backend, device):
    parameters = parameters_with(torch.full((4,), math.inf, device=device))
    scaler = fastamp.GradScaler(device, min_scale=4.0)
    one_step(scaler, torch.optim.SGD(parameters, lr=0.1, fused=True), device)
    scaler.update()
    copied = pickle.loads(pickle.dumps(scaler))
    assert copied.state_dict() == scaler.state_dict()
    assert copied.skipped_steps == scaler.skipped_steps == 1
    copied.scale(torch.ones((), device=device))
    assert copied.get_scale() == 2.0**15


@pytest.mark.parametrize("cls", [torch.amp.GradScaler, fastamp.GradScaler])
def test_an_empty_state_is_torchs_error_and_a_disabled_scaler_takes_anything(cls):
    with pytest.raises(RuntimeError, match="source state dict is empty"):
        cls("cpu").load_state_dict({})
    cls("cpu", enabled=False).load_state_dict({"x": 1})
