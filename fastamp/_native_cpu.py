"""The CPU backend: compiled code on torch's number of threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fastamp import _native
from fastamp._backend import Clip, GradStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["CpuOps", "is_available", "ops"]

_NORM_TYPES = {
    1.0: _native.NormType.L1,
    2.0: _native.NormType.L2,
    float("inf"): _native.NormType.INF,
}


class CpuOps:
    """The op table in compiled code for the CPU."""

    name = "cpu"

    def pack(self, tensors: Sequence[Tensor]) -> _native.PackedTensors:
        """Take the dense float32, bfloat16 and float16 tensors on the CPU."""
        return _native.pack(tensors, -1)

    def grad_stats(self, packed: _native.PackedTensors, norm_type: float, clip: Clip) -> GradStats:
        """Read every element once; see `fastamp._backend.Ops`."""
        work = torch.empty(1 + packed.num_chunks, dtype=torch.float64, device="cpu")
        stats = torch.empty(_native.NUM_STATS, dtype=torch.float32, device="cpu")
        threads = torch.get_num_threads()
        _native.cpu_ops.grad_stats(packed, _NORM_TYPES[norm_type], *clip, work, stats, threads)
        return GradStats(work[0], *stats.unbind())

    def rescale_(self, packed: _native.PackedTensors, factor: Tensor) -> None:
        """Multiply in place; see `fastamp._backend.Ops`."""
        if not torch.is_inference_mode_enabled():
            torch.autograd.graph.increment_version(packed.tensors)
        _native.cpu_ops.rescale(packed, factor, torch.get_num_threads())


ops = CpuOps()


def is_available() -> bool:
    """Say that the compiled code is there: importing this module needs it."""
    return True
