"""Gradients that are spread over ranks: DTensors, and plain tensors over a process group.

Every rank reads what it holds; one all-reduce in each process group then adds up the sums and the
flags of all ranks. This module is imported when the first such gradient appears.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from fastamp._ops.grads import Grads, Part, parts_of
from fastamp._ops.types import Reduced, local_of

T = TypeVar("T")


class Layout(NamedTuple):
    """Which ranks hold parts of the same tensors, and whether this rank's elements count."""

    groups: tuple[ProcessGroup, ...] = ()
    """Of the mesh: reduced over one after the other, they cover it."""
    counts: bool = True
    """Whether this rank is the first one that holds its elements; only that one counts them."""
    process_group: ProcessGroup | None = None
    """The user's, reduced over last."""
    leads: bool = True
    """Whether this rank is the first one of its mesh in that group."""


@torch.no_grad()
def shards_of(
    tensors: Sequence[Tensor], process_group: ProcessGroup | None, owners: Iterable[Tensor] = ()
) -> Grads | None:
    """Sort this rank's parts of the tensors by layout; None if no rank holds any.

    The collectives follow from the owners, which all ranks know: a rank without a gradient, as of
    an expert that no token chose, joins in. Partial DTensors are reduced first: in the `.grad` of
    the owners, or else into copies.
    """
    owners = list(owners)
    if owners:
        tensors = align(owners)
        placed = _dtensors(owner if owner.grad is None else owner.grad for owner in owners)
    else:
        placed = [_summed(tensor) for tensor in _dtensors(tensors)]
    plain = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
    missing = {id(owner) for owner in owners if owner.grad is None}
    layouts: dict[Layout, list[Tensor]] = {}
    for layout, whole in zip(_layouts(placed, process_group), placed, strict=True):
        held = layouts.setdefault(layout, [])
        if id(whole) not in missing:
            held.append(local_of(whole))
    if plain or (process_group is not None and not layouts):
        # The same on all ranks of the largest mesh, and counted on the first one.
        largest = max(layouts, key=_num_ranks, default=Layout(process_group=process_group))
        counts = all(one.rank() == 0 for one in largest.groups)
        layouts.setdefault(largest._replace(counts=counts), []).extend(plain)
    device = next((each.device for each in (*tensors, *owners)), torch.device("cpu"))
    parts, of_parts = [], []
    for layout, held in layouts.items():
        # A rank that holds nothing of a layout joins its all-reduce with an empty tensor.
        found = parts_of(held or [torch.empty(0, dtype=torch.float32, device=device)])
        parts += found
        of_parts += [layout] * len(found)
    meshes = {id(each.device_mesh): each.device_mesh for each in placed if process_group is None}
    return Grads(parts, partial(_reduce, of_parts, [*meshes.values()])) if parts else None


def _refuse_submeshes(meshes: Sequence[DeviceMesh]) -> None:
    """Refuse meshes of different ranks, as torch does: other ranks may have other tensors."""
    ranks = {tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in meshes if len(meshes) > 1}
    if len(ranks) > 1:
        msg = f"gradients on meshes of different ranks, {sorted(ranks)}: ranks would get different "
        msg += "norms. Give process_group= if each mesh holds tensors of its own (experts); put "
        msg += "those that all ranks share on the largest mesh, with Replicate()"
        raise ValueError(msg)


def gather(found: list[T], tensors: Iterable[Tensor], group: ProcessGroup | None) -> list[T]:
    """Join the lists of all ranks that hold parts of the tensors, in rank order."""
    known = {dist.get_rank(): found}
    groups = _mesh_groups(_layouts(_dtensors(tensors), group))
    for one in groups if group is None else [*groups, group]:
        others: list[Any] = [None] * one.size()
        dist.all_gather_object(others, known, one)
        for other in others:
            known |= other
    return [item for rank in sorted(known) for item in known[rank]]


@torch.no_grad()
def _reduce(
    layouts: Sequence[Layout], meshes: Sequence[DeviceMesh], parts: Sequence[Part]
) -> Reduced:
    """Read this rank's parts, then add up over all ranks; the result is the same on each."""
    _refuse_submeshes(meshes)
    reduced = [part.reduce() for part in parts]
    like = reduced[0].total
    found = torch.stack([part.found_inf.to(like) for part in reduced]).amax()
    sums: dict[Layout, Tensor] = {}
    for layout, part in zip(layouts, reduced, strict=True):
        own = part.total.to(like) if layout.counts else torch.zeros_like(like)
        key = layout._replace(counts=True)
        sums[key] = sums[key] + own if key in sums else own
    for group in _mesh_groups(sums):
        inside = [layout for layout in sums if group in layout.groups]
        found, *totals = _all_reduce([found, *(sums[layout] for layout in inside)], group)
        sums |= zip(inside, totals, strict=True)
    leading = [part if layout.leads else torch.zeros_like(part) for layout, part in sums.items()]
    total = torch.stack(leading).sum()
    process_group = next(iter(sums)).process_group
    if process_group is not None:
        found, total = _all_reduce([found, total], process_group)
    dtype = max((part.dtype for part in reduced), key=lambda dtype: dtype.itemsize)
    return Reduced(total, found.clamp(max=1.0).to(torch.float32), dtype)


@torch.no_grad()
def align(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Redistribute gradients to their parameters' placements, as optimizers do; return them."""
    grads = []
    for parameter in parameters:
        grad: Any = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(grad, DTensor):
            wanted = parameter.placements
            if grad.placements != wanted:
                if grad.device_mesh == parameter.device_mesh:
                    grad = parameter.grad = grad.redistribute(placements=wanted)
                elif grad is not (whole := _summed(grad)):
                    grad = parameter.grad = whole
        if grad is not None:
            grads.append(grad)
    return grads


def replicated(value: Tensor, like: Iterable[Tensor]) -> Tensor:
    """Return a value that all ranks have as a DTensor on the first mesh, as torch's norms are."""
    mesh = next((each.device_mesh for each in like if isinstance(each, DTensor)), None)
    if mesh is None:
        return value
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _summed(tensor: DTensor) -> DTensor:
    summed = [Replicate() if place.is_partial() else place for place in tensor.placements]
    return tensor if tuple(summed) == tensor.placements else tensor.redistribute(placements=summed)


def _num_ranks(layout: Layout) -> int:
    return math.prod(group.size() for group in layout.groups)


def _dtensors(tensors: Iterable[Tensor]) -> list[DTensor]:
    return [tensor for tensor in tensors if isinstance(tensor, DTensor)]


def _layouts(tensors: Iterable[DTensor], process_group: ProcessGroup | None) -> list[Layout]:
    """Return the layout of each tensor; most have that of the one before."""
    mesh, placements, found = None, None, []
    for tensor in tensors:
        its_mesh, its_placements = tensor.device_mesh, tensor.placements
        if its_mesh is not mesh or its_placements != placements:
            mesh, placements = its_mesh, its_placements
            layout = _layout(mesh, placements, process_group)
        found.append(layout)
    return found


def _layout(
    mesh: DeviceMesh, placements: tuple[Placement, ...], process_group: ProcessGroup | None
) -> Layout:
    """Return the groups to reduce over; each element counts on one rank only."""
    place = cast("tuple[int, ...]", mesh.get_coordinate())
    counts = all(i == 0 for i, p in zip(place, placements, strict=True) if p.is_replicate())
    groups = mesh.get_all_groups()
    if mesh.size() == dist.get_world_size():
        groups = [cast(ProcessGroup, dist.group.WORLD)]  # one for all dimensions
    leads = True
    if process_group is not None:
        ranks = {*mesh.mesh.flatten().tolist()}
        shared = ranks & {*dist.get_process_group_ranks(process_group)}
        leads = dist.get_rank() == min(shared)
        if shared == ranks:
            groups, leads = [], True  # the process group covers the mesh
    return Layout(tuple(g for g in groups if g.size() > 1), counts, process_group, leads)


def _mesh_groups(layouts: Iterable[Layout]) -> list[ProcessGroup]:
    """Return the groups of all meshes, in an order that is the same on all ranks."""
    return [*dict.fromkeys(group for layout in layouts for group in layout.groups)]


def _all_reduce(values: Sequence[Tensor], group: ProcessGroup) -> tuple[Tensor, ...]:
    packed = torch.stack([*values])
    # Gradients may have been moved to the CPU, where the group has no backend.
    devices = [one.partition(":")[0] for one in dist.get_backend_config(group).split(",")]
    moved = packed if packed.device.type in devices else packed.to(devices[0])
    dist.all_reduce(moved, group=group)
    return moved.to(packed.device).unbind()
