"""A list of tensors, each on the backend that serves it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastamp._ops import choose, fallback
from fastamp._ops.types import COMPILED_NORMS, Clip, GradStats, Ops, Packed, Reduced, moved


class Groups:
    """Tensors on several backends or devices as one list; see `fastamp._ops.Packed`."""

    def __init__(self, packs: Sequence[Packed]) -> None:
        self._packs = packs
        self.device = packs[0].device
        self.rest: list[int] = []
        self.has_float16 = any(pack.has_float16 for pack in packs)
        self.has_fallback = any(pack.has_fallback for pack in packs)

    def grad_stats(self, norm_type: float, clip: Clip) -> GradStats:
        """Read every element once; the statistics over all of them are on the first device."""
        return fallback.finish(self.reduce(norm_type), norm_type, clip)

    def reduce(self, norm_type: float) -> Reduced:
        """Read every element once, as a part of a longer list."""
        parts = [pack.reduce(norm_type) for pack in self._packs]
        return fallback.combine(parts, norm_type)

    def rescale_(self, factor: Tensor) -> None:
        """Multiply every element by a 0-dim tensor, rounding once to its dtype.

        Raises:
            RuntimeError: a tensor cannot be written in place. Only the fallback's tensors can raise
                this, so they are written before the compiled backends'.
        """
        for pack in sorted(self._packs, key=lambda pack: not pack.has_fallback):
            pack.rescale_(moved(factor, pack.device))


def pack(tensors: Sequence[Tensor], norm_type: float) -> Packed:
    """Hand each tensor to its backend, for norms of this order."""
    packs = pack_by_backend(tensors, norm_type)
    return packs[0] if len(packs) == 1 else Groups(packs)


def pack_by_backend(tensors: Sequence[Tensor], norm_type: float) -> list[Packed]:
    """Hand each tensor to a backend.

    Args:
        tensors: at least one plain tensor; any devices, dtypes and layouts.
        norm_type: order of the norm that will be computed.

    Returns:
        One pack for each device, and one more for those of its tensors that need the fallback.
    """
    device = tensors[0].device
    ops: Ops = choose.ops_for(device) if norm_type in COMPILED_NORMS else choose.FALLBACK
    first = ops.pack(tensors)
    packs = [first] if len(first.rest) < len(tensors) else []
    by_device: dict[torch.device, list[Tensor]] = {}
    for i in first.rest:
        by_device.setdefault(tensors[i].device, []).append(tensors[i])
    own = by_device.pop(device, None)
    if own is not None:
        packs.append(choose.FALLBACK.pack(own))
    for others in by_device.values():
        packs += pack_by_backend(others, norm_type)
    return packs
