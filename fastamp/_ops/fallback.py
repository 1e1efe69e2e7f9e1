"""The norm and the clip in torch's operators, for every device, dtype and layout."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastamp._ops.private import norms_of
from fastamp._ops.types import PLAIN_TYPES, Clip, Reduced, StepReport

# Elements converted to float64 at a time; on the CPU fewer than those for which torch has threads.
_CPU_BLOCK = 1 << 14
_DEVICE_BLOCK = 1 << 22
_WIDE = (torch.float64, torch.complex128)


def _blocks(tensor: Tensor) -> Sequence[Tensor]:
    """Split a tensor into flat, non-empty pieces of real numbers with the same norm."""
    values = tensor if tensor.layout is torch.strided else tensor.coalesce().values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    flat = values.reshape(-1)
    size = _CPU_BLOCK if flat.device.type == "cpu" else _DEVICE_BLOCK
    if len(flat) <= size:
        return (flat,) if len(flat) else ()
    return torch.split(flat, size)


@torch.no_grad()
def reduce(tensors: Sequence[Tensor]) -> Reduced:
    """Read every element of tensors on one device, some of them twice."""
    device = tensors[0].device
    wide = torch.float32 if device.type == "mps" else torch.float64  # which Metal does not have
    total = torch.zeros((), dtype=wide, device=device)
    plain = [block for t in tensors if type(t) in PLAIN_TYPES for block in _blocks(t)]
    if plain:
        total = norms_of(plain, wide).square().sum()
    for other in (t for t in tensors if type(t) not in PLAIN_TYPES):  # what it is, its class knows
        norm = torch.linalg.vector_norm(other, dtype=wide).as_subclass(torch.Tensor)
        total = total + norm.square()
    found_inf = total.isfinite().logical_not()
    is_wide = any(tensor.dtype in _WIDE for tensor in tensors)
    # Finite 64-bit values can overflow the sum. On a device, reading it first would wait.
    if (is_wide or total.dtype == torch.float32) and (device.type != "cpu" or found_inf):
        bad = [block.isfinite().logical_not().any() for t in tensors for block in _blocks(t)]
        found_inf = torch.stack(bad).any() if bad else found_inf
    dtype = torch.float64 if is_wide else torch.float32
    return Reduced(total, found_inf.to(torch.float32), dtype)


@torch.no_grad()
def add_up(parts: Sequence[Reduced]) -> Reduced:
    """Add up the sums of several parts, on the device of the first."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0].total
    total = torch.stack([part.total.to(first.device, first.dtype) for part in parts]).sum()
    found_inf = torch.stack([part.found_inf.to(first.device) for part in parts]).amax()
    is_wide = any(part.dtype == torch.float64 for part in parts) and first.dtype == torch.float64
    return Reduced(total, found_inf, torch.float64 if is_wide else torch.float32)


@torch.no_grad()
def finish(read: Reduced, clip: Clip) -> StepReport:
    """Turn a sum into what a step needs: csrc/step/math.h, finish, in torch's operators."""
    total, found_inf, dtype = read
    one = torch.ones((), dtype=torch.float32, device=total.device)
    scale = one if clip.scale is None else clip.scale
    inv_scale = scale.to(total.dtype).reciprocal().to(torch.float32)
    norm = (total.sqrt() * inv_scale.to(total.dtype)).to(dtype)
    clip_coef = torch.ones_like(norm)
    if clip.max_norm is not None:
        clip_coef = (torch.full_like(norm, clip.max_norm) / (norm + 1e-6)).clamp(max=1.0)
        if clip.only_finite:
            clip_coef = torch.where(found_inf == 0, clip_coef, 1.0)
    if clip.before is not None:
        found_inf = torch.maximum(found_inf, clip.before)
    if clip.skipped is not None:
        clip.skipped.add_(found_inf)
    return StepReport([norm, found_inf, clip_coef, clip_coef * inv_scale, scale.clone()])


@torch.no_grad()
def rescale_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply in place; skip a factor of 1 if it is on the CPU, where reading it is cheap."""
    if factor.device.type == "cpu" and factor.item() == 1.0:
        return
    rounded = factor.to(torch.float32)
    for tensor in tensors:  # by a factor as wide as it is
        tensor.mul_(factor.to(torch.float64) if tensor.dtype in _WIDE else rounded)
