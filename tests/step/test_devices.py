"""Devices that are not here: GPUs on a model of torch.cuda, and Apple's, without float64."""

import pytest
import torch
from support.played_mps import Played, PlayMps
from support.stream_model import Model

import fastamp
from fastamp import _ops
from fastamp._ops import fallback, types
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


def train(scaler, weight, make):
    """Make three steps, whose second one overflows; return what the steps found.

    `make` puts a tensor on the device. Without such a device torch's autograd does not know it, so
    the gradient is written by hand.
    """
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    device, found = weight.device.type, []
    x = torch.arange(32.0).reshape(4, 8) / 32
    for step in range(3):
        with torch.no_grad(), torch.autocast(device, dtype=torch.float16):
            out = make(x) @ weight.detach()
        assert (out.device.type, out.dtype) == (device, torch.float16)
        scale = scaler.scale(out.float().mean()) / out.float().mean()
        grad = x.T @ torch.ones(4, 3) * scale.item()
        weight.grad = make(grad * (torch.inf if step == 1 else 1))
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        found.append([scaler.last_step.norm.item(), scaler.last_step.skipped])
    return found


def test_tensors_on_mps_get_the_fallback_under_autocast_with_a_scaler(monkeypatch):
    start = torch.linspace(-1, 2, 24).reshape(8, 3)
    on_cpu = start.clone().requires_grad_()
    with _ops.use_only("fallback"):
        expected = train(fastamp.GradScaler("cpu"), on_cpu, torch.clone)
    for module in (fallback, types):
        monkeypatch.setattr(module, "PLAIN_TYPES", (torch.Tensor, torch.nn.Parameter, Played))
    with PlayMps():
        weight = Played(start.clone()).requires_grad_()
        scaler = fastamp.GradScaler("mps")
        found = train(scaler, weight, lambda tensor: Played(tensor.clone()))
        assert scaler.last_step.norm.device.type == scaler.last_step.scale.device.type == "mps"
        assert scaler.skipped_steps == 1
    assert [skipped for _, skipped in found] == [False, True, False]
    # Sums of squares are float32 there.
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
    torch.testing.assert_close(weight.held, on_cpu.detach())
