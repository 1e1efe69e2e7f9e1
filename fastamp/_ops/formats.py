"""How lean optimizers keep float32 values in fewer bits: csrc/step/formats.h in torch's operators.

Codes of 8 bits have a scale for each block: 256 elements of a row of the first dimension, and a
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


def has_rows(tensor: Tensor) -> bool:
    """Say whether a tensor is contiguous, with rows that are long enough for blocks."""
    is_long = tensor.dim() > 1 and tensor.shape[1:].numel() >= SHORTEST_ROW
    return is_long and tensor.is_contiguous()


def shape_of_scales(tensor: Tensor) -> tuple[int, int]:
    """Return the numbers of a tensor's rows and of a row's blocks."""
    return len(tensor), -(-tensor.shape[1:].numel() // BLOCK_SIZE)


def bits_of(values: Tensor) -> Tensor:
    """Return the bits of float32 values as int32, whose sums and products wrap."""
    return values.view(torch.int32)


def _signed(bits: int) -> int:
    return (bits & 0xFFFFFFFF) - ((bits & 0x80000000) << 1)


def _canonical(values: Tensor) -> Tensor:
    return bits_of(values).masked_fill(values.isnan(), 0x7FC00000)


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest bfloat16 values, ties away from zero, and the rest as int16."""
    bits = _canonical(values)
    return (bits + 0x8000 >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join(high: Tensor, low: Tensor) -> Tensor:
    """Return the float32 values that `split` had; a zero's negative rest is another weight's."""
    rest = low.masked_fill((high == 0) & (low < 0), 0)
    return ((high.view(torch.int16).int() << 16) + rest).view(torch.float32)


def mix(bits: Tensor, key: int) -> Tensor:
    """Return 32 random bits from int32 and a key: the last steps of MurmurHash3."""
    bits = bits ^ _signed(key)
    bits ^= bits >> 16 & 0xFFFF
    bits *= _signed(0x85EBCA6B)
    bits ^= bits >> 13 & 0x7FFFF
    bits *= _signed(0xC2B2AE35)
    bits ^= bits >> 16 & 0xFFFF
    return bits


def key_of(seed: int, step: int) -> int:
    """Return the key of a step: of an optimizer's seed and the count of steps."""

    def mixed(bits: int, key: int) -> int:
        return int(mix(torch.tensor(_signed(bits), dtype=torch.int32), key))

    return mixed(step, mixed(seed, 0x9E3779B9))


def noise_of(states: list[Tensor], weights: Tensor, key: int) -> Tensor:
    """Return the random bits of elements: of their first state, weight and place in their row."""
    row = max(weights.shape[1:].numel(), 1)
    places = (torch.arange(weights.numel(), device=weights.device) % row).to(torch.int32)
    places = places.as_strided(weights.shape, weights.stride())  # in the order of memory
    bits = bits_of(weights) * _signed(0x9E3779B1) + places
    return mix(bits ^ bits_of(states[0]) if states else bits, key)


def round_randomly(values: Tensor, noise: Tensor) -> Tensor:
    """Round to bfloat16, up with a probability of what is cut off, by 16 bits of noise."""
    bits = _canonical(values) + (noise & 0xFFFF) >> 16
    return bits.to(torch.int16).view(torch.bfloat16)


def _in_blocks(values: Tensor) -> Tensor:
    """Return values as [rows, blocks, 256], with zeros behind a row's last elements."""
    rows, blocks = shape_of_scales(values)
    flat = values.flatten(1)
    padded = functional.pad(flat, (0, blocks * BLOCK_SIZE - flat.shape[1]))
    return padded.view(rows, blocks, BLOCK_SIZE)


def _in_rows(blocks: Tensor, shape: torch.Size) -> Tensor:
    return blocks.flatten(1)[:, : shape[1:].numel()].reshape(shape)


def decode(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Return the values of codes.

    Args:
        codes: uint8 [rows, ...].
        scales: float32 [rows, blocks of a row].
        signed: whether a code's highest bit is a sign.

    Returns:
        float32, of the codes' shape.
    """
    blocks = _in_blocks(codes).int()
    magnitudes = blocks & 127 if signed else blocks
    values = ((magnitudes << _DROPPED) + _ONE).view(torch.float32) - (1 - _LEAST[signed])
    values *= scales[..., None]
    if signed:
        bits_of(values).bitwise_or_((blocks & 128) << 24)
    return _in_rows(values, codes.shape)


def encode(values: Tensor, *, signed: bool, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return codes and scales of values, to the nearest or, with `noise`, rounded randomly.

    Args:
        values: float32 [rows, ...].
        signed: as for `decode`.
        noise: 32 random bits for each value, of which the upper 16 count.
    """
    blocks = _in_blocks(values)
    scales, inverses = _scales_of(blocks.abs().amax(dim=2, keepdim=True), _TOPS[signed])
    codes = _codes_of(blocks.abs() * inverses, noise, signed=signed)
    if signed:
        codes |= bits_of(blocks) >> 24 & 128
    return _in_rows(codes, values.shape).to(torch.uint8), scales[..., 0]


def _scales_of(largest: Tensor, top: float) -> tuple[Tensor, Tensor]:
    """Return the scales of blocks with these largest magnitudes, and what values are scaled by."""
    inverse_top = torch.tensor(1.0, dtype=torch.float32) / top
    is_finite, is_zero = largest < torch.inf, largest < _SMALLEST
    scales = torch.where(is_finite, largest * inverse_top, torch.inf)
    inverses = torch.where(is_finite, torch.full_like(largest, top) / largest, 0.0)
    return scales.masked_fill(is_zero, 0.0), inverses.masked_fill(is_zero, 0.0)


def _codes_of(values: Tensor, noise: Tensor | None, *, signed: bool) -> Tensor:
    top, least = _TOPS[signed], _LEAST[signed]
    limited = torch.where(values < top, values, top).clamp_(min=least)
    codes = bits_of(limited + (1 - least))
    if noise is None:
        codes += 1 << _DROPPED - 1
    else:
        shift = _DROPPED - 16
        codes += ((_in_blocks(noise) >> 16 & 0xFFFF) << shift) + (1 << shift - 1)
    return codes - _ONE >> _DROPPED
