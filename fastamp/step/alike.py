"""Ranks that share matrices step them alike, or all of them raise one error.

Else some would wait for others, which step without them.
"""

import zlib
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fastamp._ops import local_of
from fastamp.step.shards import is_spread

_WAYS = ("fastamp", "torch")
_said: "WeakKeyDictionary[Optimizer, tuple[list[list[int]], list[Tensor]]]" = WeakKeyDictionary()
"""What this rank has said last, as numbers and as tensors: a copy to a device would wait for it."""


@torch.no_grad()
def compare_ranks(optimizers: Sequence[Optimizer], why: str) -> None:
    """Raise an error unless all ranks are about to step Muon's DTensors alike.

    On the CPU all ranks look at what the others say; on a device those whose own part has changed,
    so that nothing waits in later steps.

    Args:
        optimizers: to be stepped together; all ranks have the same ones.
        why: torch has to step; "" if fastamp does.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, getattr(torch.optim, "Muon", ())):
            _compare(optimizer, why)


def _compare(optimizer: Optimizer, why: str) -> None:
    on_mesh: dict[Any, list[Any]] = {}
    for group in optimizer.param_groups:
        for param in filter(is_spread, group["params"]):
            on_mesh.setdefault(param.device_mesh, []).append(param)
    # The smaller ones first: the ranks of a larger one hear of what they have found.
    meshes = sorted(on_mesh, key=lambda mesh: mesh.size())
    has = [[param.grad is not None for param in on_mesh[mesh]] for mesh in meshes]
    mine = [[dist.get_rank(), bool(why), sum(some), zlib.crc32(bytes(some)), 0] for some in has]
    before, own = _said.get(optimizer, ([], []))
    has_changed = mine != before
    if has_changed:
        devices = [local_of(on_mesh[mesh][0]).device for mesh in meshes]
        own = [torch.tensor([row], device=at) for row, at in zip(mine, devices, strict=True)]
    problem = ""
    for mesh, row, some in zip(meshes, own, has, strict=True):
        told = row + row.new_tensor([0, 0, 0, 0, 1]) if problem else row
        rows = _gather(told, mesh)
        if has_changed or rows.device.type == "cpu":
            problem = problem or _difference(rows.tolist(), len(some))
    if problem:
        here = f"; here torch has to: {why}" if why else ""
        msg = "Muon's sharded matrices need the same step hooks, and gradients of the same "
        msg += f"matrices, on all ranks: {problem}{here}"
        raise RuntimeError(msg)
    _said[optimizer] = mine, own


def _gather(rows: Tensor, mesh: Any) -> Tensor:
    """Return the rows of all ranks of a mesh."""
    is_world = mesh.size() == dist.get_world_size()
    for group in [dist.group.WORLD] if is_world else mesh.get_all_groups():
        found = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, rows, group=group)
        rows = torch.cat(found)
    return rows


def _difference(rows: list[list[int]], count: int) -> str:
    """Say how the ranks of a mesh with so many matrices differ; "" if they do not."""
    if told := [row[0] for row in rows if row[-1]]:
        return f"rank {', '.join(map(str, told))} and others that share some of them differ"
    if all(row[1:] == rows[0][1:] for row in rows):
        return ""
    return "; ".join(
        f"on rank {rank} {_WAYS[by_torch]} steps, with gradients of {n} of {count}"
        for rank, by_torch, n, _, _ in sorted(rows)
    )
