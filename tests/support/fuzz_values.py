"""Values changed at random places, and bytes damaged at random, for the fuzzers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch


def nest(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


# What a file or a state may hold in place of what belongs there.
PLAIN: list[Callable[[], Any]] = [
    *(lambda value=value: value for value in (None, True, False, 0, 1, -1, 2, 5, 255, 10**9)),
    *(lambda value=value: value for value in (2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**400)),
    *(lambda value=value: value for value in (0.0, -0.0, 0.5, 2.5, 1e-320, 1e308, 1e39)),
    *(lambda value=value: value for value in (math.nan, math.inf, -math.inf)),
    *(lambda value=value: value for value in ("", "5", "x", "\ud800", "\0", "nan", "é" * 100)),
    lambda: "x" * 10_000,
    list,
    dict,
    lambda: [None],
    lambda: [[]],
    lambda: {"x": None},
    lambda: nest(60),
    lambda: [0] * 1000,
]
OBJECTS: list[Callable[[], Any]] = [
    *PLAIN,
    tuple,
    lambda: (1, 2),
    lambda: b"",
    lambda: b"\xff" * 8,
    lambda: 1j,
    lambda: {0: 1},
    lambda: {None: None},
    set,
    lambda: torch.zeros(()),
    lambda: torch.tensor(3),
    lambda: torch.tensor([True]),
    lambda: torch.zeros(0),
    lambda: torch.ones(3, 4),
    lambda: torch.full((2,), math.nan),
    lambda: torch.zeros(5056, dtype=torch.uint8),
    lambda: torch.zeros(16, dtype=torch.uint8),
    lambda: torch.arange(9).reshape(3, 3).t(),
    lambda: torch.zeros(1).expand(4, 5),
    lambda: torch.ones(2, 2).to_sparse(),
    lambda: torch.zeros(2, device="meta"),
    lambda: torch.zeros(2, dtype=torch.complex64),
    lambda: torch.nn.Parameter(torch.ones(2)),
]
"""With objects that a checkpoint, or a state in memory, may hold."""


def mutate(value: Any, rng: random.Random, pool: list[Callable[[], Any]]) -> Any:
    """Return a value with one to three changes at random places; what it was made of stays."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _change(value, rng, pool)
    return value


def _change(value: Any, rng: random.Random, pool: list[Callable[[], Any]]) -> Any:
    """Change something here, or in a child."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        return {**value, key: _change(value[key], rng, pool)}
    if isinstance(value, list | tuple) and value and rng.random() < 0.7:
        place = rng.randrange(len(value))
        made = [*value[:place], _change(value[place], rng, pool), *value[place + 1 :]]
        return tuple(made) if isinstance(value, tuple) else made
    if isinstance(value, dict | list | tuple) and rng.random() < 0.7:
        return _rearrange(value, rng, pool)
    near = _near(value, rng) if rng.random() < 0.6 else ()
    return rng.choice(near or (rng.choice(pool)(),))


def _near(value: Any, rng: random.Random) -> tuple[Any, ...]:
    """Return values that resemble one."""
    if isinstance(value, torch.Tensor):
        return (_change_tensor(value, rng),)
    if type(value) in (int, float):
        return (value + 1, value - 1, -value, value * 2**33, value // 2, [value])
    if isinstance(value, str):
        return (value[1:], value + "x", value.upper(), [value], value.encode("utf-8", "replace"))
    return ()


def _rearrange(value: Any, rng: random.Random, pool: list[Callable[[], Any]]) -> Any:
    """Take something out of a container, put something in, or change its order."""
    items = list(value.items()) if isinstance(value, dict) else list(value)
    new = rng.choice(pool)()
    if isinstance(value, dict):
        key = rng.choice((0, "", "x", "step", None, 2**63, "\ud800", (1,), True))
        new = (key, new)
    how = rng.randrange(6)
    if how == 0 and items:
        del items[rng.randrange(len(items))]
    elif how == 1:
        items.insert(rng.randrange(len(items) + 1), new)
    elif how == 2:
        rng.shuffle(items)
    elif how == 3:
        items = items[: len(items) // 2]
    elif how == 4 and items and not isinstance(value, dict):
        items = items * 2
    elif items:
        a, b = rng.randrange(len(items)), rng.randrange(len(items))
        if isinstance(value, dict):
            items[a] = (items[a][0], items[b][1])
        else:
            items[a] = items[b]
    return type(value)(items) if type(value) in (dict, list, tuple) else dict(items)


def _change_tensor(value: torch.Tensor, rng: random.Random) -> Any:
    if value.is_meta or value.layout is not torch.strided:
        return value
    others: list[Callable[[], Any]] = [
        lambda: value.flatten()[:-1],
        lambda: value.unsqueeze(0),
        lambda: value.to(rng.choice((torch.float64, torch.float16, torch.int32, torch.bool))),
        value.tolist,
        lambda: torch.full_like(value, rng.choice((0, 1))),
        lambda: torch.zeros_like(value, device="meta"),
        lambda: value.flatten().repeat(3),
        lambda: value.new_zeros(()).expand(value.shape),
    ]
    return rng.choice(others)()


def damage(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with one to four changes: bits, runs, cuts, insertions, repetitions."""
    made = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at, length = rng.randrange(len(made) + 1), min(rng.randrange(1, 65), len(made))
        how = rng.randrange(7)
        if how == 0 and at < len(made):
            made[at] ^= 1 << rng.randrange(8)
        elif how == 1 and at < len(made):
            made[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif how == 2:
            made[at : at + length] = rng.randbytes(length)
        elif how == 3:
            del made[at:]
        elif how == 4:
            del made[at : at + length]
        elif how == 5:
            made[at:at] = made[at : at + length] or b"\0"
        else:
            made[at : at + length] = bytes(length)
    return bytes(made)
