"""Checks of the arguments of a loader and its datasets."""

from numbers import Integral
from typing import Any

import torch
from torch.utils.data import IterableDataset


def as_integer(name: str, value: Any, *, least: int, optional: bool = True) -> Any:
    """Return a 64-bit integer from `least` on, also NumPy's, as an int; if `optional`, also None.

    Raises:
        ValueError: it is neither.
    """
    if value is None and optional:
        return None
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not least <= int(value) < 2**63:
        msg = f"{name}: expected an integer of at least {least}, got {value!r}"
        raise ValueError(msg)
    return int(value)


def as_size(size: Any) -> tuple[int, int]:
    """Return the height and width of images from these two, or from one number for both.

    Raises:
        ValueError: it is neither.
    """
    pair = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if len(pair) != 2:
        msg = f"size: expected a number, or height and width, got {size!r}"
        raise ValueError(msg)
    height, width = (as_integer("size", side, least=1, optional=False) for side in pair)
    return height, width


def check_generator(generator: Any) -> None:
    """Raise an error unless it is a torch.Generator or None."""
    if not isinstance(generator, torch.Generator | None):
        msg = f"generator: expected a torch.Generator or None, got {generator!r}"
        raise TypeError(msg)


def check_device(device: torch.device | str | int | None, *, resident: bool) -> None:
    """Raise torch's error for an invalid device, and a ValueError if `resident` has none."""
    if device is not None:
        torch.device(device)
    elif resident:
        msg = "resident=True: device: expected the device to keep the dataset on, got None"
        raise ValueError(msg)


def check_worker(worker: str | None, dataset: Any, context: Any) -> str | None:
    """Raise an error for an unknown kind of workers, and for what threads cannot load."""
    if worker not in (None, "process", "thread"):
        msg = f"worker: expected None, 'process' or 'thread', got {worker!r}"
        raise ValueError(msg)
    if worker == "thread" and context is not None:
        msg = f"multiprocessing_context: expected None with worker='thread', got {context!r}"
        raise ValueError(msg)
    if worker == "thread" and isinstance(dataset, IterableDataset):
        name = type(dataset).__name__
        msg = f"worker='thread': {name} is iterable, and threads call `__getitem__`: use processes"
        raise TypeError(msg)
    return worker
