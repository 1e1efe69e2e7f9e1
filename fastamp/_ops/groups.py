"""A list of tensors, each handed to the backend that serves it, and the ops over all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fastamp._ops import choose, fallback
from fastamp._ops.types import COMPILED_NORMS, Clip

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from fastamp._ops.types import GradStats, Ops, Packed


class Group(NamedTuple):
    """Tensors of one device, with the backend that serves them."""

    ops: Ops
    packed: Packed
    device: torch.device
    layout: Any = None
    """Where other ranks take part, of which; see `fastamp._ops.sharded`."""


class Groups:
    """Tensors on their backends: one group for one device, and one for what the fallback takes."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self.device = groups[0].device
        """The first tensor's, on which results lie."""

    @property
    def has_float16(self) -> bool:
        """Whether any tensor is float16."""
        return any(group.packed.has_float16 for group in self._groups)

    @property
    def has_fallback(self) -> bool:
        """Whether the fallback serves any tensor."""
        return any(group.ops.name == "fallback" for group in self._groups)

    def grad_stats(self, norm_type: float, clip: Clip) -> GradStats:
        """Read every element once.

        Args:
            norm_type: order of the norm, the one that the tensors were grouped for.
            clip: how to unscale and clip; its tensors lie on the first group's device.

        Returns:
            The statistics over all groups, on the first group's device.
        """
        if len(self._groups) == 1:
            return self._groups[0].ops.grad_stats(self._groups[0].packed, norm_type, clip)
        parts = [group.ops.grad_stats(group.packed, norm_type, Clip()) for group in self._groups]
        return fallback.combine(parts, norm_type, clip)

    def rescale_(self, factor: Tensor) -> None:
        """Multiply every element by a 0-dim tensor, rounding once to its dtype.

        Raises:
            RuntimeError: where a tensor cannot be written in place. The fallback's groups, the only
                ones that can refuse, come before the compiled ones.
        """
        for group in sorted(self._groups, key=lambda group: group.ops.name != "fallback"):
            group.ops.rescale_(group.packed, factor.to(group.device, non_blocking=True))


def group_by_backend(tensors: Sequence[Tensor], norm_type: float) -> list[Group]:
    """Look at the tensors once and hand each to a backend.

    Args:
        tensors: at least one plain tensor; any devices, dtypes and layouts.
        norm_type: order of the norm that will be asked for.
    """
    device = tensors[0].device
    ops = choose.ops_for(device) if norm_type in COMPILED_NORMS else choose.fallback_ops()
    packed = ops.pack(tensors)
    groups = [Group(ops, packed, device)]
    if packed.rest:
        by_device: dict[torch.device, list[Tensor]] = {}
        for i in packed.rest:
            by_device.setdefault(tensors[i].device, []).append(tensors[i])
        own = by_device.pop(device, None)
        if own is not None:
            groups.append(Group(choose.fallback_ops(), choose.fallback_ops().pack(own), device))
        for others in by_device.values():
            groups += group_by_backend(others, norm_type)
    return groups
