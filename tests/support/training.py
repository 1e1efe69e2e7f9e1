"""Models, optimizers and loops of the tests that train: stock's sequence and ours."""

from __future__ import annotations

import copy
import math

import torch
from support.gradients import random

STEPS = 25
OVERFLOWS = (3, 20)


class SignMomentum(torch.optim.Optimizer):
    """An optimizer that torch does not know."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    moment = self.state[p].setdefault("moment", torch.zeros_like(p))
                    moment.lerp_(p.grad, 0.1)
                    p.sub_(moment.tanh(), alpha=group["lr"])


OPTIMIZERS = {
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True),
    "adam fused": lambda ps: torch.optim.Adam(ps, lr=1e-3, fused=True),
    "sgd fused": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, fused=True),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-3, foreach=True),
    "sgd momentum": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
    "own": lambda ps: SignMomentum(ps, lr=1e-2),
}
FUSED = [name for name in OPTIMIZERS if name.endswith("fused")]


def convnet(device):
    torch.manual_seed(0)
    layers = [
        torch.nn.Conv2d(3, 8, 3, bias=False),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 36, 10),
    ]
    return torch.nn.Sequential(*layers).to(device), random(
        (STEPS, 4, 3, 8, 8), torch.float32, device
    )


def mlp(device):
    """A model whose backward is the same to the bit at every run, on a GPU too."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8)]
    return torch.nn.Sequential(*layers).to(device), random((STEPS, 4, 16), torch.float32, device)


def train(model, data, make_optimizer, scaler, step, overflows=OVERFLOWS):
    """Train with an inf in one gradient at some steps; return what there is afterwards."""
    optimizer = make_optimizer(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    skipped, scales = [], []
    for i, batch in enumerate(data):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        scaler.scale(loss).backward()
        if i in overflows:
            last = [p for p in model.parameters() if p.grad is not None][-2]
            last.grad.view(-1)[1] = math.inf
        before = None
        if i in overflows:
            before = copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"]])
        did_skip = step(scaler, optimizer, model)
        scaler.update()
        if did_skip:
            assert before is not None
            assert_same_bits(before, [model.state_dict(), optimizer.state_dict()["state"]])
            skipped.append(i)
        else:
            scheduler.step()
        scales.append(scaler.get_scale())
    return {
        "parameters": [p.detach() for p in model.parameters()],
        "state": optimizer.state_dict()["state"],
        "scales": scales,
        "lr": scheduler.get_last_lr(),
        "skipped": skipped,
    }


def stock_step(max_norm):
    def step(scaler, optimizer, model):
        scaler.unscale_(optimizer)
        found = scaler._found_inf_per_device(optimizer).values()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        return any(flag.item() for flag in found)

    return step


def our_step(max_norm):
    def step(scaler, optimizer, _model):
        scaler.step(optimizer, max_norm=max_norm)
        return scaler.last_step.skipped

    return step


def tensors_in(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    return [tensor for item in items for tensor in tensors_in(item)]


def assert_same_bits(a, b):
    for x, y in zip(tensors_in(a), tensors_in(b), strict=True):
        assert torch.equal(x, y)


def assert_same_but_for_rounding(a, b):
    """The update is fastamp's own on the CPU, and rounds each operation once."""
    for x, y in zip(tensors_in(a), tensors_in(b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def make_scaler(cls, device, **kwargs):
    return cls(device, init_scale=1024.0, growth_interval=7, **kwargs)


def one_step(scaler, optimizer, device, **kwargs):
    scaler.scale(torch.ones((), device=device))
    scaler.step(optimizer, **kwargs)
