"""The ranks of a run: they exchange values, and raise each other's errors."""

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WAIT_S = 60.0  # of a rank for the others at a save


def has_group() -> bool:
    """Say whether the program has made a process group, which may have one rank."""
    return dist.is_available() and dist.is_initialized()


def count() -> int:
    """Return the number of ranks; 1 for a single process."""
    return dist.get_world_size() if has_group() else 1


def rank() -> int:
    """Return this process's rank."""
    return dist.get_rank() if has_group() else 0


def gather(mine: Any) -> list[Any]:
    """Return the value of every rank, in rank order."""
    everyone = [mine] * count()
    if len(everyone) > 1:
        dist.all_gather_object(everyone, mine)
    return everyone


def meet(called: str) -> None:
    """Wait until every rank has called a method, for up to a minute; else a TimeoutError."""
    try:
        dist.barrier(async_op=True).wait(timedelta(seconds=WAIT_S))
    except RuntimeError as error:
        msg = f"{called}: every rank has to call it, and another one has not: {error}"
        raise TimeoutError(msg) from error


def together(action: Callable[..., Any], *args: Any) -> Any:
    """Call a function on every rank and return this rank's result; raise any rank's error."""
    if count() == 1:
        return action(*args)
    value = error = None
    try:
        value = action(*args)
    except Exception as raised:  # noqa: BLE001 - else the other ranks would wait for this one
        error = raised
    errors = [each for each in gather(error and _sendable(error)) if each is not None]
    if errors:
        raise errors[0] from error
    return value


def first(action: Callable[..., Any], *args: Any) -> Any:
    """Call a function on the first rank, and return its result on all."""
    return gather(together(lambda: action(*args) if rank() == 0 else None))[0]


def _sendable(error: Exception) -> Exception:
    """Return an error that can be sent to other ranks: itself, or its text."""
    try:
        return pickle.loads(pickle.dumps(error))  # type: ignore[no-any-return]  # noqa: S301
    except Exception:  # noqa: BLE001 - an error can refuse with any other
        return RuntimeError(f"{type(error).__name__}: {error}")


def is_ddp(model: nn.Module) -> bool:
    """Say whether a model, which may be compiled, is in DistributedDataParallel."""
    return isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel)


def unwrapped(model: Any) -> Any:
    """Return the module inside of DistributedDataParallel and torch.compile."""
    if is_ddp(model):
        model = getattr(model, "_orig_mod", model).module
    return getattr(model, "_orig_mod", model)
