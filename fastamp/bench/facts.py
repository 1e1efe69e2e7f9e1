"""Facts about a training loop, in its timer's file for `python -m fastamp.bench doctor`."""

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from fastamp._files import write
from fastamp.timer import Timer


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The optimizer, the loader, the scaler and the precision of a loop; None is unknown."""

    optimizer: str | None = None
    """Its class, as "AdamW"."""
    fused: bool | None = None
    """Every group has `fused=True`."""
    groups: int | None = None
    sizes: tuple[tuple[int, int], ...] | None = None
    """(elements, number of parameters with as many elements)."""
    loader: str | None = None
    """Its class with its package, as "torch.DataLoader"."""
    dataset: str | None = None
    workers: int | None = None
    path: str | None = None
    """How a fastamp.DataLoader makes its batches, as `stats().path`."""
    scaler: str | None = None
    """Its class with its package; "none" where torch's is disabled."""
    dtype: str | None = None
    """What autocast computes in; "float32" without it."""


def describe(
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    loader: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    dtype: torch.dtype | None = None,
) -> Facts:
    """Return the facts about the arguments; `optimizer` may be several.

    Raises:
        TypeError: `optimizer` is not an optimizer, nor several.
    """
    given: Any = [] if optimizer is None else optimizer
    optimizers = [given] if hasattr(given, "param_groups") else list(given)
    for each in optimizers:
        if not hasattr(each, "param_groups"):
            msg = f"optimizer: expected a torch.optim.Optimizer or several, got {each!r}"
            raise TypeError(msg)
    groups = [group for each in optimizers for group in each.param_groups]
    sizes = Counter(parameter.numel() for group in groups for parameter in group["params"])
    statistics = loader.stats() if callable(getattr(loader, "stats", None)) else None
    dataset = getattr(loader, "dataset", None)
    return Facts(
        optimizer=" and ".join({type(each).__name__: None for each in optimizers}) or None,
        fused=all(group.get("fused") for group in groups) if groups else None,
        groups=len(groups) or None,
        sizes=tuple(sorted(sizes.items())) or None,
        loader=None if loader is None else _class_of(loader),
        dataset=None if dataset is None else type(dataset).__name__,
        workers=getattr(loader, "num_workers", None),
        path=getattr(statistics, "path", None),
        scaler=None if scaler is None else _scaler_of(scaler),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
    )


def save(
    timer: Timer,
    path: str | os.PathLike[str],
    *,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    loader: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write `Timer.to_json`'s file and the facts of a loop for `fastamp.bench doctor --timer`.

    Args:
        timer: of the loop.
        path: of the file.
        optimizer: one or several.
        loader: of the batches.
        scaler: of the gradients.
        dtype: of autocast; torch.float32 without it.

    Raises:
        OSError: the file cannot be written.
        TypeError: `optimizer` is not an optimizer, nor several.

    Example:
        >>> timer = fastamp.Timer("cpu")
        >>> with timer("step"):
        ...     pass
        >>> fastamp.bench.facts.save(timer, "timer.json", dtype=torch.float32)
    """
    facts = describe(optimizer, loader, scaler, dtype)
    timer.to_json(path)
    content = json.loads(Path(path).read_bytes()) | {"facts": asdict(facts)}
    write(Path(path), (json.dumps(content) + "\n").encode())


def _scaler_of(scaler: torch.amp.GradScaler) -> str:
    found = _class_of(scaler)
    return found if scaler.is_enabled() or found.startswith("fastamp.") else "none"


def _class_of(value: object) -> str:
    return f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
