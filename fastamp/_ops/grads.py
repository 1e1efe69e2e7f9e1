"""A list of gradients: compiled code reads dense 32 and 16 bits, torch's operators the others."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastamp._ops import fallback
from fastamp._ops.choose import backend_for
from fastamp._ops.types import Clip, Reduced, StepReport, moved


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

    def rescale_(self, factor: Tensor) -> None:
        """Multiply every element by a 0-dim tensor, rounding once to its dtype."""
        factor = moved(factor, self.device)
        if self.backend is None:
            fallback.rescale_(self.tensors, factor)
        else:
            self.backend.rescale(self.packed, factor.to(torch.float32))


class Grads:
    """Gradients on any devices, in parts; `reduce` reads them and adds up over ranks, if any."""

    def __init__(
        self, parts: list[Part], reduce: Callable[[list[Part]], Reduced] | None = None
    ) -> None:
        self._parts, self._reduce = parts, reduce
        self.device = parts[0].device  # the first gradient's, which the statistics are on

    def measure(self, clip: Clip) -> StepReport:
        """Read every element once; the tensors of `clip` lie on `device`."""
        first, *others = self._parts
        if self._reduce is not None:
            return fallback.finish(self._reduce(self._parts), clip)
        if first.backend is not None and not others:
            return StepReport(first.backend.grad_stats(first.packed, *clip))
        return fallback.finish(fallback.add_up([part.reduce() for part in self._parts]), clip)

    def rescale_(self, factor: Tensor) -> None:
        """Multiply every element by a 0-dim tensor, rounding once to its dtype."""
        # First the fallback's tensors, some of which cannot be written in place: torch's error.
        for part in sorted(self._parts, key=lambda part: part.backend is not None):
            part.rescale_(factor)


def parts_of(tensors: Sequence[Tensor]) -> list[Part]:
    """Hand each of one or more tensors to a backend: a part for each device, or two."""
    device, rest, parts = tensors[0].device, tensors, list[Part]()
    if (backend := backend_for(device)) is not None:
        part = Part(tensors, backend)
        rest = [tensors[i] for i in part.packed.rest]  # on other devices, too
        parts += [part] * (len(rest) < len(tensors))
    here = [tensor for tensor in rest if tensor.device == device]
    elsewhere = [tensor for tensor in rest if tensor.device != device]
    parts += [Part(here)] if here else []
    return parts + parts_of(elsewhere) if elsewhere else parts
