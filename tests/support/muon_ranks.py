"""What the ranks of step/test_muon.py run: Muon's steps of sharded matrices beside whole ones."""

from __future__ import annotations

import math
from unittest import mock

import torch
import torch.distributed as dist
from support.bits import bits
from support.gradients import random
from support.shard_cases import mesh_of, spread, whole
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

import fastamp
from fastamp import _ops
from fastamp.step import muon

SHAPES = [(48, 32), (32, 48), (1, 40), (6, 5), (48, 32), (40, 1), (48, 32), (7, 64)]


def placed(layout):
    """Return a function that makes a DTensor, or leaves a tensor as it is."""
    if layout == "alone":
        return torch.clone
    count = dist.get_world_size()
    if layout == "hsdp":
        mesh, places = mesh_of(2, count // 2), [Replicate(), Shard(0)]
    else:
        mesh, places = mesh_of(count), [Shard(1 if layout == "columns" else 0)]
    return lambda tensor: spread(tensor, mesh, *places)


def steps(layout, shapes=SHAPES, *, plain=(), enabled=True):
    """Step with an overflow on the first rank; return the ways, and the bits of all."""
    place = placed(layout)
    values = [random(shape, torch.float32, "cpu", seed=i) for i, shape in enumerate(shapes)]
    places = [torch.clone if i in plain else place for i in range(len(shapes))]
    parameters = [torch.nn.Parameter(put(v)) for put, v in zip(places, values, strict=True)]
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.05}]
    optimizer = torch.optim.Muon([group for group in groups if group["params"]], lr=0.02)
    scaler = fastamp.GradScaler("cpu", init_scale=8.0, enabled=enabled)
    scaler.scale(torch.ones(()))
    ways = set()
    for step in range(4):
        for i, (p, put) in enumerate(zip(parameters, places, strict=True)):
            p.grad = put(random(shapes[i], torch.float32, "cpu", seed=100 * step + i))
        if step == 1 and (layout == "alone" or dist.get_rank() == 0):
            _ops.local_of(parameters[0].grad)[0, 0] = math.inf
        scaler.step(optimizer, max_norm=2.0, zero_grad=step == 2)
        ways.add(scaler.last_step.way)
        assert scaler.last_step.skipped == (step == 1)
        assert all((p.grad is None) == (step == 2) for p in parameters)
        scaler.update()
    states = [optimizer.state[p]["momentum_buffer"] for p in parameters]
    return ways, [bits(whole(t)).tobytes() for t in [*parameters, *states]]


def in_backend(name, layout, options, room=muon.CPU_STACK):
    """Return what steps of sharded matrices and of whole ones leave."""
    with _ops.use_only(name), mock.patch.object(muon, "CPU_STACK", room):
        return steps(layout, **options), steps("alone", **options)


def counted(count):
    """Step three times; return the matrices of each stack, and the comparisons of ranks."""
    stacks, place = [], placed("rows")
    shapes = [(8, 4 + i // 3) for i in range(count)]  # stacks of three
    parameters = [torch.nn.Parameter(place(torch.ones(shape))) for shape in shapes]
    optimizer = torch.optim.Muon(parameters)
    reduce = dist.all_reduce
    with (
        mock.patch.object(muon, "orthogonalize_", lambda stack, *_: stacks.append(len(stack))),
        mock.patch.object(dist, "all_reduce", side_effect=reduce) as reduces,
    ):
        for _ in range(3):
            for p, shape in zip(parameters, shapes, strict=True):
                p.grad = place(torch.ones(shape))
            fastamp.optimizer_step(optimizer, zero_grad=True)
    return stacks, reduces.call_count


def trained(spreads):
    """Train a model by Muon and AdamW, under FSDP2 or alone; return the way and the parameters."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3)]
    model = torch.nn.Sequential(*layers)
    if spreads:
        fully_shard(model)
    optimizers = [
        torch.optim.Muon([model[0].weight], lr=0.02),
        torch.optim.AdamW([p for p in model.parameters() if p is not model[0].weight]),
    ]
    count, rank = (dist.get_world_size(), dist.get_rank()) if spreads else (1, 0)
    for step in range(3):
        batch = random((8, 6), torch.float32, "cpu", seed=step)
        model(batch[rank * 8 // count : (rank + 1) * 8 // count]).square().mean().backward()
        report = fastamp.optimizer_step(optimizers, 0.5, zero_grad=True)
    return report.way, [whole(p).detach() for p in model.parameters()]


def trained_by_both():
    """Train under FSDP2, and alone."""
    return trained(spreads=True), trained(spreads=False)


def unlike(layout, unlike, ranks):
    """Step, where some ranks alone have a hook, or lack a gradient.

    Returns:
        The error, and whether the step changed nothing.
    """
    place, is_unlike = placed(layout), dist.get_rank() in ranks
    parameters = [torch.nn.Parameter(place(torch.ones(8, 4))) for _ in range(2)]
    optimizer = torch.optim.Muon(parameters, lr=0.02)
    for p in parameters:
        p.grad = place(torch.ones(8, 4))
    before = [bits(whole(p)).tobytes() for p in parameters]
    if is_unlike and unlike == "gradient":
        parameters[1].grad = None
    elif is_unlike:
        optimizer.register_step_post_hook(lambda *_: None)
    said = None
    try:
        fastamp.optimizer_step(optimizer, 1.0)
    except RuntimeError as error:
        said = str(error)
    return said, [bits(whole(p)).tobytes() for p in parameters] == before


def with_experts(lacking):
    """Step matrices of four ranks, and between them one of each pair, that some ranks lack.

    Returns:
        The error, or the bits of the two matrices that all ranks share.
    """
    mesh = mesh_of(2, 2)
    places = [
        placed("rows"),
        lambda tensor: spread(tensor, mesh["inner"], Shard(0)),
        placed("rows"),
    ]
    values = [random((8, 6), torch.float32, "cpu", seed=i) for i in range(3)]
    parameters = [torch.nn.Parameter(put(v)) for put, v in zip(places, values, strict=True)]
    optimizer = torch.optim.Muon(parameters, lr=0.02)
    for p, put, value in zip(parameters, places, values, strict=True):
        p.grad = put(value + 1)
    if dist.get_rank() in lacking:
        parameters[1].grad = None
    try:
        fastamp.optimizer_step(optimizer)
    except RuntimeError as error:
        return str(error)
    return [bits(whole(p)).tobytes() for p in parameters[::2]]
