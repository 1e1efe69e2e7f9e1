"""What the tests of the tracker share: trackers that have logged, a sink, a run that overflows."""

from __future__ import annotations

import math

import torch

import fastamp


def logged(values, capacity=4096, sinks=(), name="x"):
    made = fastamp.MetricsTracker(capacity, sinks)
    for step, value in enumerate(values):
        made.log_scalar(name, value, step)
    return made


class Collect(list):
    """A sink that keeps what it gets."""

    def __call__(self, scalars):
        self.extend(scalars)


def overflowing_run(scaler, on_device, bad_steps, n_steps=6, *, fused=True):
    parameter = torch.nn.Parameter(torch.ones(4, device=on_device))
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=fused)
    for step in range(n_steps):
        scale = scaler.scale(torch.ones((), device=on_device))
        value = math.inf if step in bad_steps else 1.0
        parameter.grad = torch.full_like(parameter, value) * scale.detach()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
    return parameter
