"""Checks of arguments that several files have."""

from numbers import Integral
from typing import Any


def as_integer(name: str, value: Any, *, least: int, optional: bool = True) -> Any:
    """Return a 64-bit integer from `least` on, or a None that is `optional`; else a ValueError."""
    if value is None and optional:
        return None
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not least <= int(value) < 2**63:
        msg = f"{name}: expected an integer of at least {least}, got {value!r}"
        raise ValueError(msg)
    return int(value)


def as_size(size: Any) -> tuple[int, int]:
    """Return height and width from these two, or from one number for both; else a ValueError."""
    pair = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if len(pair) != 2:
        msg = f"size: expected a number, or height and width, got {size!r}"
        raise ValueError(msg)
    height, width = (as_integer("size", side, least=1, optional=False) for side in pair)
    return height, width
