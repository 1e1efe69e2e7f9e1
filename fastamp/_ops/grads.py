"""A list of gradients, each read by the backend that serves it, over ranks where others hold parts.

On the CPU and CUDA compiled code reads dense tensors of 32 and 16 bits, and torch's operators all
others.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastamp._ops import fallback
from fastamp._ops.choose import backend_for
from fastamp._ops.types import Clip, GradStats, Reduced, moved


class Part:
    """Gradients of one device that one backend reads: compiled code or, without, the fallback."""

    def __init__(self, tensors: Sequence[Tensor], backend: Any = None) -> None:
        self.device = tensors[0].device
        self.tensors, self.backend = tensors, backend
        self.packed: Any = None if backend is None else backend.pack(tensors)

    def reduce(self) -> Reduced:
        """Read every element once."""
        if self.backend is None:
            return fallback.reduce(self.tensors)
        work, stats = self.backend.reduce(self.packed)
        return Reduced(work[0], stats[1], torch.float32)

    def measure(self, clip: Clip) -> GradStats:
        """Read every element once, and say how to unscale and clip."""
        if self.backend is None:
            return fallback.finish(fallback.reduce(self.tensors), clip)
        return GradStats(self.backend.grad_stats(self.packed, *clip))

    def rescale_(self, factor: Tensor) -> None:
        """Multiply every element by a 0-dim tensor, rounding once to its dtype."""
        factor = moved(factor, self.device)
        if self.backend is None:
            fallback.rescale_(self.tensors, factor)
        else:
            self.backend.rescale(self.packed, factor.to(torch.float32))


class Grads:
    """Gradients on any devices, in parts.

    Args:
        parts: at least one.
        reduce: reads the parts and adds up over ranks; None where no other rank holds any.
    """

    def __init__(
        self, parts: list[Part], reduce: Callable[[list[Part]], Reduced] | None = None
    ) -> None:
        self._parts, self._reduce = parts, reduce
        self.device = parts[0].device
        """The first gradient's, which the statistics are on."""

    @property
    def tensors(self) -> list[Tensor]:
        """All gradients, of DTensors this rank's shards."""
        return [tensor for part in self._parts for tensor in part.tensors]

    def measure(self, clip: Clip) -> GradStats:
        """Read every element once; the tensors of `clip` lie on `device`."""
        if self._reduce is not None:
            return fallback.finish(self._reduce(self._parts), clip)
        if len(self._parts) == 1:
            return self._parts[0].measure(clip)
        return fallback.finish(fallback.add_up([part.reduce() for part in self._parts]), clip)

    def rescale_(self, factor: Tensor) -> None:
        """Multiply every element by a 0-dim tensor, rounding once to its dtype.

        Raises:
            RuntimeError: a tensor cannot be written in place. Only the fallback's tensors can raise
                this, so they are written before the compiled backends'.
        """
        for part in sorted(self._parts, key=lambda part: part.backend is not None):
            part.rescale_(factor)


def parts_of(tensors: Sequence[Tensor]) -> list[Part]:
    """Hand each of one or more tensors to a backend: a part for each device, or two."""
    backend = backend_for(tensors[0].device)
    if backend is not None and not (part := Part(tensors, backend)).packed.rest:
        return [part]  # the core has looked at the device of each
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    parts = []
    for device, listed in by_device.items():
        backend = backend_for(device)
        part = Part(listed, backend)
        rest = range(len(listed)) if part.packed is None else part.packed.rest
        if len(rest) < len(listed):
            parts.append(part)
        if rest:
            parts.append(Part([listed[i] for i in rest]))
    return parts
