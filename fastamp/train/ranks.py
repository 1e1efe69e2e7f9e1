"""The ranks of a run: they exchange values, and raise each other's errors."""

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WAIT_S = 60.0  # of a rank for the others at a save


@dataclass(frozen=True)
class Ranks:
    """The ranks that train one model, or a single process."""

    mode: str | None = None
    """"ddp", "fsdp", or None for a single process."""
    rank: int = 0
    count: int = 1

    def gather(self, mine: Any) -> list[Any]:
        """Return the value of every rank, in rank order."""
        everyone = [mine] * self.count
        if self.mode is not None:
            dist.all_gather_object(everyone, mine)
        return everyone

    def meet(self, called: str) -> None:
        """Wait until every rank has called a method, for up to a minute.

        Raises:
            TimeoutError: another rank has not; or it has ended.
        """
        if self.mode is None:
            return
        try:
            dist.barrier(async_op=True).wait(timedelta(seconds=WAIT_S))
        except RuntimeError as error:
            msg = f"{called}: every rank has to call it, and another one has not: {error}"
            raise TimeoutError(msg) from error

    def together(self, action: Callable[[], Any]) -> Any:
        """Call a function on every rank and return this rank's result; raise any rank's error."""
        value = error = None
        try:
            value = action()
        except Exception as raised:  # noqa: BLE001 - else the other ranks would wait for this one
            error = raised
        for rank, raised_there in enumerate(self.gather(error and _sendable(error))):
            if raised_there is not None:
                raise error if error is not None and rank == self.rank else raised_there
        return value

    def first(self, action: Callable[[], Any]) -> Any:
        """Call a function on the first rank, and return its result on all."""
        return self.gather(self.together(lambda: action() if self.rank == 0 else None))[0]

    def sum(self, values: list[torch.Tensor]) -> torch.Tensor:
        """Return the sums over all ranks of scalars on one device, in one float64 tensor."""
        packed = torch.stack([value.double() for value in values])
        if self.mode is not None:
            dist.all_reduce(packed)
        return packed


def _sendable(error: Exception) -> Exception:
    """Return an error that can be sent to other ranks: itself, or its text."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - an error can refuse with any other
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def find_ranks(model: nn.Module) -> Ranks:
    """Return the ranks that share a model as it is given: in DDP, or sharded by FSDP2.

    Raises:
        ValueError: there are several ranks, and the model is in neither.
    """
    if not (dist.is_available() and (dist.is_initialized() or dist.is_torchelastic_launched())):
        return Ranks()
    count = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    mode = None
    if dist.is_initialized():
        from torch.distributed.tensor import DTensor  # noqa: PLC0415 - slow to import

        if isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel):
            mode = "ddp"
        elif any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            mode = "fsdp"
    if mode is not None:
        return Ranks(mode, dist.get_rank(), count)
    if count > 1:
        wanted = "a model in DistributedDataParallel, or sharded by fully_shard"
        msg = f"model: expected {wanted}, as there are {count} ranks, got {type(model).__name__}"
        raise ValueError(msg)
    return Ranks()
