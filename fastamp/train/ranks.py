"""The ranks of a run: how they share a model, exchange values, and raise each other's errors."""

import gc
import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastamp.train.config import TrainConfig

WAIT_S = 60.0  # of a rank for the others at a save
_LAUNCHERS = {"RANK", "WORLD_SIZE", "MASTER_ADDR"}  # torchrun sets them, and joining needs them


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

    def spread(self, model: nn.Module, config: TrainConfig) -> tuple[nn.Module, nn.Module]:
        """Move the model to the device, shard and wrap it.

        Returns:
            The module to call in training, and the one to call in evaluation.
        """
        device = config.chosen_device
        model.to(device)
        if self.mode == "fsdp":
            self._shard(model, device)
        called: Any = torch.compile(model) if config.compile else model
        if self.mode != "ddp":
            return called, called
        device_ids = [device] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(called, device_ids=device_ids), called

    def _shard(self, model: nn.Module, device: torch.device) -> None:
        """Shard a model with FSDP2, unless the user has done it.

        All ranks start from the first rank's parameters and buffers, as with DDP. Each child of the
        outermost ModuleLists (a model's repeated blocks) is a unit, and so is the rest.
        """
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - slow to import
        from torch.distributed.fsdp import FSDPModule, fully_shard  # noqa: PLC0415

        if any(isinstance(module, FSDPModule) for module in model.modules()):
            return
        for tensor in (*model.parameters(), *model.buffers()):
            dense = tensor.detach().contiguous()  # gloo refuses the others
            dist.broadcast(dense, src=0)
            tensor.detach().copy_(dense)
        mesh = init_device_mesh(device.type, (self.count,))
        for module in [*_blocks(model), model]:
            fully_shard(module, mesh=mesh)


def _sendable(error: Exception) -> Exception:
    """Return an error that can be sent to other ranks: itself, or its text."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - an error can refuse with any other
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@contextmanager
def join(config: TrainConfig) -> Iterator[Ranks]:
    """Join the other ranks, if there are any, and destroy the process group if this made it.

    Raises:
        ValueError: the config asks for ranks and there are none, or for FSDP2 where torch has none;
            or this is a rank beyond the others, which torch would let wait.
    """
    has_ranks = dist.is_available() and dist.is_initialized()
    if not has_ranks and not (dist.is_available() and os.environ.keys() >= _LAUNCHERS):
        if config.parallel is not None:
            expected = "expected None, as neither torchrun nor torch.distributed has started ranks"
            msg = f"parallel: {expected}, got {config.parallel!r}"
            raise ValueError(msg)
        yield Ranks()
        return
    device = config.chosen_device
    if (config.parallel, device.type) == ("fsdp", "cpu") and not hasattr(
        torch.cpu.Stream, "record_event"
    ):
        msg = f"parallel: torch {torch.__version__} has no FSDP2 on the CPU, got 'fsdp'; use 'ddp'"
        raise ValueError(msg)
    if not has_ranks and not int(os.environ["RANK"]) < int(os.environ["WORLD_SIZE"]):
        msg = f"RANK: expected one of WORLD_SIZE={os.environ['WORLD_SIZE']} ranks, got "
        raise ValueError(msg + os.environ["RANK"])
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    if not has_ranks:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(config.parallel or "ddp", dist.get_rank(), dist.get_world_size())
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they hold the DDP module
        raise
    finally:
        gc.collect()  # DDP's hooks on the model, and threads that must end before torch does
        if not has_ranks:
            dist.destroy_process_group()


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not isinstance(child, nn.ModuleList):
            yield from _blocks(child)
        else:
            yield from (block for block in child if type(block).forward is not nn.Module.forward)
