"""Optimizers that fastamp updates itself, and what the tests of their steps share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from support.bits import bits
from support.devices import device_in_use

import fastamp

if TYPE_CHECKING:
    from collections.abc import Iterable


SIZES = [(3,), (70, 5), (0,), (1025,), (70_000,)]
RULES = {
    "adamw": (torch.optim.AdamW, {}),
    "adamw, maximize": (torch.optim.AdamW, {"maximize": True}),
    "adam, near end": (torch.optim.Adam, {"weight_decay": 0.1, "betas": (0.3, 0.99)}),
    "sgd": (torch.optim.SGD, {"weight_decay": 0.1}),
    "sgd, nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}

MORE_RULES = RULES | {
    "adam": (torch.optim.Adam, {}),
    "adam, maximize": (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True, "eps": 1e-3}),
    "sgd, maximize": (torch.optim.SGD, {"maximize": True}),
    "sgd, momentum": (torch.optim.SGD, {"momentum": 0.9}),
}
"""With options that few tests need."""


def make(name, dtype=torch.float32, *, sizes=SIZES, device=None, **options):
    """Return parameters, the same each time, and their optimizer with two groups."""
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(size, generator=generator) for size in sizes]
    made = [torch.nn.Parameter(each.to(device or device_in_use(), dtype)) for each in values]
    cls, given = MORE_RULES[name]
    groups = [{"params": made[:2]}, {"params": made[2:], "lr": 3e-3}]
    return made, cls([g for g in groups if g["params"]], **{"lr": 1e-2, **given, **options})


def give(parameters, scale=1.0, seed=0):
    """Give parameters random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        grad = torch.randn(p.shape, generator=generator) * scale
        p.grad = grad.to(p).as_strided(p.shape, p.stride())


def scaler_of(cls=fastamp.GradScaler, device=None, **options):
    """Return a scaler that is ready to step."""
    device = device or device_in_use()
    scaler = cls(device, **{"init_scale": 1024.0, **options})
    scaler.scale(torch.ones((), device=device))
    return scaler


def everything(parameters: Iterable[torch.Tensor], optimizer) -> list[bytes]:
    """Return the bits of parameters, gradients and states."""
    states = [v for p in parameters for v in optimizer.state.get(p, {}).values() if v is not None]
    grads = [p.grad for p in parameters if p.grad is not None]
    return [bits(t.detach()).tobytes() for t in [*parameters, *grads, *states]]
