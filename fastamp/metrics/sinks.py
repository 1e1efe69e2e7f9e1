"""Sinks: callables that accept a list of (name, step, value), and write it somewhere."""

import importlib
import logging
from collections.abc import Callable
from typing import Any, TypeAlias

Scalar: TypeAlias = tuple[str, int, float]


class Logged(tuple[str, int, float]):  # noqa: SLOT001 - a tuple can have no slots with values
    """A scalar as sinks get it: (name, step, value), which also knows when it was logged."""

    time_s: float
    """Seconds since 1970, as `time.time` returns them."""


def require(module: str, extra: str) -> Any:
    """Import a module of an extra, or raise an ImportError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        msg = f"{module} cannot be imported ({error}): pip install 'fastamp[{extra}]'"
        raise ImportError(msg) from error


def sink_of(given: Any) -> Callable[[list[Logged]], None]:
    """Return a sink that logs the first error of a callable or SummaryWriter, and raises none.

    Raises:
        TypeError: it is neither.
    """
    if not callable(given) and not hasattr(given, "add_scalar"):
        msg = f"sinks: expected callables or SummaryWriters, got {given!r}"
        raise TypeError(msg)
    has_failed = False

    def write(scalars: list[Logged]) -> None:
        nonlocal has_failed
        try:
            if callable(given):
                given(scalars)
                return
            for scalar in scalars:
                name, step, value = scalar
                given.add_scalar(name, value, step, walltime=scalar.time_s)
            given.flush()
        except Exception as error:  # noqa: BLE001 - a sink must not end the training
            if not has_failed:
                logging.getLogger(__name__).warning("sink %r failed: %r", given, error)
            has_failed = True

    return write
