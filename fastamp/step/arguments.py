"""Checks of arguments and saved states, made before anything changes; errors name the argument."""

import math
import sys
from numbers import Integral, Real
from typing import Any

import torch
import torch.distributed as dist

# A scaler's state: the type and largest value of each entry. The scale is a float32, the tracker an
# int32.
_STATE: dict[str, tuple[Any, float]] = {
    "scale": (Real, torch.finfo(torch.float32).max),
    "growth_factor": (Real, sys.float_info.max),
    "backoff_factor": (Real, sys.float_info.max),
    "growth_interval": (Integral, 2**63 - 1),
    "_growth_tracker": (Integral, 2**31 - 1),
}


def check_optimizer(optimizer: Any, name: str, needed: str) -> None:
    """Raise a TypeError that names the argument if it is not an optimizer."""
    if not hasattr(optimizer, needed):
        msg = f"{name}: expected an optimizer, got a {type(optimizer).__name__}"
        raise TypeError(msg)


def as_bound(name: str, value: float) -> float:
    """Return a bound such as `max_norm` as a float of at least 0, or raise an error naming it."""
    try:
        bound = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        several = hasattr(value, "param_groups")
        got = "an optimizer: several go into a list" if several else f"{value!r:.200}"
        msg = f"{name}: expected a number, got {got}"
        raise TypeError(msg) from error
    if not bound >= 0:
        msg = f"{name}: expected a number of at least 0, got {value!r}"
        raise ValueError(msg)
    return bound


def above_zero(name: str, value: Any) -> float:
    """Return an argument as a float above 0, or raise an error that names it."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not number > 0:
        msg = f"{name}: expected a number above 0, got {value!r:.200}"
        raise ValueError(msg)
    return number


def check_group(group: Any) -> None:
    """Raise a TypeError if `process_group` is neither None nor a group that this rank is in."""
    if group is None or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return
    msg = f"process_group: expected None or a process group with this rank in it, got {group!r}"
    raise TypeError(msg)


def as_state(state: Any) -> dict[str, Any]:
    """Return a scaler's state with tensors as numbers, or raise a ValueError."""
    if not isinstance(state, dict):
        msg = f"state_dict: expected what GradScaler.state_dict returns, got {state!r:.200}"
        raise ValueError(msg)  # noqa: TRY004 - the same error for every invalid state
    tensors = {
        k: v.item() for k, v in state.items() if isinstance(v, torch.Tensor) and v.dim() == 0
    }
    numbers: dict[str, Any] = {**state, **tensors}
    for name, (kind, most) in _STATE.items():
        value = numbers.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) or not 0 <= value <= most:
            number = "an integer" if kind is Integral else "a number"
            msg = f"state_dict[{name!r}]: expected {number} from 0 to {most:g}, got {value!r:.200}"
            raise ValueError(msg)
    return numbers
