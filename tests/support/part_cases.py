"""What the ranks of step/test_parts.py run: native steps of DTensors beside those of whole ones."""

from __future__ import annotations

import copy
import math

import torch
import torch.distributed as dist
from support.bits import bits
from support.gradients import random
from support.shard_cases import as_parameters, grads_on, mesh_of, spread, whole
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import fastamp
from fastamp import _ops

RULES = {
    "adamw": (torch.optim.AdamW, {}),
    "adamw fused": (torch.optim.AdamW, {"fused": True, "maximize": True}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "fused": True}),
}
OVERFLOWS, STEPS = {0, 3}, 6


def whole_bits(tensor):
    return bits(whole(tensor)).tobytes()


def everything(parameters, optimizer):
    """Return the bits of whole parameters, gradients and states."""
    states = [v for p in parameters for v in optimizer.state.get(p, {}).values() if v is not None]
    grads = [p.grad for p in parameters if p.grad is not None]
    return [whole_bits(t) for t in [*parameters, *grads, *states]]


def sides(layout, rule, dtype=torch.float32):
    """Return gradients, parameters and optimizer, of whole tensors and of spread ones."""
    cls, options = RULES[rule]
    for grads in grads_on(layout):
        parameters = as_parameters([grad.to(dtype) for grad in grads])
        yield [p.grad for p in parameters], parameters, cls(parameters, lr=0.1, **options)


def native_steps(backend, layout, rule, dtype, zero_grad):
    """Step spread and whole tensors, with overflows on one rank; return all of both."""
    results = []
    with _ops.use_only(backend):
        for side, (grads, parameters, optimizer) in enumerate(sides(layout, rule, dtype)):
            scaler = fastamp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
            scaler.scale(torch.ones(()))
            for step in range(STEPS):
                for p, grad in zip(parameters, grads, strict=True):
                    p.grad = grad * (1 + step)
                if step in OVERFLOWS and (side == 0 or dist.get_rank() == 0):
                    _ops.local_of(parameters[3].grad)[0, 0] = math.inf
                scaler.step(optimizer, max_norm=0.5, zero_grad=zero_grad)
                assert scaler.last_step.way.startswith("native"), scaler.last_step.way
                assert scaler.last_step.skipped == (step in OVERFLOWS)
                assert all((p.grad is None) == zero_grad for p in parameters)
                assert all(_ops.local_of(p).grad is None for p in parameters if is_spread(p))
                scaler.update()
            for p in filter(is_spread, parameters):
                states = [v for v in optimizer.state[p].values() if v is not None and v.ndim]
                assert all(s.placements == p.placements for s in states if is_spread(s))
            results.append(everything(parameters, optimizer))
    return results


def is_spread(tensor):
    return isinstance(tensor, DTensor)


def torchs_steps_between(rule):
    """Return parameters after steps that are fastamp's, torch's, and of a state that was loaded."""
    results = []
    for native in ({0, 1, 2, 3}, {0, 3}, {1, 2}):
        _, (grads, parameters, optimizer) = sides("fsdp", rule)
        for group in optimizer.param_groups if rule == "sgd" else ():
            group["fused"] = None  # torch has no fused SGD of DTensors
        for step in range(4):
            for p, grad in zip(parameters, grads, strict=True):
                p.grad = grad * (1 + step)
            if step in native:
                way = fastamp.optimizer_step(optimizer, 1e9).way
                assert way.startswith("native"), (way, step, native)
            else:
                optimizer.step()
            if step == 1:  # as a checkpoint does
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = type(optimizer)(optimizer.param_groups)
                optimizer.load_state_dict(saved)
        counts = [_ops.local_of(s["step"]).item() for s in optimizer.state.values() if "step" in s]
        assert counts == [4.0] * len(counts)
        results.append(torch.cat([whole(p).flatten() for p in parameters]))
    return results


class Model(torch.nn.Module):
    """Three layers, one of which FSDP2 is told to ignore."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 3))
        self.ignored = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.layers(x).square() @ self.ignored


def fsdp_with_ignored_parameters():
    """Train with a plain parameter beside DTensors, and alone; return both, and the way."""
    results, rank = [], dist.get_rank()
    for spreads in (False, True):
        model = Model()
        if spreads:
            fully_shard(model, ignored_params={model.ignored})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(3):
            batch = random((2 * dist.get_world_size(), 6), torch.float32, "cpu", seed=step)
            own = batch[2 * rank : 2 * rank + 2] if spreads else batch
            model(own).mean().backward()
            if spreads:
                dist.all_reduce(model.ignored.grad)
                model.ignored.grad /= dist.get_world_size()
            report = fastamp.optimizer_step(optimizer, 0.5, zero_grad=True)
        kinds = {type(p) for p in model.parameters()}
        results.append((report.way, len(kinds), [whole(p) for p in model.parameters()]))
    return results


def gradients_placed_otherwise():
    """Step with a gradient on all ranks, and with states on all ranks, of a parameter in parts."""
    mesh = mesh_of(dist.get_world_size())
    value = random((6, 4), torch.float32, "cpu")
    found = []
    for change in (None, "grad", "state"):
        parameter = torch.nn.Parameter(spread(torch.zeros(6, 4), mesh, Shard(0)))
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        for _ in range(2):
            kind = Replicate() if change == "grad" else Shard(0)
            parameter.grad = spread(value, mesh, kind)
            report = fastamp.optimizer_step(optimizer, 1.0)
            if change == "state":
                state = optimizer.state[parameter]
                state["exp_avg"] = state["exp_avg"].redistribute(placements=[Replicate()])
        found.append((report.way, whole(parameter)))
    return found


def parts_that_are_replaced():
    """Step before and after this rank's part of a parameter has moved, as FSDP2 does."""
    mesh = mesh_of(dist.get_world_size())
    parameter = torch.nn.Parameter(spread(torch.zeros(6, 4), mesh, Shard(0)))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for _ in range(2):
        parameter.grad = spread(torch.ones(6, 4), mesh, Shard(0))
        fastamp.optimizer_step(optimizer)
        parameter._local_tensor = parameter._local_tensor.clone()
    return whole(parameter).unique().tolist()
