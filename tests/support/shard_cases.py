"""What the ranks of step/test_shards.py run; every function returns what the test looks at."""

from __future__ import annotations

import copy
import math
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from support.bits import bits
from support.gradients import parameters_with, random
from support.training import OPTIMIZERS
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fastamp
from fastamp import _ops

SHAPES = [(1,), (3,), (2, 5), (1003, 7), (64, 130), ()]  # uneven over 4, and empty on some
RULES = {
    "adamw": (torch.optim.AdamW, {}),
    "adamw fused": (torch.optim.AdamW, {"fused": True, "maximize": True}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "fused": True}),
}
OVERFLOWS, STEPS = {0, 3}, 6
HANGS_S = 20.0  # after which a rank gives up: the other one runs other collectives


def mesh_of(*sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[-len(sizes) :])


def spread(tensor, mesh, *placements):
    return DTensor.from_local(tensor, mesh).redistribute(placements=placements)


def is_spread(tensor):
    return isinstance(tensor, DTensor)


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


def whole(tensor):
    return tensor.detach().full_tensor() if is_spread(tensor) else tensor.detach()


def as_parameters(grads):
    made = []
    for grad in grads:
        placed = grad
        if is_spread(grad) and any(p.is_partial() for p in grad.placements):
            placed = grad.redistribute(placements=[Replicate()] * grad.device_mesh.ndim)
        parameter = torch.nn.Parameter(torch.zeros_like(placed))
        parameter.grad = grad
        made.append(parameter)
    return made


def scaler_of(scale=4.0, **options):
    """Return a scaler that is ready to step."""
    scaler = fastamp.GradScaler("cpu", init_scale=scale, **options)
    scaler.scale(torch.ones(()))
    return scaler


# --- norms ---


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


def clipped_in_a_graph():
    """Clip in graphs of torch.compile, with torch's function and with ours."""
    results = []
    for clip in (torch.nn.utils.clip_grad_norm_, fastamp.clip_grad_norm_):
        parameters = as_parameters(grads_on("fsdp")[1])
        compiled = torch.compile(clip, backend="eager", fullgraph=True)
        norm = compiled(parameters, 0.5)
        results.append([whole(norm).item(), *(whole(p.grad) for p in parameters)])
    return results


# --- steps ---


def step(layout, name, how):
    """Unscale, clip and step, spread and not; return what both have then."""
    wholes, grads = grads_on(layout)
    norm = norm_of(wholes)
    results = []
    for side in (wholes, grads):
        parameters = as_parameters([g * 1024 for g in side])
        optimizer, scaler = OPTIMIZERS[name](parameters), scaler_of(1024.0)
        bound = norm / 2
        if how != "step":
            scaler.unscale_(optimizer)
        if how == "clip_grad_norm_":
            fastamp.clip_grad_norm_(parameters, bound)
        if how == "clip, then step":
            clipped = scaler.clip_grad_norm_(optimizer, bound)
            assert (type(clipped), clipped.item()) == (torch.Tensor, norm)
        scaler.step(optimizer, max_norm=bound if how in ("step", "unscale, then step") else None)
        scaler.update()
        results.append([(whole(p.grad), whole(p)) for p in parameters])
    return results


def whole_bits(tensors):
    return [bits(whole(t)).tobytes() for t in tensors]


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
            scaler = scaler_of(8.0, growth_interval=100)
            for number in range(STEPS):
                for p, grad in zip(parameters, grads, strict=True):
                    p.grad = grad * (1 + number)
                if number in OVERFLOWS and (side == 0 or dist.get_rank() == 0):
                    _ops.local_of(parameters[3].grad)[0, 0] = math.inf
                scaler.step(optimizer, max_norm=0.5, zero_grad=zero_grad)
                assert scaler.last_step.way.startswith("native"), scaler.last_step.way
                assert scaler.last_step.skipped == (number in OVERFLOWS)
                assert all((p.grad is None) == zero_grad for p in parameters)
                assert all(_ops.local_of(p).grad is None for p in filter(is_spread, parameters))
                scaler.update()
            states = [(p, v) for p in parameters for v in optimizer.state[p].values()]
            states = [(p, v) for p, v in states if v is not None]
            assert all(s.placements == p.placements for p, s in states if is_spread(s) and s.ndim)
            given = [p.grad for p in parameters if p.grad is not None]
            results.append(whole_bits([*parameters, *given, *(s for _, s in states)]))
    return results


def torchs_steps_between(rule):
    """Return parameters after steps that are fastamp's, torch's, and of a state that was loaded."""
    results = []
    for native in ({0, 1, 2, 3}, {0, 3}, {1, 2}):
        _, (grads, parameters, optimizer) = sides("fsdp", rule)
        for group in optimizer.param_groups if rule == "sgd" else ():
            group["fused"] = None  # torch has no fused SGD of DTensors
        for number in range(4):
            for p, grad in zip(parameters, grads, strict=True):
                p.grad = grad * (1 + number)
            if number in native:
                way = fastamp.optimizer_step(optimizer, 1e9).way
                assert way.startswith("native"), (way, number, native)
            else:
                optimizer.step()
            if number == 1:  # as a checkpoint does
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = type(optimizer)(optimizer.param_groups)
                optimizer.load_state_dict(saved)
        results.append(torch.cat([whole(p).flatten() for p in parameters]))
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


def fsdp_over_tensor_parallel():
    """Step a model on a mesh of two dimensions."""
    grid = mesh_of(2, 2)
    layers = [torch.nn.Linear(5, 14), torch.nn.Linear(14, 3), torch.nn.LayerNorm(3)]
    model = torch.nn.Sequential(*layers)
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel(output_layouts=Shard(0))}
    plan |= {"2": SequenceParallel(sequence_dim=0)}
    parallelize_module(model, grid["inner"], plan)
    fully_shard(model, mesh=grid["outer"])
    scaler = scaler_of()
    scaler.scale(model(random((4, 5), torch.float32, "cpu")).square().sum()).backward()
    norm = norm_of([whole(p.grad) / 4 for p in model.parameters()])
    scaler.step(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), max_norm=0.1)
    kinds = " ".join(str(p.placements) for p in model.parameters())
    return scaler.last_step.norm.item(), norm, kinds


# --- process groups and pipelines ---


def plain_parts(missing):
    """Step plain parts over a process group, of which the rank `missing` holds none."""
    rank = dist.get_rank()
    values = random((dist.get_world_size(), 5), torch.float32, "cpu")
    values[missing] = 0
    parameters = parameters_with(None if rank == missing else values[rank] * 8)
    scaler = scaler_of(8.0, process_group=dist.group.WORLD)
    scaler.step(torch.optim.SGD(parameters, lr=1.0, fused=True), max_norm=1.0)
    scaler.update()
    return scaler.last_step.norm.item(), norm_of(values), scaler.last_step.skipped


def pipeline(bad_rank):
    """Step two stages, each sharded over its own half of the ranks and beside a replica."""
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    mesh = mesh_of(2, half)["inner"]
    values = random((2, 6, 3), torch.float32, "cpu")
    stage = rank // half
    parts = [spread(values[stage], mesh, Shard(0))]
    parts.append(spread(torch.full((2,), 1.0 + stage), mesh, Replicate()))
    parameters = as_parameters(parts)
    if rank == bad_rank:
        parameters[0].grad.to_local()[0, 0] = math.nan
    scaler = scaler_of(1.0, process_group=dist.group.WORLD)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as counted:
        scaler.step(torch.optim.AdamW(parameters, lr=1.0, fused=True), max_norm=1.0)
    scaler.update()
    expected = norm_of([values, torch.tensor([1.0, 1.0, 2.0, 2.0])])
    got = scaler.last_step.norm.item(), scaler.last_step.skipped, scaler.get_scale()
    return got, expected, counted.call_count


def group_over_mesh():
    """Step where the process group has all ranks of the mesh, and where it has some of them."""
    wholes, grads = grads_on("hsdp")
    norm = norm_of(wholes)
    optimizer = torch.optim.AdamW(as_parameters(grads), fused=True)
    with CommDebugMode() as counted:
        report = fastamp.optimizer_step(optimizer, 1.0, process_group=dist.group.WORLD)
    mesh = mesh_of(2, 2)
    (parameter,) = as_parameters([spread(torch.ones(4), mesh["inner"], Shard(0))])
    try:
        sgd = torch.optim.SGD([parameter])
        fastamp.optimizer_step(sgd, 1.0, process_group=mesh.get_group("outer"))
    except ValueError as error:
        said = str(error).partition(", [")[0]
    return report.norm.item(), norm, counted.get_total_counts(), said


def experts():
    """Step a dense weight of four ranks, and an expert of each pair: the error, and the norms."""
    mesh, rank = mesh_of(2, 2), dist.get_rank()
    values = torch.arange(1.0, 9.0).view(4, 2)
    expert = spread(values * (10 if rank < 2 else 20), mesh["inner"], Shard(0))
    parameters = as_parameters([spread(values, mesh, Shard(0), Shard(1)), expert])
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    try:
        fastamp.optimizer_step(optimizer, max_norm=1.0)
    except ValueError as error:
        said = str(error)
    assert all(not p.to_local().any() for p in parameters)
    report = fastamp.optimizer_step(optimizer, 1.0, process_group=dist.group.WORLD)
    norm = math.sqrt((1 + 10**2 + 20**2) * values.square().sum().item())
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


# --- ranks without a gradient, and ranks that fail ---


class Sub(torch.Tensor):
    """A tensor of another type, as libraries have them."""


def _give_up_soon():
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=HANGS_S), dist.group.WORLD)


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
    _give_up_soon()
    parameters, counted = uneven_parameters(what)
    expected = math.inf if bad else fastamp.get_total_norm(counted).item()
    if bad and dist.get_rank() == 0:
        getattr(parameters[0].grad, "_local_tensor", parameters[0].grad)[0, 0] = math.inf
    if how == "clip_grad_norm_":
        return fastamp.clip_grad_norm_(parameters, 1.0).item(), expected, bad, 2.0 if bad else 4.0
    group = dist.group.WORLD if what.startswith("process group") else None
    scaler = scaler_of(enabled=how != "without scaling", process_group=group)
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


# --- names of bad values ---


def bad_names():
    """Put bad values into known places of tensors that are then sharded, and name this rank's."""
    wholes, grads = grads_on("fsdp")
    wholes[1][2] = math.nan
    wholes[4][17, 100] = math.inf
    wholes[4][40, 3] = -math.inf
    placed = [spread(w, g.device_mesh, *g.placements) for w, g in zip(wholes, grads, strict=True)]
    return fastamp.nonfinite_parameters(torch.nn.ParameterList(as_parameters(placed)))
