"""What the ranks of step/test_shards.py run; every function returns what the test looks at."""

from __future__ import annotations

import math
from unittest import mock

import torch
import torch.distributed as dist
from support.gradients import parameters_with, random
from support.training import OPTIMIZERS
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    init_device_mesh,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fastamp
from fastamp import _ops

HOWS = ("step", "unscale then step", "clip then step")
SHAPES = [(1,), (3,), (2, 5), (1003, 7), (64, 130), ()]  # uneven over 4, and empty on some


def mesh_of(*sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[-len(sizes) :])


def spread(tensor, mesh, *placements):
    return DTensor.from_local(tensor, mesh).redistribute(placements=placements)


def summands(tensor, mesh):
    """Return the tensor as a Partial one, whose parts differ."""
    rank, count = mesh.get_local_rank(), mesh.size()
    part = tensor * (2 * rank + 1) / count**2
    return DTensor.from_local(part, mesh, [Partial()])


def grads_on(layout):
    """Return tensors that all ranks know, and the same ones spread over the ranks."""
    wholes = [random(shape, torch.float32, "cpu", seed=i) for i, shape in enumerate(SHAPES)]
    count = dist.get_world_size()
    line = mesh_of(count)
    if layout == "fsdp":
        return wholes, [spread(w, line, Shard(0) if w.ndim else Replicate()) for w in wholes]
    if layout == "partial":
        return wholes, [summands(w, line) for w in wholes]
    if layout == "tensor parallel":
        kinds = [Replicate(), Replicate(), Shard(1), Shard(1), Shard(0), Replicate()]
        return wholes, [spread(w, line, kind) for w, kind in zip(wholes, kinds, strict=True)]
    grid = mesh_of(2, count // 2)
    if layout == "hsdp":
        kinds = [Shard(0) if w.ndim else Replicate() for w in wholes]
        return wholes, [spread(w, grid, Replicate(), k) for w, k in zip(wholes, kinds, strict=True)]
    assert layout == "mixed"
    mixed = [
        wholes[0],
        spread(wholes[1], line, Shard(0)),
        spread(wholes[2], grid, Replicate(), Shard(1)),
        spread(wholes[3], grid, Shard(0), Shard(0)),
        spread(wholes[4], grid, Shard(1), Replicate()),
        spread(wholes[5], line, Replicate()),
    ]
    return wholes, mixed


def norm_of(tensors):
    """Return the norm as a number; that of DTensors is one."""
    return whole(fastamp.get_total_norm(tensors)).item()


def norms(backend, layout):
    """Return the norm of tensors that are spread, and of the same ones that are not."""
    with _ops.use_only(backend):
        wholes, grads = grads_on(layout)
        return norm_of(grads), norm_of(wholes)


def norm_in_larger_world(layout):
    """Return the norm where no process group spans the meshes, and the collectives it took."""
    wholes, grads = grads_on(layout)
    size_of = dist.get_world_size

    def larger(group=None):
        return 9 if group is None else size_of(group)

    with mock.patch.object(dist, "get_world_size", larger), CommDebugMode() as counted:
        norm = norm_of(grads)
    return norm, norm_of(wholes), counted.get_total_counts()


def norm_with(value, layout, rank, index):
    """Return the norm where one rank holds a bad value, and whether the step was skipped."""
    _, grads = grads_on(layout)
    if dist.get_rank() == rank:
        _ops.local_of(grads[index]).view(-1)[0] = value
    norm = norm_of(grads)
    scaler = fastamp.GradScaler("cpu", enabled=False)
    scaler.step(torch.optim.SGD(as_parameters(grads), lr=1.0), max_norm=1.0)
    return repr(norm), scaler.last_step.skipped


def as_parameters(grads):
    made = []
    for grad in grads:
        placed = grad
        if isinstance(grad, DTensor) and any(p.is_partial() for p in grad.placements):
            placed = grad.redistribute(placements=[Replicate()] * grad.device_mesh.ndim)
        parameter = torch.nn.Parameter(torch.zeros_like(placed))
        parameter.grad = grad
        made.append(parameter)
    return made


def whole(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def step(layout, name):
    """Unscale, clip and step in each way, spread and not; return what both have then."""
    wholes, grads = grads_on(layout)
    return [step_in(how, name, wholes, grads) for how in HOWS]


def step_in(how, name, wholes, grads):
    norm = norm_of(wholes)
    results = []
    for side in (wholes, grads):
        parameters = as_parameters([g * 1024 for g in side])
        optimizer = OPTIMIZERS[name](parameters)
        scaler = fastamp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.ones(()))
        if how == "unscale then step":
            scaler.unscale_(optimizer)
        if how == "clip then step":
            clipped = scaler.clip_grad_norm_(optimizer, norm / 2)
            assert type(clipped) is torch.Tensor
            assert clipped.item() == norm
            scaler.step(optimizer)
        else:
            scaler.step(optimizer, max_norm=norm / 2)
        scaler.update()
        assert scaler.last_step.norm.item() == norm
        results.append([(whole(p.grad), whole(p)) for p in parameters])
    return results


def clip_functions(layout):
    """Return gradients after clipping, spread and not."""
    wholes, grads = grads_on(layout)
    results = []
    for side in (wholes, grads):
        ours = as_parameters([g.clone() for g in side])
        fastamp.clip_grad_norm_(ours, 1.0)
        results.append([whole(p.grad) for p in ours])
    return results


def error_text():
    """Return the text of clip's error where the second gradient of rank 0 is not finite."""
    _, grads = grads_on("fsdp")
    if dist.get_rank() == 0:
        grads[1].to_local()[0] = math.inf
    try:
        fastamp.clip_grad_norm_(as_parameters(grads), 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        return str(error)


# --- process groups, pipelines, names ---


def plain_parts(missing):
    """Step plain parts over a process group, of which the rank `missing` holds none."""
    rank = dist.get_rank()
    values = random((dist.get_world_size(), 5), torch.float32, "cpu")
    values[missing] = 0
    parameters = parameters_with(None if rank == missing else values[rank] * 8)
    scaler = fastamp.GradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
    scaler.scale(torch.ones(()))
    scaler.step(torch.optim.SGD(parameters, lr=1.0, fused=True), max_norm=1.0)
    scaler.update()
    expected = fastamp.get_total_norm(values).item()
    return scaler.last_step.norm.item(), expected, scaler.last_step.skipped


def pipeline(bad_rank):
    """Step two stages, each sharded over its own half of the ranks and beside a plain gradient."""
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    grid = mesh_of(2, half)
    values = random((2, 6, 3), torch.float32, "cpu")
    stage = rank // half
    parameters = as_parameters(
        [spread(values[stage], grid["inner"], Shard(0)), torch.full((2,), 1.0 + stage)]
    )
    if rank == bad_rank:
        parameters[0].grad.to_local()[0, 0] = math.nan
    group = grid.get_group("outer")
    scaler = fastamp.GradScaler("cpu", init_scale=1.0, process_group=group)
    scaler.scale(torch.ones(()))
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as counted:
        scaler.step(torch.optim.AdamW(parameters, lr=1.0, fused=True), max_norm=1.0)
    scaler.update()
    wholes = [values, torch.tensor([1.0, 1.0, 2.0, 2.0])]
    expected = norm_of(wholes)
    got = scaler.last_step.norm.item(), scaler.last_step.skipped, scaler.get_scale()
    return got, expected, counted.call_count


def group_over_mesh(name):
    """Return the norm where the process group holds all ranks of the mesh, or a row of them."""
    wholes, grads = grads_on("hsdp")
    norm = norm_of(wholes)
    group = dist.group.WORLD if name == "world" else mesh_of(2, 2).get_group(name)
    scaler = fastamp.GradScaler("cpu", enabled=False, process_group=group)
    with CommDebugMode() as counted:
        scaler.step(torch.optim.AdamW(as_parameters(grads), fused=True), max_norm=1.0)
    return scaler.last_step.norm.item(), norm, counted.get_total_counts()


class Named(torch.nn.Module):
    def __init__(self, grads):
        super().__init__()
        for i, parameter in enumerate(as_parameters(grads)):
            self.register_parameter(f"w{i}", parameter)


def bad_names(layout):
    """Put bad values into known places of tensors that are then spread, and name them."""
    wholes, grads = grads_on(layout)
    wholes[1][2] = math.nan
    wholes[4][17, 100] = math.inf
    wholes[4][40, 3] = -math.inf
    for grad, tensor in zip(grads, wholes, strict=True):
        if isinstance(grad, DTensor):
            fresh = spread(tensor, grad.device_mesh, *grad.placements)
            grad.to_local().copy_(fresh.to_local())
    found = fastamp.GradScaler("cpu").nonfinite_parameters(Named(grads))
    return [(entry.rank, tuple(entry)) for entry in found], repr(found[0])


def fsdp_over_tensor_parallel():
    """Step a model on a mesh of two dimensions."""
    grid = mesh_of(2, 2)
    layers = [torch.nn.Linear(5, 14), torch.nn.Linear(14, 3), torch.nn.LayerNorm(3)]
    model = torch.nn.Sequential(*layers)
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel(output_layouts=Shard(0))}
    plan |= {"2": SequenceParallel(sequence_dim=0)}
    parallelize_module(model, grid["inner"], plan)
    fully_shard(model, mesh=grid["outer"])
    scaler = fastamp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(random((4, 5), torch.float32, "cpu")).square().sum()).backward()
    wholes = [whole(p.grad) / 4 for p in model.parameters()]
    scaler.step(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), max_norm=0.1)
    scaler.update()
    kinds = " ".join(str(p.placements) for p in model.parameters())
    norm = norm_of(wholes)
    return scaler.last_step.norm.item(), norm, kinds


def bad_names_of_plain_parts(bad_rank):
    """Name bad values of plain parts: without a group each rank its own, else all of them."""
    grad = torch.ones(3)
    if dist.get_rank() == bad_rank:
        grad[1] = math.inf
    module = Named([grad])
    found = [
        fastamp.GradScaler("cpu", process_group=group).nonfinite_parameters(module)
        for group in (None, dist.group.WORLD)
    ]
    return [[(entry.rank, tuple(entry)) for entry in entries] for entries in found]


def clipped_in_a_graph():
    """Clip in graphs of torch.compile, with torch's function and with ours."""
    results = []
    for clip in (torch.nn.utils.clip_grad_norm_, fastamp.clip_grad_norm_):
        parameters = as_parameters(grads_on("fsdp")[1])
        compiled = torch.compile(clip, backend="eager", fullgraph=True)
        norm = compiled(parameters, 0.5)
        results.append([whole(norm).item(), *(whole(p.grad) for p in parameters)])
    return results
