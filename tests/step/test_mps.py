"""Apple's GPUs, which have no float64, on a machine that has none."""

import torch
from support.played_mps import Played, PlayMps

import fastamp
from fastamp import _ops
from fastamp._ops import fallback, types


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
