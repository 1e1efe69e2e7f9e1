"""How fastamp.AdamW keeps float32 values in fewer bits: csrc/step/formats.h in torch's operators.

Moments in 8 bits have a scale for each block: 256 elements of a row of the first dimension, and a
shorter block at a row's end. So scales are sharded as rows are.
"""

import torch
from torch import Tensor
from torch.nn import functional

BLOCK_SIZE = 256
SHORTEST_ROW = 64
"""Elements: a tensor of shorter rows would have more bytes of scales than it saves."""

_MANTISSA = 4
_DROPPED = 23 - _MANTISSA
_ONE = 127 << 23
_SMALLEST = 2.0**-100
_LEAST = {True: 0.0, False: 1 / 32}  # the value of the smallest code, signed or unsigned
_TOPS = {True: 247.0, False: 63487 + 1 / 32}  # and of the largest
_INFINITY = 0x7F800000


def has_rows(tensor: Tensor) -> bool:
    """Say whether a tensor is contiguous, with rows that are long enough for blocks."""
    is_long = tensor.dim() > 1 and tensor.shape[1:].numel() >= SHORTEST_ROW
    return is_long and tensor.is_contiguous()


def shape_of_scales(tensor: Tensor) -> tuple[int, int]:
    """Return the numbers of a tensor's rows and of a row's blocks."""
    return len(tensor), -(-tensor.shape[1:].numel() // BLOCK_SIZE)


def bits_of(values: Tensor) -> Tensor:
    """Return the bits of float32 values as int64, in which sums do not overflow."""
    return values.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def floats_of(bits: Tensor) -> Tensor:
    """Return the float32 values of bits."""
    signed = torch.where(bits >= 1 << 31, bits - (1 << 32), bits)
    return signed.to(torch.int32).view(torch.float32)


def _canonical(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), 0x7FC00000, bits_of(values))


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest bfloat16 values, ties away from zero, and the rest as int16."""
    bits = _canonical(values)
    high = (bits + 0x8000) >> 16 & 0xFFFF
    return floats_of(high << 16).bfloat16(), _int16(bits & 0xFFFF)


def join(high: Tensor, low: Tensor) -> Tensor:
    """Return the float32 values that `split` had; a zero's negative rest is another weight's."""
    low = low.long().masked_fill((high == 0) & (low < 0), 0)
    return floats_of((bits_of(high.float()) + low) & 0xFFFFFFFF)


def _int16(bits: Tensor) -> Tensor:
    return torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16)


def mix(bits: Tensor | int, key: int) -> Tensor:
    """Return 32 random bits from a number and a key: the last steps of MurmurHash3."""
    bits = torch.as_tensor(bits ^ key)
    bits = (bits ^ bits >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    bits = (bits ^ bits >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return bits ^ bits >> 16


def key_of(seed: int, step: int) -> int:
    """Return the key of a step: of an optimizer's seed and the count of steps."""
    return int(mix(step & 0xFFFFFFFF, int(mix(seed, 0x9E3779B9))))


def noise_of(exp_avg: Tensor, key: int) -> Tensor:
    """Return the random bits of elements, which depend on their first moments."""
    return mix(bits_of(exp_avg), key)


def round_randomly(values: Tensor, noise: Tensor) -> Tensor:
    """Round to bfloat16, up with a probability of what is cut off, by 16 bits of noise."""
    bits = (_canonical(values) + (noise & 0xFFFF)) >> 16
    return floats_of(bits << 16 & 0xFFFFFFFF).bfloat16()


def _in_blocks(values: Tensor) -> Tensor:
    """Return values as [rows, blocks, 256], with zeros behind a row's last elements."""
    rows, blocks = shape_of_scales(values)
    flat = values.flatten(1)
    padded = functional.pad(flat, (0, blocks * BLOCK_SIZE - flat.shape[1]))
    return padded.view(rows, blocks, BLOCK_SIZE)


def _in_rows(blocks: Tensor, shape: torch.Size) -> Tensor:
    return blocks.flatten(1)[:, : shape[1:].numel()].reshape(shape)


def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Return moments of codes.

    Args:
        codes: uint8 [rows, ...].
        scales: float32 [rows, blocks of a row].
        signed: whether a code's highest bit is a sign: the first moment's.

    Returns:
        float32, of the codes' shape.
    """
    blocks = _in_blocks(codes.long())
    magnitudes = blocks & 127 if signed else blocks
    values = floats_of((magnitudes << _DROPPED) + _ONE) - (1 - _LEAST[signed])
    bits = bits_of(values * scales[..., None])
    return _in_rows(floats_of(bits | (blocks & 128) << 24 if signed else bits), codes.shape)


def encode(values: Tensor, *, signed: bool, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return codes and scales of moments, to the nearest or, with `noise`, rounded randomly.

    Args:
        values: float32 [rows, ...].
        signed: as for `decode`.
        noise: 32 random bits for each value, of which the upper 16 count.
    """
    blocks = _in_blocks(values)
    magnitudes = floats_of(bits_of(blocks) & 0x7FFFFFFF)
    largest = floats_of((bits_of(blocks) & 0x7FFFFFFF).amax(dim=2, keepdim=True))
    scales, inverses = _scales_of(largest, _TOPS[signed])
    codes = _codes_of(magnitudes * inverses, noise, signed=signed)
    if signed:
        codes |= bits_of(blocks) >> 24 & 128
    return _in_rows(codes, values.shape).to(torch.uint8), scales[..., 0]


def _scales_of(largest: Tensor, top: float) -> tuple[Tensor, Tensor]:
    """Return the scales of blocks with these largest magnitudes, and what moments are scaled by."""
    inverse_top = torch.tensor(1.0, dtype=torch.float32) / top
    scales, inverses = largest * inverse_top, torch.full_like(largest, top) / largest
    is_finite = bits_of(largest) < _INFINITY
    scales = torch.where(is_finite, scales, torch.inf)
    inverses = torch.where(is_finite, inverses, 0.0)
    is_zero = largest < _SMALLEST
    return scales.masked_fill(is_zero, 0.0), inverses.masked_fill(is_zero, 0.0)


def _codes_of(values: Tensor, noise: Tensor | None, *, signed: bool) -> Tensor:
    top, least = _TOPS[signed], _LEAST[signed]
    limited = torch.where(values < top, values, top).clamp(min=least)
    rounding: Tensor | int = 1 << _DROPPED - 1
    if noise is not None:
        shift = _DROPPED - 16
        rounding = ((_in_blocks(noise) >> 16) << shift) + (1 << shift - 1)
    return bits_of(limited + (1 - least)) + rounding - _ONE >> _DROPPED
