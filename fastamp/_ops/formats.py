"""How lean optimizers keep weights and states in fewer bits: csrc/step/formats.h.

Codes of 8 bits have a scale for each block: 256 elements of a row of the first dimension, and a
shorter block at a row's end. So scales are sharded as rows are.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

DTYPES = (torch.float32, torch.bfloat16)
"""Of parameters. A float16 weight would need a scale, as its gradients do."""
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


def _signed(bits: int) -> int:
    return (bits & 0xFFFFFFFF) - ((bits & 0x80000000) << 1)


def _canonical(values: Tensor) -> Tensor:
    return values.view(torch.int32).masked_fill(values.isnan(), 0x7FC00000)


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
    of_seed = mix(torch.tensor(_signed(seed), dtype=torch.int32), 0x9E3779B9)
    return int(mix(torch.tensor(step, dtype=torch.int32), int(of_seed)))


def noise_of(states: list[Tensor], weights: Tensor, key: int) -> Tensor:
    """Return the random bits of elements: of their first state, weight and place in their row."""
    row = weights.shape[1:].numel()
    if weights.is_contiguous():
        places = torch.arange(row, dtype=torch.int32, device=weights.device)
        places = places.view(weights.shape[1:])
    else:
        places = (torch.arange(weights.numel(), device=weights.device) % row).to(torch.int32)
        places = places.as_strided(weights.shape, weights.stride())  # in the order of memory
    bits = weights.view(torch.int32) * _signed(0x9E3779B1) + places
    return mix(bits ^ states[0].view(torch.int32) if states else bits, key)


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
    """Return the float32 values of codes [rows, ...] with scales [rows, blocks of a row]."""
    blocks = _in_blocks(codes)
    every = torch.arange(128 if signed else 256, dtype=torch.int32, device=codes.device)
    values = ((every << _DROPPED) + _ONE).view(torch.float32) - (1 - _LEAST[signed])
    table = torch.cat([values, -values]) if signed else values
    decoded = table.index_select(0, blocks.flatten().int()).view(blocks.shape)
    return _in_rows(decoded.mul_(scales[..., None]), codes.shape)


def encode(values: Tensor, *, signed: bool, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return codes and scales of float32 values [rows, ...].

    They are the nearest or, with 32 random bits for each value, of which the upper 16 count,
    rounded randomly.
    """
    blocks, top, least = _in_blocks(values), _TOPS[signed], _LEAST[signed]
    largest = blocks.abs().amax(dim=2, keepdim=True)
    inverse_top = torch.tensor(1.0, dtype=torch.float32) / top
    is_finite, is_zero = largest < torch.inf, largest < _SMALLEST
    scales = torch.where(is_finite, largest * inverse_top, torch.inf).masked_fill(is_zero, 0.0)
    inverses = torch.where(is_finite, torch.full_like(largest, top) / largest, 0.0)
    scaled = blocks.abs() * inverses.masked_fill(is_zero, 0.0)
    limited = torch.where(scaled < top, scaled, top).clamp_(min=least)
    added: Any = 1 << _DROPPED - 1
    if noise is not None:
        shift = _DROPPED - 16
        added = ((_in_blocks(noise) >> 16 & 0xFFFF) << shift) + (1 << shift - 1)
    codes = (limited + (1 - least)).view(torch.int32) + added - _ONE >> _DROPPED
    if signed:
        codes |= blocks.view(torch.int32) >> 24 & 128
    return _in_rows(codes, values.shape).to(torch.uint8), scales[..., 0]


class State(NamedTuple):
    """A state of a rule, and how it is stored in 16 or 8 bits; see csrc/step/rules.h."""

    name: str
    codes: str  # in 8 bits, which torch's optimizers do not know
    scale: str  # of the codes
    option: str = ""  # that it depends on
    has_sign: bool = True
    is_random: bool = True  # whether it is rounded randomly, rather than to the nearest

    def read(self, state: dict[str, Any]) -> Tensor:
        """Return its float32 values."""
        if self.codes in state:
            return decode(state[self.codes], state[self.scale], signed=self.has_sign)
        values: Tensor = state[self.name].float()
        return values

    def write(self, state: dict[str, Any], values: Tensor, noise: Tensor | None = None) -> None:
        """Write float32 values as the state keeps them; without noise to the nearest."""
        noise = noise if self.is_random else None
        if self.codes in state:
            codes, scales = encode(values, signed=self.has_sign, noise=noise)
            state[self.codes].copy_(codes)
            state[self.scale].copy_(scales)
        elif state[self.name].dtype == torch.bfloat16 and noise is not None:
            state[self.name].copy_(round_randomly(values, noise >> 16))
        else:
            state[self.name].copy_(values)


_FIRST = State("exp_avg", "exp_avg_codes", "exp_avg_scale")
_SECOND = State("exp_avg_sq", "exp_avg_sq_codes", "exp_avg_sq_scale", has_sign=False)
_BUFFER = State("momentum_buffer", "momentum_buffer_codes", "momentum_buffer_scale", "momentum")
STATES = {"Adam": (_FIRST._replace(is_random=False), _SECOND), "SGD": (_BUFFER,), "Lion": (_FIRST,)}
"""Of rules, in the order of csrc/step/rules.h."""


def states_of(rule: str, group: dict[str, Any]) -> list[State]:
    """Return the states that a group's options ask for."""
    return [each for each in STATES[rule] if not each.option or group[each.option]]


def names_of(rule: str, group: dict[str, Any], state: dict[str, Any]) -> list[str]:
    """Return the names of the tensors that hold a parameter's states."""
    states = states_of(rule, group)
    return [each.codes if each.codes in state else each.name for each in states]


def has_low(group: dict[str, Any], param: Tensor) -> bool:
    """Say whether the state of a parameter has the lower halves of its weights."""
    return bool(group["exact"]) and param.dtype == torch.bfloat16


def read_weights(param: Tensor, state: dict[str, Any]) -> Tensor:
    """Return a parameter's float32 weights.

    The lower half is pairs of bytes, which gloo and NCCL can gather. A zero's negative one belongs
    to another weight.
    """
    if "low" not in state or param.dtype != torch.bfloat16:
        return param.float()
    low: Tensor = state["low"].view(torch.int16)[..., 0]
    rest = low.masked_fill((param == 0) & (low < 0), 0)
    return ((param.view(torch.int16).int() << 16) + rest).view(torch.float32)


def write_weights(
    param: Tensor, state: dict[str, Any], weights: Tensor, noise: Tensor | None = None
) -> None:
    """Write float32 weights as the parameter keeps them; without noise to the nearest."""
    if "low" in state and param.dtype == torch.bfloat16:  # ties of the upper half away from zero
        bits = _canonical(weights)
        param.copy_((bits + 0x8000 >> 16).to(torch.int16).view(torch.bfloat16))
        state["low"].view(torch.int16)[..., 0].copy_(bits.to(torch.int16))
    elif param.dtype == torch.bfloat16 and noise is not None:
        param.copy_(round_randomly(weights, noise))
    else:
        param.copy_(weights)
