"""The CUDA backend: compiled kernels on torch's current stream, with torch's allocator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fastamp import _native
from fastamp._ops.types import Clip, GradStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from fastamp._ops.types import RegionMaker

__all__ = ["CudaOps", "is_available", "ops"]

_NORM_TYPES = {
    1.0: _native.NormType.L1,
    2.0: _native.NormType.L2,
    float("inf"): _native.NormType.INF,
}


def _stream(device_index: int) -> int | None:
    """Return the current stream, or None where the exchange table tells it sooner."""
    if _native.has_exchange_table():
        return None
    stream: int = torch.cuda.current_stream(device_index).cuda_stream
    return stream


class CudaOps:
    """The op table in CUDA kernels."""

    name = "cuda"

    def pack(self, tensors: Sequence[Tensor]) -> _native.PackedTensors:
        """Take the dense float32, bfloat16 and float16 tensors on the first one's device."""
        return _native.pack(tensors, tensors[0].device.index)

    def grad_stats(self, packed: _native.PackedTensors, norm_type: float, clip: Clip) -> GradStats:
        """Read every element once, in two launches; see `fastamp._ops.Ops`."""
        index = packed.device_index
        device = torch.device("cuda", index)
        work = torch.empty(1 + packed.num_chunks, dtype=torch.float64, device=device)
        stats = torch.empty(_native.NUM_STATS, dtype=torch.float32, device=device)
        _native.cuda_ops.grad_stats(
            packed, _NORM_TYPES[norm_type], *clip, work, stats, index, _stream(index)
        )
        return GradStats(work[0], *stats.unbind())

    def rescale_(self, packed: _native.PackedTensors, factor: Tensor) -> None:
        """Multiply in place, in one launch; see `fastamp._ops.Ops`."""
        index = packed.device_index
        if not torch.is_inference_mode_enabled():
            torch.autograd.graph.increment_version(packed.tensors)
        _native.cuda_ops.rescale(packed, factor, index, _stream(index))

    def regions_for(self, timer: type) -> RegionMaker:
        """Return what makes regions; calls of the type's instances find them without Python."""
        _native.call_through(timer)
        return _native.make_region


ops = CudaOps()


def is_available() -> bool:
    """Say whether the module holds CUDA code and torch, built for CUDA, sees a device."""
    return _native.built_with_cuda and torch.version.cuda is not None and torch.cuda.is_available()
