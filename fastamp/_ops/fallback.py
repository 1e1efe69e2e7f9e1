"""The backend without compiled code: torch's own operators, for every device, dtype and layout."""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastamp._ops.host_types import Column, Windows, check_rows
from fastamp._ops.painting import augment_image
from fastamp._ops.regions import FallbackRegion
from fastamp._ops.rules import TorchUpdate
from fastamp._ops.types import COMPILED_NORMS, Clip, GradStats, Reduced, RegionMaker, Rule, is_plain

# Elements that are converted to float64 at a time, which bounds the memory of a norm. On the CPU
# the copy stays in the cache, and the block below the size at which torch starts its threads.
_CPU_BLOCK = 1 << 14
_DEVICE_BLOCK = 1 << 22
# Below this size of a batch, glibc's allocator reuses memory by itself.
_STACK_BYTES = 32 << 20
_WIDE = (torch.float64, torch.complex128)


def _values(tensor: Tensor) -> Tensor:
    """Return the elements that are stored, as a strided tensor."""
    return tensor if tensor.layout is torch.strided else tensor.coalesce().values()


def _blocks(tensor: Tensor, norm_type: float) -> Sequence[Tensor]:
    """Split a tensor into flat, non-empty pieces of real numbers with the same norm."""
    values = _values(tensor)
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj()) if norm_type == 2 else values.abs()
    flat = values.reshape(-1)
    size = _CPU_BLOCK if flat.device.type == "cpu" else _DEVICE_BLOCK
    if len(flat) <= size:
        return (flat,) if len(flat) else ()
    return torch.split(flat, size)


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


@torch.no_grad()
def finish(read: Reduced, norm_type: float, clip: Clip) -> GradStats:
    """Turn a reduction into what a step needs: csrc/step/math.h, finish, in torch's operators."""
    reduced, found_inf, dtype = read
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
    grad_scale = (scale / clip_coef).to(torch.float32)
    if clip.skipped is not None:
        too_large = (clip_coef > 0).logical_and_(grad_scale.isinf())
        found_inf = torch.where(too_large, 1.0, found_inf)
        clip.skipped.add_(found_inf)
    factor = clip_coef * inv_scale
    return GradStats([norm, found_inf, clip_coef, factor, grad_scale, scale.clone()])


@torch.no_grad()
def combine(parts: Sequence[Reduced], norm_type: float) -> Reduced:
    """Join the reductions of several groups, on the device of the first."""
    first = parts[0].total
    wide = first.device.type != "mps" and any(part.dtype == torch.float64 for part in parts)
    total = torch.stack([part.total.to(first.device, first.dtype) for part in parts])
    found_inf = torch.stack([part.found_inf.to(first.device) for part in parts]).amax()
    dtype = torch.float64 if wide else torch.float32
    return Reduced(_join(total, norm_type), found_inf, dtype)


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


def _are_alike(samples: Sequence[Any], *names: str) -> bool:
    """Say whether all samples have the first one's attributes."""
    read = attrgetter(*names)
    expected = read(samples[0])
    return all(read(sample) == expected for sample in samples)


def _is_stackable(samples: Sequence[Tensor]) -> bool:
    """Say whether torch.stack(out=) does what torch.stack does."""
    first = samples[0]
    return (
        first.device.type == "cpu"
        and first.layout is torch.strided
        and not (first.is_nested or first.is_quantized)
        and len(samples) * first.nbytes >= _STACK_BYTES
        and is_plain(samples)
        and _are_alike(samples, "dtype", "shape", "device", "layout")
        and not any(sample.requires_grad for sample in samples)
    )


def _pad(
    rows: list[Tensor],
    allocate: Callable[[tuple[int, ...], torch.dtype], Tensor],
    pad: Tensor,
    multiple: int,
) -> Tensor | None:
    """Copy tensors to the start of padded rows; gradients flow through the copies."""
    shapes = [row.shape for row in rows]
    if len({*map(len, shapes)}) > 1:
        return None
    longest = []
    for lengths in zip(*shapes, strict=True):
        is_ragged = len(shapes[0]) == 1 or len({*lengths}) > 1
        longest.append(-(-max(lengths) // multiple) * multiple if is_ragged else lengths[0])
    dtype = functools.reduce(torch.promote_types, [row.dtype for row in rows])
    shape = (len(rows), *longest)
    device = rows[0].device
    on_cpu = device.type == "cpu"
    out = allocate(shape, dtype) if on_cpu else torch.empty(shape, dtype=dtype, device=device)
    out.copy_(pad)
    for i, row in enumerate(rows):
        out[i][tuple(slice(length) for length in row.shape)].copy_(row)
    return out


class TensorPack:
    """Tensors of one device as they are; see `fastamp._ops.Packed`."""

    has_fallback = True

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.device = tensors[0].device
        self.rest = [i for i, tensor in enumerate(tensors) if tensor.device != self.device]
        self._tensors = [tensor for tensor in tensors if tensor.device == self.device]

    @property
    def has_float16(self) -> bool:
        """Whether any tensor is float16."""
        return any(tensor.dtype == torch.float16 for tensor in self._tensors)

    def grad_stats(self, norm_type: float, clip: Clip) -> GradStats:
        """Read every element, some of them twice."""
        return finish(self.reduce(norm_type), norm_type, clip)

    @torch.no_grad()
    def reduce(self, norm_type: float) -> Reduced:
        """Read every element, some of them twice, as a part of a longer list."""
        reduced = _reduce(self._tensors, norm_type)
        found_inf = reduced.isfinite().logical_not()
        wide = [tensor for tensor in self._tensors if tensor.dtype in _WIDE]
        # Finite 64-bit values, and powers other than 1 and 2, can overflow the reduction.
        may_overflow = wide or norm_type not in COMPILED_NORMS
        # A finite norm of positive order holds no inf or NaN. On a device, reading it would wait.
        if may_overflow and (norm_type <= 0 or self.device.type != "cpu" or found_inf):
            bad = [_values(t).isfinite().logical_not().any() for t in self._tensors]
            found_inf = torch.stack(bad).any()
        dtype = torch.float64 if wide else torch.float32
        return Reduced(reduced, found_inf.to(torch.float32), dtype)

    @torch.no_grad()
    def rescale_(self, factor: Tensor) -> None:
        """Multiply in place; skip a factor of 1 if it is on the CPU, where reading it is cheap."""
        if factor.device.type == "cpu" and factor.item() == 1.0:
            return
        for dtype in (torch.float32, torch.float64):  # of the factor: as wide as the tensors
            is_wide = dtype == torch.float64
            tensors = [_in_place(t) for t in self._tensors if (t.dtype in _WIDE) == is_wide]
            if tensors:
                torch._foreach_mul_(tensors, factor.to(dtype))


class FallbackOps:
    """The op table, made of torch's operators."""

    name = "fallback"

    def pack(self, tensors: Sequence[Tensor]) -> TensorPack:
        """Pack all tensors on the device of the first one."""
        return TensorPack(tensors)

    def update(self, rule: Rule, device: torch.device) -> TorchUpdate:
        """Return the update of one optimizer that follows the rule, on one device."""
        return TorchUpdate(rule, device, self.pack)

    def region_maker(self) -> RegionMaker:
        """Return the function that makes the regions of one timer."""
        return functools.partial(FallbackRegion, threading.local())

    def columns(self, samples: tuple[Any, ...], keys: tuple[Any, ...]) -> Iterable[Sequence[Any]]:
        """Return, for each key, sample[key] of every sample."""
        return (list(map(itemgetter(key), samples)) for key in keys)

    def stack(
        self,
        samples: Sequence[Any],
        dtype: torch.dtype,
        allocate: Callable[[tuple[int, ...], torch.dtype], Tensor],
        pad: Tensor | None = None,
        multiple: int = 1,
    ) -> Tensor | None:
        """Copy arrays, large tensors, and all that is padded; see `fastamp._ops.HostOps`."""
        if pad is not None:
            return _pad([torch.as_tensor(s) for s in samples], allocate, pad, multiple)
        if isinstance(samples[0], np.ndarray):
            if {*map(type, samples)} != {type(samples[0])} or not samples[0].flags.c_contiguous:
                return None
            if not _are_alike(samples, "dtype", "shape", "flags.c_contiguous"):
                return None
            out = allocate((len(samples), *samples[0].shape), dtype)
            np.stack(samples, out=out.numpy())
            return out
        if not _is_stackable(samples):
            return None
        out = allocate((len(samples), *samples[0].shape), dtype)
        return torch.stack(tuple(samples), out=out)

    augment_image = staticmethod(augment_image)

    def gatherer(self, columns: Sequence[Column], depth: int) -> "TorchGatherer":
        """Copy a batch in `wait`; see `fastamp._ops.HostOps`."""
        del depth
        return TorchGatherer(columns)


class TorchGatherer:
    """Batches that are copied in `wait`; see `fastamp._ops.Gatherer`."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns
        self._in_flight: deque[tuple[Tensor, Sequence[Tensor], Tensor | None]] = deque()

    def submit(
        self, indices: Tensor, outputs: Sequence[Tensor], keys: Tensor | None = None
    ) -> None:
        """Add a batch."""
        self._in_flight.append((indices, outputs, keys))

    def is_ready(self) -> bool:
        """Return False: a batch is copied in `wait`, not before."""
        return False

    def wait(self) -> float:
        """Copy the oldest batch and return the seconds that it took."""
        start_s = time.perf_counter()
        indices, outputs, keys = self._in_flight.popleft()
        for column, output in zip(self._columns, outputs, strict=True):
            _take(column, indices, output, keys)
        return time.perf_counter() - start_s


def _take(column: Column, indices: Tensor, output: Tensor, keys: Tensor | None) -> None:
    """Write the rows at the indices, which may count from the end."""
    array = column.array
    rows = check_rows(indices, array.shape[0])
    if isinstance(array, Windows):
        output.copy_(torch.from_numpy(array.take(rows.numpy())))
    elif column.images is not None and keys is not None:
        for row, target, key in zip(rows.tolist(), output, keys.tolist(), strict=True):
            target.view(-1).view(torch.uint8).copy_(augment_image(column.images, array[row], key))
    elif isinstance(array, np.ndarray):
        output.copy_(torch.from_numpy(np.take(array, rows.numpy(), axis=0)))
    elif array.dtype == output.dtype:
        # torch selects rows of uint16, uint32 and uint64, but not single numbers.
        torch.index_select(array[..., None], 0, rows, out=output[..., None])
    else:
        output.copy_(torch.index_select(array, 0, rows))
