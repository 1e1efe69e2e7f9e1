"""Checks of arguments, made before anything changes; errors name the argument."""

from typing import Any

import torch.distributed as dist


def check_optimizers(optimizers: list[Any], needed: str) -> None:
    """Refuse an empty list, and what is no optimizer."""
    if not optimizers:
        msg = "optimizer: expected at least one, got an empty list"
        raise ValueError(msg)
    for place, each in enumerate(optimizers):
        if not hasattr(each, needed):
            name = f"optimizer[{place}]" if len(optimizers) > 1 else "optimizer"
            msg = f"{name}: expected an optimizer, got a {type(each).__name__}"
            raise TypeError(msg)


def as_bound(name: str, value: Any, *, above_zero: bool = False) -> float:
    """Return an argument as a float of at least 0, or above it, or raise an error naming it."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        msg = f"{name}: expected a number, got {value!r:.200}"
        raise TypeError(msg) from error
    if not (number > 0 or (number == 0 and not above_zero)):
        bound = "above 0" if above_zero else "of at least 0"
        msg = f"{name}: expected a number {bound}, got {value!r}"
        raise ValueError(msg)
    return number


def check_group(group: Any) -> None:
    """Raise a TypeError if `process_group` is neither None nor a group that this rank is in."""
    if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        msg = f"process_group: expected None or a process group with this rank in it, got {group!r}"
        raise TypeError(msg)
