"""The backend without compiled code: torch's own operators, for every device, dtype and layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fastamp._backend import COMPILED_NORMS, Clip, GradStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["FallbackOps", "combine", "is_available", "ops"]

# Elements that are converted to float64 at a time, which bounds the memory of a norm. On the CPU
# the copy stays in the cache, and the block below the size at which torch starts its threads.
_CPU_BLOCK = 1 << 14
_DEVICE_BLOCK = 1 << 22
_WIDE = (torch.float64, torch.complex128)


@dataclass(frozen=True)
class TensorPack:
    """The tensors as they are."""

    tensors: list[Tensor]
    rest: list[int]

    @property
    def has_float16(self) -> bool:
        """Whether any tensor is float16."""
        return any(tensor.dtype == torch.float16 for tensor in self.tensors)


def _values(tensor: Tensor) -> Tensor:
    """Return the elements that are stored, as a strided tensor."""
    return tensor if tensor.layout is torch.strided else tensor.coalesce().values()


def _blocks(tensor: Tensor, norm_type: float) -> Sequence[Tensor]:
    """Split a tensor into flat, non-empty pieces of real numbers with the same norm."""
    values = _values(tensor)
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj()) if norm_type == 2 else values.abs()
    size = _CPU_BLOCK if values.device.type == "cpu" else _DEVICE_BLOCK
    return torch.split(values.reshape(-1), size) if values.numel() else ()


def _reduce(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the 0-dim reduction over all tensors, in float64 where the device has it."""
    device = tensors[0].device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    blocks = [block for tensor in tensors for block in _blocks(tensor, norm_type)]
    if not blocks:
        return torch.zeros((), dtype=dtype, device=device)
    norms = torch.stack(torch._foreach_norm(blocks, norm_type, dtype=dtype))
    return _join(norms.square() if norm_type == 2 else norms, norm_type)


def _join(parts: Tensor, norm_type: float) -> Tensor:
    """Join reductions: sums of squares for order 2, norms (order 0: counts) for every other."""
    if norm_type in (0, 1, 2):
        return parts.sum()
    norm: Tensor = torch.linalg.vector_norm(parts, norm_type)
    return norm


def _finish(
    reduced: Tensor, found_inf: Tensor, norm_type: float, clip: Clip, dtype: torch.dtype
) -> GradStats:
    """Turn a reduction into what a step needs: csrc/core/math.h, finish, in torch's operators."""
    scale = clip.scale
    if scale is None:
        scale = torch.ones((), dtype=torch.float32, device=reduced.device)
    inv_scale = scale.to(reduced.dtype).reciprocal().to(torch.float32)
    root = reduced.sqrt() if norm_type == 2 else reduced
    norm = (root * inv_scale.to(reduced.dtype)).to(dtype)
    clip_coef = torch.ones_like(norm)
    if clip.max_norm is not None:
        clip_coef = (torch.full_like(norm, clip.max_norm) / (norm + 1e-6)).clamp(max=1.0)
        if clip.only_finite:
            clip_coef = torch.where(found_inf == 0, clip_coef, 1.0)
    clip_coef = clip_coef.to(torch.float32)
    if clip.skipped is not None:
        clip.skipped.add_(found_inf)
    return GradStats(
        reduced=reduced,
        norm=norm,
        found_inf=found_inf,
        clip_coef=clip_coef,
        factor=clip_coef * inv_scale,
        grad_scale=scale / clip_coef,
        scale=scale.clone(),
    )


def combine(parts: Sequence[GradStats], norm_type: float, clip: Clip) -> GradStats:
    """Join the statistics of several groups, on the device of the first."""
    first = parts[0].reduced
    dtype = torch.float64 if any(p.norm.dtype == torch.float64 for p in parts) else torch.float32
    dtype = torch.float32 if first.device.type == "mps" else dtype
    reduced = torch.stack([p.reduced.to(first.device, first.dtype) for p in parts])
    found_inf = torch.stack([p.found_inf.to(first.device) for p in parts]).amax()
    return _finish(_join(reduced, norm_type), found_inf, norm_type, clip, dtype)


def _in_place(tensor: Tensor) -> Tensor:
    """Return a view that holds every stored element once, so that it can be written."""
    if tensor.layout is not torch.strided:
        tensor = tensor._values()
    # A real factor commutes with a pending conjugation or negation: write what is underneath.
    if tensor.is_conj():
        tensor = tensor.conj()
    if tensor.is_neg():
        tensor = torch._neg_view(tensor)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


class FallbackOps:
    """The op table in torch's operators."""

    name = "fallback"

    def pack(self, tensors: Sequence[Tensor]) -> TensorPack:
        """Take every tensor on the device of the first one."""
        device = tensors[0].device
        rest = [i for i, tensor in enumerate(tensors) if tensor.device != device]
        kept = [tensor for tensor in tensors if tensor.device == device] if rest else list(tensors)
        return TensorPack(kept, rest)

    def grad_stats(self, packed: TensorPack, norm_type: float, clip: Clip) -> GradStats:
        """Read every element once; see `fastamp._backend.Ops`."""
        reduced = _reduce(packed.tensors, norm_type)
        found_inf = reduced.isfinite().logical_not()
        wide = [tensor for tensor in packed.tensors if tensor.dtype in _WIDE]
        if wide or norm_type not in COMPILED_NORMS:
            # Finite 64-bit values, and powers other than 1 and 2, can overflow the reduction.
            bad = [_values(t).isfinite().logical_not().any() for t in packed.tensors]
            found_inf = torch.stack(bad).any()
        dtype = torch.float64 if wide else torch.float32
        return _finish(reduced, found_inf.to(torch.float32), norm_type, clip, dtype)

    def rescale_(self, packed: TensorPack, factor: Tensor) -> None:
        """Multiply in place; on the CPU, where looking costs nothing, not by 1."""
        if factor.device.type == "cpu" and factor.item() == 1.0:
            return
        torch._foreach_mul_([_in_place(tensor) for tensor in packed.tensors], factor)


ops = FallbackOps()


def is_available() -> bool:
    """Say that the fallback is there."""
    return True
