"""The ranks of a run: who they are, how a model is spread over them, and what they agree on."""

from __future__ import annotations

import gc
import os
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastamp.train.config import TrainConfig

__all__ = ["Ranks", "is_launched", "join"]

_LAUNCHERS = {"RANK", "WORLD_SIZE", "MASTER_ADDR"}  # what torchrun sets, and what joining needs


@dataclass(frozen=True)
class Ranks:
    """The ranks that train one model, or a process of its own."""

    mode: str | None = None
    """"ddp", "fsdp", or None for a process of its own."""
    rank: int = 0
    count: int = 1

    def gather(self, mine: Any) -> list[Any]:
        """Return what every rank has, in rank order."""
        everyone = [mine] * self.count
        if self.mode is not None:
            dist.all_gather_object(everyone, mine)
        return everyone

    def together(self, action: Callable[[], Any]) -> Any:
        """Return what the action comes to on this rank, or raise on all what it raised on one."""
        value = error = None
        try:
            value = action()
        except (OSError, RuntimeError, ValueError) as raised:
            error = raised
        for raised_there in self.gather(error):
            if raised_there is not None:
                raise raised_there
        return value

    def first(self, action: Callable[[], Any]) -> Any:
        """Return on all ranks what the action comes to on the first one."""
        return self.gather(self.together(lambda: action() if self.rank == 0 else None))[0]

    def sum(self, values: list[torch.Tensor]) -> torch.Tensor:
        """Return the sums over all ranks of scalars on one device, in one float64 tensor."""
        packed = torch.stack([value.double() for value in values])
        if self.mode is not None:
            dist.all_reduce(packed)
        return packed

    def shard(self, model: nn.Module, device: torch.device) -> None:
        """Shard a model with FSDP2, if that is the mode and the user has not done it.

        The first rank's parameters and buffers become everybody's, as with DDP. The units are the
        children of the outermost ModuleLists, which are a model's repeated blocks, and the rest.
        """
        if self.mode != "fsdp":
            return
        from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - and DTensor
        from torch.distributed.fsdp import FSDPModule, fully_shard  # noqa: PLC0415
        from torch.distributed.utils import _sync_module_states  # noqa: PLC0415

        if any(isinstance(module, FSDPModule) for module in model.modules()):
            return
        _sync_module_states(model, dist.group.WORLD, 1 << 28, 0, ())  # type: ignore[arg-type]
        mesh = init_device_mesh(device.type, (self.count,))
        for module in [*_blocks(model), model]:
            fully_shard(module, mesh=mesh)

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return what is called in training: DDP around the model, if that is the mode."""
        if self.mode != "ddp":
            return model
        device_ids = [device] if device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=device_ids)


def is_launched() -> bool:
    """Say whether there are ranks: torchrun has started them, or they have found each other."""
    if not dist.is_available():
        return False
    return dist.is_initialized() or os.environ.keys() >= _LAUNCHERS


@contextmanager
def join(config: TrainConfig) -> Iterator[Ranks]:
    """Join the other ranks, if there are any; a process group that this makes is left again.

    Raises:
        ValueError: the config wants ranks and there are none.
    """
    if not is_launched():
        if config.parallel is not None:
            expected = "expected None where neither torchrun nor torch.distributed has made ranks"
            msg = f"parallel: {expected}, got {config.parallel!r}"
            raise ValueError(msg)
        yield Ranks()
        return
    device, makes_group = config.chosen_device, not dist.is_initialized()
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    if makes_group:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(config.parallel or "ddp", dist.get_rank(), dist.get_world_size())
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # which hold what is to go
        raise
    finally:
        gc.collect()  # DDP's hooks on the model, and threads that torch must not end with
        if makes_group:
            dist.destroy_process_group()


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not isinstance(child, nn.ModuleList):
            yield from _blocks(child)
        else:
            yield from (block for block in child if type(block).forward is not nn.Module.forward)
