"""Checks of the arguments of a loader and its datasets."""

from numbers import Integral
from typing import Any

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


def check_worker(
    worker: str | None, dataset: Any, processes_only: dict[str, tuple[Any, Any]]
) -> str | None:
    """Raise an error for an unknown kind of workers, and for what threads cannot load.

    `processes_only` has the value and the default of each argument that is of processes.
    """
    if worker not in (None, "process", "thread"):
        msg = f"worker: expected None, 'process' or 'thread', got {worker!r}"
        raise ValueError(msg)
    for name, (value, default) in processes_only.items() if worker == "thread" else ():
        if value != default:
            msg = f"{name}: expected {default} with worker='thread', got {value!r}"
            raise ValueError(msg)
    if worker == "thread" and isinstance(dataset, IterableDataset):
        name = type(dataset).__name__
        msg = f"worker='thread': {name} is iterable, and threads call `__getitem__`: use processes"
        raise TypeError(msg)
    return worker


def check_shardable(dataset: Any, **samplers: Any) -> None:
    """Raise an error for an iterable dataset, and for samplers of the user's."""
    if isinstance(dataset, IterableDataset):
        name = type(dataset).__name__
        msg = f"dataset: {name} is iterable: it has no indices to share out among ranks"
        raise TypeError(msg)
    for name, sampler in samplers.items():
        if sampler is not None:
            msg = f"{name}: expected None for a sharded loader, which makes its own"
            raise ValueError(msg)
