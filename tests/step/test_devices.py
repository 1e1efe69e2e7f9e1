"""Gradients, flags and a scale on several devices, on a model of torch.cuda."""

import pytest
import torch
from support.stream_model import Model

import fastamp
from fastamp import _ops
from fastamp.step.scaler import _joined


def on_gpu(value):
    """Return a number on the GPU of the model."""
    return torch.empty((), device="cuda:0").fill_(value)


def scaled(scale):
    """Return a scaler whose scale is on the GPU, and an optimizer whose gradients are not."""
    scaler = fastamp.GradScaler("cuda")
    scaler._scale, scaler._growth_tracker = on_gpu(scale), torch.zeros((), dtype=torch.int32)
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.full((3,), 8.0)
    return scaler, parameter, torch.optim.SGD([parameter], lr=1.0)


def clip():
    grad = torch.ones(3)
    _ops.hold([grad]).rescale_(on_gpu(0.5))
    return grad


def join():
    states = [{"found_inf_per_device": {0: torch.zeros(()), 1: on_gpu(1.0)}}]
    return _joined(states, torch.device("cpu"))


def unscale():
    scaler, parameter, optimizer = scaled(4.0)
    scaler._unscale_grads_(optimizer, on_gpu(0.25), torch.zeros(()), True)
    return parameter.grad


def step():
    scaler, parameter, optimizer = scaled(4.0)
    scaler.step(optimizer)
    return parameter.detach()


def update():
    scaler = fastamp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    found = {torch.device("cuda:0"): on_gpu(1.0)}
    scaler._per_optimizer_states[0]["found_inf_per_device"] = found
    scaler.update()
    return scaler._scale


@pytest.mark.parametrize(
    ("call", "expected"), [(clip, 0.5), (join, 1.0), (unscale, 2.0), (step, -2.0), (update, 2.0)]
)
def test_the_cpu_waits_for_a_number_from_a_gpu(call, expected):
    model = Model(0)
    with model.installed(), _ops.use_only("fallback"):
        found = call()
        assert found.unique().tolist() == [expected]
    assert model.found == []
