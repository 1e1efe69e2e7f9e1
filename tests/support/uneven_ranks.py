"""What the ranks of step/test_uneven_ranks.py run: some hold no gradients, or fail in mid-step."""

from __future__ import annotations

import math
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from support.gradients import parameters_with, random
from support.shard_cases import as_parameters, mesh_of, spread, whole
from torch.distributed.tensor import DTensor, Shard

import fastamp

HANGS_S = 20.0  # after which a rank gives up: the other one runs other collectives


class Sub(torch.Tensor):
    """A tensor of another type, as libraries have them."""


def set_up(*, enabled=True, group=None):
    """Return a scaler on ranks that soon give up."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=HANGS_S), dist.group.WORLD)
    scaler = fastamp.GradScaler("cpu", init_scale=4.0, enabled=enabled, process_group=group)
    scaler.scale(torch.ones(()))
    return scaler


def uneven_parameters(what):
    """Return parameters of two ranks, and the values of their gradients that count."""
    rank, values = dist.get_rank(), random((4, 3), torch.float32, "cpu")
    if what == "process group, another type":
        mine = values[2 * rank : 2 * rank + 2].clone()
        return as_parameters([mine.as_subclass(Sub) if rank == 1 else mine]), [values]
    shared = [random(5, torch.float32, "cpu")] * (what == "DTensors, a plain one left")
    parameters = as_parameters([spread(values, mesh_of(2), Shard(0)), *map(torch.clone, shared)])
    if rank == 1:
        parameters[0].grad = None
    return parameters, [values[:2], *shared]


def clip_and_step(what, how, bad):
    """Clip and step; return the norm, its expected value, whether it was skipped, and the scale."""
    parameters, counted = uneven_parameters(what)
    expected = math.inf if bad else fastamp.get_total_norm(counted).item()
    if bad and dist.get_rank() == 0:
        getattr(parameters[0].grad, "_local_tensor", parameters[0].grad)[0, 0] = math.inf
    group = dist.group.WORLD if what.startswith("process group") else None
    scaler = set_up(enabled=how != "without scaling", group=group)
    if how == "clip_grad_norm_":
        return fastamp.clip_grad_norm_(parameters, 1.0).item(), expected, bad, 2.0 if bad else 4.0
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(scaler.get_scale())
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    if how == "clip, then step":
        scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer, max_norm=1.0 if how != "clip, then step" else None)
    scaler.update()
    report = scaler.last_step
    return report.norm.item(), expected, report.skipped, scaler.get_scale()


def fail_in_a_collective(fused, enabled):
    """Lose the connection in a step, then make it again; return what was left and the result."""
    values, results, left = random((4, 3), torch.float32, "cpu"), [], []
    for fails in (False, True):
        parameters = as_parameters([spread(values, mesh_of(2), Shard(0)), values[0].clone()])
        optimizer = torch.optim.AdamW(parameters, lr=1.0, fused=fused)
        scaler = set_up(enabled=enabled)
        if fails:
            with mock.patch.object(dist, "all_reduce", side_effect=RuntimeError("lost")):
                try:
                    scaler.step(optimizer, max_norm=1.0)
                except RuntimeError as error:
                    left += [str(error), parameters[0]._local_tensor.grad]
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        results.append([whole(p) for p in parameters])
    return left, *results


def norms_of_dtensors(with_plain):
    """Return the norm of DTensors in three ways, its expected value, and what is wrong with it."""
    values, plain = random((4, 3), torch.float32, "cpu"), [torch.ones(3)] * with_plain
    parameters = as_parameters([spread(values, mesh_of(2), Shard(0)), *plain])
    expected = fastamp.get_total_norm([values, *plain]).item()
    norm = fastamp.clip_grad_norm_(parameters, 1e9)
    report = fastamp.optimizer_step(torch.optim.SGD(parameters, lr=1.0), max_norm=1e9)
    found = norm.full_tensor().item(), norm.item(), report.norm.item()
    wrong = type(norm) is not DTensor or not all(p.is_replicate() for p in norm.placements)
    return found, expected, wrong or type(report.norm) is not torch.Tensor


def experts():
    """Step a dense weight of four ranks, and an expert of each pair: the error, and the norms."""
    mesh, rank = mesh_of(2, 2), dist.get_rank()
    whole = torch.arange(1.0, 9.0).view(4, 2)
    dense, expert = whole, whole * (10 if rank < 2 else 20)
    made = [spread(dense, mesh, Shard(0), Shard(1)), spread(expert, mesh["inner"], Shard(0))]
    parameters = [torch.nn.Parameter(torch.zeros_like(each)) for each in made]
    for p, grad in zip(parameters, made, strict=True):
        p.grad = grad
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    try:
        fastamp.optimizer_step(optimizer, max_norm=1.0)
    except ValueError as error:
        said = str(error)
    assert all(not p.to_local().any() for p in parameters)
    report = fastamp.optimizer_step(optimizer, 1.0, process_group=dist.group.WORLD)
    norm = math.sqrt((1 + 10**2 + 20**2) * whole.square().sum().item())
    return said, (report.norm.item(), norm)


def step_in_a_group():
    """Step twice without a scaler; in the first step one rank alone has a bad gradient."""
    (p,) = parameters_with(torch.ones(2))
    optimizer, found = torch.optim.SGD([p], lr=1.0), []
    for bad in (True, False):
        p.grad = torch.ones(2)
        if bad and dist.get_rank() == 1:
            p.grad[0] = math.inf
        report = fastamp.optimizer_step(optimizer, 1.0, process_group=dist.group.WORLD)
        found.append(report.skipped)
    return found, report.norm.item(), p.tolist()
