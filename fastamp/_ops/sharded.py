"""Gradients over ranks: DTensors, and plain tensors over a process group.

Every rank divides its sum of squares by the number of ranks that hold the same elements. One
all-reduce in each process group adds up the sums and the flags.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastamp._ops.fallback import add_up
from fastamp._ops.grads import Grads, Part, parts_of
from fastamp._ops.types import Reduced, is_spread, local_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Layout(NamedTuple):
    """How the sum of squares of this rank's parts counts among those of other ranks."""

    groups: tuple[Any, ...]  # the user's, or the mesh's, which cover it one after the other
    replicas: int = 1  # how many ranks hold the same elements


def hold(
    tensors: list[Tensor],
    process_group: "ProcessGroup | None" = None,
    owners: Iterable[Tensor] = (),
) -> Grads | None:
    """Return gradients as this rank holds them; None if there are none, here or on other ranks.

    The collectives follow from the owners, which all ranks know: a rank without a gradient joins
    in. Partial DTensors are reduced first, in the `.grad` of the owners or else into copies.
    """
    owners = list(owners)
    if process_group is None and not any(map(is_spread, [*tensors, *owners])):
        return Grads(parts_of(tensors)) if tensors else None
    for owner in owners:
        if (grad := _placed(owner.grad, owner)) is not owner.grad:
            owner.grad = grad
    if owners:
        tensors = [owner.grad for owner in owners if owner.grad is not None]
    held = [owner if owner.grad is None else owner.grad for owner in owners]
    placed: list[Any] = [each for each in held or map(_placed, tensors) if is_spread(each)]
    missing = {id(owner) for owner in owners if owner.grad is None}
    layout_of = cache(partial(_layout, process_group))  # most have the same
    layouts: dict[Layout, list[Tensor]] = {}
    for whole in placed:
        here = layouts.setdefault(layout_of(whole.device_mesh, whole.placements), [])
        if id(whole) not in missing:
            here.append(local_of(whole))
    plain = [each for each in tensors if not is_spread(each)]
    if process_group is not None:
        layouts.setdefault(Layout((process_group,)), []).extend(plain)
    elif plain or not layouts:  # the same on all ranks of the largest mesh
        meshes_ranks = {math.prod(g.size() for g in each.groups): each.groups for each in layouts}
        ranks = max(meshes_ranks, default=1)
        layouts.setdefault(Layout(meshes_ranks.get(ranks, ()), ranks), []).extend(plain)
    device = next((each.device for each in (*tensors, *owners)), torch.device("cpu"))
    parts, of_parts = [], []
    for layout, here in layouts.items():
        # A rank that holds nothing of a layout joins its all-reduce with an empty tensor.
        its_parts = parts_of(here or [torch.empty(0, dtype=torch.float32, device=device)])
        parts += its_parts
        of_parts += [layout] * len(its_parts)
    meshes = [whole.device_mesh for whole in placed if process_group is None]
    return Grads(parts, partial(_reduce, of_parts, meshes))


def replicated(value: Tensor, like: Iterable[Tensor]) -> Tensor:
    """Return a value that all ranks have: among DTensors as a DTensor, as torch's norms are."""
    mesh: Any = next((getattr(each, "device_mesh", None) for each in like if is_spread(each)), None)
    if mesh is None:
        return value
    from torch.distributed.tensor import DTensor, Replicate  # noqa: PLC0415 - takes half a second

    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


@torch.no_grad()
def _reduce(layouts: Sequence[Layout], meshes: Sequence[Any], parts: Sequence[Part]) -> Reduced:
    """Read this rank's parts, then add up over all ranks; the result is the same on each.

    As torch does, it refuses meshes of different ranks: other ranks may have other tensors.
    """
    different = {id(mesh): mesh for mesh in meshes}.values()
    ranks = {tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in different}
    if len(ranks) > 1:
        msg = f"gradients on meshes of different ranks, {sorted(ranks)}: ranks would get different "
        msg += "norms. Give process_group= if each mesh holds tensors of its own (experts); put "
        msg += "those that all ranks share on the largest mesh, with Replicate()"
        raise ValueError(msg)
    reads: dict[Any, list[Reduced]] = {}
    for layout, part in zip(layouts, parts, strict=True):
        read = part.reduce()
        share = read._replace(total=read.total / layout.replicas)
        reads.setdefault(layout.groups, []).append(share)
    sums = []
    for groups, shares in reads.items():
        total, found_inf, dtype = add_up(shares)
        packed = torch.stack([total, found_inf.to(total)])
        for group in groups:
            packed = _all_reduce(packed, group)
        sums.append(Reduced(packed[0], packed[1].clamp(max=1.0).to(torch.float32), dtype))
    return add_up(sums)


@torch.no_grad()
def _placed(grad: Any, owner: Any = None) -> Any:
    """Return a gradient placed as its owner, as optimizers do, or else with its sums added up."""
    if not is_spread(grad):
        return grad
    places = grad.placements
    if is_spread(owner) and owner.device_mesh == grad.device_mesh:
        places = owner.placements
    elif any(place.is_partial() for place in places):
        from torch.distributed.tensor import Replicate  # noqa: PLC0415 - takes half a second

        places = tuple(Replicate() if place.is_partial() else place for place in places)
    return grad if places == grad.placements else grad.redistribute(placements=places)


def _layout(process_group: "ProcessGroup | None", mesh: Any, placements: tuple[Any, ...]) -> Layout:
    replicas = math.prod(mesh.size(i) for i, place in enumerate(placements) if place.is_replicate())
    if process_group is not None:
        ranks = mesh.mesh.flatten().tolist()
        if not {*ranks} <= {*dist.get_process_group_ranks(process_group)}:
            msg = f"process_group: expected one with all ranks of the gradients' mesh, {ranks}"
            raise ValueError(msg)
        return Layout((process_group,), replicas)
    groups = mesh.get_all_groups()
    if mesh.size() == dist.get_world_size():
        groups = [dist.group.WORLD]  # one for all dimensions
    return Layout(tuple(group for group in groups if group.size() > 1), replicas)


def _all_reduce(packed: Tensor, group: "ProcessGroup") -> Tensor:
    # Gradients may have been moved to the CPU, where the group has no backend.
    devices = [one.partition(":")[0] for one in dist.get_backend_config(group).split(",")]
    there = packed if packed.device.type in devices else packed.to(devices[0])
    dist.all_reduce(there, group=group)
    return there.to(packed.device)
