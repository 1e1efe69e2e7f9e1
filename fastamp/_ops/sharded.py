"""Gradients that are spread over ranks: DTensors, and plain tensors over a process group.

Every rank reads what it holds; one all-reduce in each process group then adds up the sums and the
flags of all ranks. This module is imported when the first such gradient appears.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.overrides import TorchFunctionMode

from fastamp._ops.groups import Groups, pack_by_backend
from fastamp._ops.types import COMPILED_NORMS, Packed, Reduced, is_plain, local_of

P = ParamSpec("P")
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


class Shards:
    """This rank's parts of tensors that are spread over ranks, by layout."""

    def __init__(self, parts: dict[Layout, list[Tensor]]) -> None:
        self._parts = parts

    @property
    def held(self) -> list[Tensor]:
        """All parts."""
        return [*itertools.chain(*self._parts.values())]

    def pack(self, norm_type: float = 2.0) -> "ShardedGroups":
        """Hand each part to its backend, for norms of this order."""
        packs = {layout: pack_by_backend(parts, norm_type) for layout, parts in self._parts.items()}
        return ShardedGroups(packs)

    def on_parts(self, step: Callable[P, T]) -> Callable[P, T]:
        """Return a step in which torch's fused kernels work on this rank's parts."""

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with FusedOnParts():
                return step(*args, **kwargs)

        return call

    def gather(self, found: list[T]) -> list[T]:
        """Join the lists of all ranks that hold parts, in rank order."""
        known = {dist.get_rank(): found}
        groups = _mesh_groups(self._parts)
        process_group = next(iter(self._parts)).process_group
        for one in groups if process_group is None else [*groups, process_group]:
            others: list[Any] = [None] * one.size()
            dist.all_gather_object(others, known, one)
            for other in others:
                known |= other
        return [item for rank in sorted(known) for item in known[rank]]


@torch.no_grad()
def shards_of(
    tensors: Sequence[Tensor],
    process_group: ProcessGroup | None,
    owners: Sequence[Tensor] = (),
    *,
    align: bool = False,
) -> Shards | None:
    """Sort this rank's parts of the tensors by layout; None where torch has to handle them.

    Partial DTensors are reduced first: in the `.grad` of `owners`, or else into copies.
    """
    plain, dtensors = _sort(_align(owners) if align else tensors)
    found: dict[Layout, list[Tensor]] = {}
    for (mesh, placements), alike in dtensors.items():
        summed = tuple(Replicate() if p.is_partial() else p for p in placements)
        if summed != placements:
            if owners:
                return shards_of(_align(owners), process_group)
            alike[:] = [tensor.redistribute(placements=summed) for tensor in alike]
        parts = found.setdefault(_layout(mesh, summed, process_group), [])
        parts += [tensor._local_tensor for tensor in alike]
    if process_group is not None and not found:
        plain = plain or [torch.empty(0)]  # this rank has to join the all-reduce
    if plain:  # the same on all ranks of the largest mesh, and counted on the first one
        largest = max(found, key=_num_ranks, default=Layout(process_group=process_group))
        counts = all(one.rank() == 0 for one in largest.groups)
        found.setdefault(largest._replace(counts=counts), []).extend(plain)
    for parts in found.values():
        if not is_plain(parts):
            parts[:] = [p.wait() if isinstance(p, AsyncCollectiveTensor) else p for p in parts]
    return Shards(found) if all(map(is_plain, found.values())) else None


class ShardedGroups(Groups):
    """Parts on their backends; their statistics are reduced over all ranks."""

    def __init__(self, packs: dict[Layout, list[Packed]]) -> None:
        super().__init__([*itertools.chain(*packs.values())])
        self._layouts = [layout for layout, parts in packs.items() for _ in parts]

    @torch.no_grad()
    def reduce(self, norm_type: float) -> Reduced:
        """Read this rank's parts, then reduce over all ranks; see `fastamp._ops.Packed`.

        Raises:
            ValueError: the order of the norm is negative.
        """
        if norm_type < 0:
            msg = (
                f"norm_type: expected at least 0 for gradients over several ranks, got {norm_type}"
            )
            raise ValueError(msg)
        parts = [pack.reduce(norm_type) for pack in self._packs]
        like = parts[0].total
        found = _join([part.found_inf.to(like) for part in parts], math.inf)
        # For other orders `reduced` is the norm itself: its powers are summed.
        power = 1.0 if norm_type in (0.0, *COMPILED_NORMS) else norm_type
        held: dict[Layout, list[Tensor]] = {}
        for layout, part in zip(self._layouts, parts, strict=True):
            value = part.total.to(like)
            if power != 1:
                value = value.pow(power)
            if norm_type == math.inf:  # a maximum may lose NaN: a flag of 2 stands for it
                found = torch.where(value.isnan(), 2.0, found)
                value = value.nan_to_num(0.0, math.inf)
            counted = value if layout.counts else torch.zeros_like(value)
            held.setdefault(layout._replace(counts=True), []).append(counted)
        sums = {layout: _join(values, norm_type) for layout, values in held.items()}
        found, total = _reduce(found, sums, norm_type)
        if norm_type == math.inf:
            total = torch.where(found == 2, math.nan, total)
        if power != 1:
            total = total.pow(1 / power)
        dtype = max((part.dtype for part in parts), key=lambda dtype: dtype.itemsize)
        return Reduced(total, found.clamp(max=1.0).to(torch.float32), dtype)


def _sort(
    tensors: Iterable[Tensor],
) -> tuple[list[Tensor], dict[tuple[DeviceMesh, tuple[Placement, ...]], list[DTensor]]]:
    """Split tensors into plain ones, and DTensors by mesh and placements."""
    plain: list[Tensor] = []
    dtensors: dict[tuple[DeviceMesh, tuple[Placement, ...]], list[DTensor]] = {}
    mesh, placements, alike = None, None, []
    for tensor in tensors:
        if type(tensor) is not DTensor:
            plain.append(tensor)
            continue
        spec = tensor._spec
        if spec.mesh is not mesh or spec.placements != placements:  # mostly the same as before
            mesh, placements = spec.mesh, spec.placements
            alike = dtensors.setdefault((mesh, placements), [])
        alike.append(tensor)
    return plain, dtensors


def _align(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Redistribute gradients to their parameters' placements, as optimizers do; return them."""
    grads = []
    for parameter in parameters:
        grad = parameter.grad
        if type(parameter) is type(grad) is DTensor and grad._spec is not parameter._spec:
            placements = parameter._spec.placements
            if grad._spec.placements != placements:
                grad = parameter.grad = grad.redistribute(placements=placements)
        if grad is not None:
            grads.append(grad)
    return grads


class FusedOnParts(TorchFunctionMode):
    """Runs torch's fused optimizers on this rank's parts of DTensors.

    Fused kernels work element by element, so the result is the same. torch has no sharding rule for
    some of them, rejects plain tensors beside DTensors, and is slow for many tensors.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the lists of tensors of a fused kernel."""
        del types
        if func in _FUSED:
            lists = [[*map(local_of, tensors)] for tensors in args]
            shapes = [part.shape for part in lists[0]]
            # Beside parts of the same shapes there are only counters of steps, which are 0-dim.
            pairs = (zip(parts, shapes, strict=False) for parts in lists)
            if all(part.shape in (shape, ()) for part, shape in itertools.chain(*pairs)):
                torch.autograd.graph.increment_version(args[0])
                args = lists
        return func(*args, **kwargs or {})


_FUSED = {
    getattr(torch, name)
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
}


def _num_ranks(layout: Layout) -> int:
    return math.prod(group.size() for group in layout.groups)


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


def _reduce(found: Tensor, sums: dict[Layout, Tensor], norm_type: float) -> tuple[Tensor, ...]:
    """Return the flag and the sum over all ranks, bit-identical on each of them."""
    for group in _mesh_groups(sums):
        layouts = [layout for layout in sums if group in layout.groups]
        held = (sums[layout] for layout in layouts)
        found, *reduced = _all_reduce([found, *held], norm_type, group)
        sums |= zip(layouts, reduced, strict=True)
    leading = [part if layout.leads else torch.zeros_like(part) for layout, part in sums.items()]
    total = _join(leading, norm_type)
    process_group = next(iter(sums)).process_group
    if process_group is None:
        return found, total
    return _all_reduce([found, total], norm_type, process_group)


def _join(parts: Sequence[Tensor], norm_type: float) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    stacked = torch.stack([*parts])
    return stacked.amax() if norm_type == math.inf else stacked.sum()


def _mesh_groups(layouts: Iterable[Layout]) -> list[ProcessGroup]:
    """Return the groups of all meshes, in an order that is the same on all ranks."""
    return [*dict.fromkeys(group for layout in layouts for group in layout.groups)]


def _all_reduce(
    values: Sequence[Tensor], norm_type: float, group: ProcessGroup
) -> tuple[Tensor, ...]:
    packed = torch.stack([*values])
    # Gradients may have been moved to the CPU, where the group has no backend.
    devices = group._device_types
    here = any(device.type == packed.device.type for device in devices)
    moved = packed if here else packed.to(devices[0])
    op = dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM
    dist.all_reduce(moved, op, group)
    return moved.to(packed.device).unbind()


def index_in_whole(tensor: Any, index: int) -> int:
    """Turn an index of this rank's flattened part of a DTensor into one of the flattened whole."""
    place = torch.unravel_index(torch.tensor(index), local_of(tensor).shape)
    whole = 0
    for dim, (size, i) in enumerate(zip(tensor.shape, place, strict=True)):
        # Distribute the dimension's indices as the placements distribute the dimension.
        rows = [_along(placement, dim) for placement in tensor.placements]
        # Redistributing replicas takes no collective: other ranks may not call this.
        indices = DTensor.from_local(torch.arange(size), tensor.device_mesh)
        held = indices.redistribute(placements=rows)
        whole = whole * size + int(local_of(held)[i].item())
    return whole


def _along(placement: Any, dim: int) -> Placement:
    """Return the placement of a 1-dim tensor that does the same as this one does to `dim`."""
    if getattr(placement, "dim", None) != dim:
        return Replicate()
    if type(placement) is Shard:
        return Shard(0)
    strided: Placement = type(placement)(0, split_factor=placement.split_factor)
    return strided
