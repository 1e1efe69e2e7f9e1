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
from torch.utils.data import DataLoader, IterableDataset

import fastamp
from fastamp._files import write
from fastamp.step.native import has_stepped
from fastamp.timer import Timer


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The optimizer, the loader, the scaler and the precision of a loop; None is unknown."""

    optimizer: str | None = None  # its class, as "AdamW"
    fused: bool | None = None  # every group has `fused=True`
    by_fastamp: bool | None = None  # fastamp makes its steps
    sparse: bool | None = None  # a gradient is
    sizes: tuple[tuple[int, int], ...] | None = None  # elements, parameters with as many elements
    loader: str | None = None  # its class with its package, as "torch.DataLoader"
    dataset: str | None = None
    iterable: bool | None = None  # the dataset is, without items by number
    workers: int | None = None
    path: str | None = None  # `stats().path` of a fastamp.DataLoader, or of one in torch's place
    scaler: str | None = None  # its class with its package; "none" where it is disabled
    dtype: str | None = None  # what autocast computes in; "float32" without it


def describe(
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    loader: Any = None,
    scaler: torch.amp.GradScaler | None = None,
    dtype: torch.dtype | None = None,
) -> Facts:
    """Return the facts about the arguments of `save`."""
    given: Any = [] if optimizer is None else optimizer
    optimizers = [given] if hasattr(given, "param_groups") else list(given)
    for each in optimizers:
        if not hasattr(each, "param_groups"):
            msg = f"optimizer: expected a torch.optim.Optimizer or several, got {each!r}"
            raise TypeError(msg)
    groups = [group for each in optimizers for group in each.param_groups]
    parameters = [parameter for group in groups for parameter in group["params"]]
    sizes = Counter(parameter.numel() for parameter in parameters)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    answers = [*map(has_stepped, optimizers)] or [None]
    stepped = next((answer for answer in (False, None) if answer in answers), True)
    scaled = None if scaler is None else _class_of(scaler) if scaler.is_enabled() else "none"
    dataset = getattr(loader, "dataset", None)
    return Facts(
        optimizer=" and ".join({type(each).__name__: None for each in optimizers}) or None,
        fused=all(group.get("fused") for group in groups) if groups else None,
        by_fastamp=isinstance(scaler, fastamp.GradScaler) or stepped,
        sparse=any(grad.is_sparse for grad in grads) if grads else None,
        sizes=tuple(sorted(sizes.items())) or None,
        loader=None if loader is None else _class_of(loader),
        dataset=None if dataset is None else type(dataset).__name__,
        iterable=None if dataset is None else isinstance(dataset, IterableDataset),
        workers=getattr(loader, "num_workers", None),
        path=_path_of(loader),
        scaler=scaled,
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

    Call it right after the loop: all time since the first region counts.

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


def _path_of(loader: Any) -> str | None:
    """Return how a fastamp.DataLoader makes the batches, or would make those of torch's."""
    if type(loader) is DataLoader:
        loader = fastamp.DataLoader(loader.dataset, collate_fn=loader.collate_fn)
    return loader.stats().path if isinstance(loader, fastamp.DataLoader) else None


def _class_of(value: object) -> str:
    return f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
