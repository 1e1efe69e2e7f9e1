"""Checkpoints of several ranks: a folder each, written and read by all of them."""

from __future__ import annotations

import zlib
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fastamp.train.checkpoint import CheckpointError, Checkpoints, read_file, write_file

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from fastamp.train.ranks import Ranks

__all__ = ["ShardedCheckpoints"]

_RUN = "run.pt"  # all but the tensors of model and optimizer, and the checksums of their files
_CHUNK_NBYTES = 1 << 22


class ShardedCheckpoints(Checkpoints):
    """The checkpoints of one run, `step-00000123` and the like: folders that all ranks can reach.

    Each rank writes its part of model and optimizer, by `torch.distributed.checkpoint`; any number
    of ranks reads them. What fails on one rank is raised on all.
    """

    suffix = ""

    def __init__(
        self, folder: str | os.PathLike[str], *, keep: int, resume: bool, ranks: Ranks
    ) -> None:
        self._ranks = ranks
        super().__init__(folder, keep=keep, resume=resume)

    def restore(self, state: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
        """Bring the model and the optimizer to what `load` returned."""
        named, kept = model.state_dict(), state["optimizer"]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, entries in kept["state"].items():
            for key, like in entries.items():
                if isinstance(like, torch.Tensor):  # on the device "meta"
                    whole = like.shape == parameters[index].shape
                    source = parameters[index] if whole else like.new_empty((), device="cpu")
                    entries[key] = source.new_empty(like.shape, dtype=like.dtype)
        load(_tensors(named, kept), checkpoint_id=self._mine[-1])
        optimizer.load_state_dict(kept)
        others = {n: v for n, v in state["model"].items() if not isinstance(v, torch.Tensor)}
        model.load_state_dict(named | others)

    def _prepare(self) -> list[Path]:
        found: list[Path] = self._ranks.first(super()._prepare)
        return found

    def _write(
        self, part: Path, state: dict[str, Any], model: nn.Module, optimizer: Optimizer
    ) -> None:
        named, kept = model.state_dict(), optimizer.state_dict()
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)  # rank 0 has the buffers
        try:
            save(_tensors(named, kept), checkpoint_id=part, planner=planner)
        except CheckpointException as error:  # which all ranks get
            raise next(iter(error.failures.values()))[0] from error
        sums = self._ranks.together(lambda: _sum_files(part, self._ranks.rank))
        files = {name: value for sums in self._ranks.gather(sums) for name, value in sums.items()}
        likes = {index: _likes(entries) for index, entries in kept["state"].items()}
        rest = {"model": _likes(named), "optimizer": kept | {"state": likes}, "files": files}
        self._ranks.first(lambda: write_file(part / _RUN, state | rest))

    def _publish(self, part: Path, path: Path) -> None:
        self._ranks.first(partial(super()._publish, part, path))

    def _read(self, path: Path, problem: Callable[[dict[str, Any]], str | None]) -> dict[str, Any]:
        state: dict[str, Any] = self._ranks.together(lambda: self._read_part(path, problem))
        return state

    def _read_part(
        self, path: Path, problem: Callable[[dict[str, Any]], str | None]
    ) -> dict[str, Any]:
        """Return the state in a checkpoint, and check this rank's share of its files."""
        if path.is_file():
            msg = f"{path}: was written by a process of its own, not by ranks"
            raise CheckpointError(msg)
        state = read_file(path / _RUN, problem)
        files = sorted(state["files"].items())
        for name, expected in files[self._ranks.rank :: self._ranks.count]:
            if not (path / name).is_file() or _checksum(path / name) != expected:
                msg = f"{path}: is damaged in {name}"
                raise CheckpointError(msg)
        return state


def _tensors(named: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a model's and an optimizer's state, by names."""
    held = {f"model.{name}": value for name, value in named.items()}
    for index, entries in optimizer["state"].items():
        held |= {f"optimizer.{index}.{key}": value for key, value in entries.items()}
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def _likes(entries: dict[str, Any]) -> dict[str, Any]:
    """Return entries with tensors that tell shape and dtype alone."""
    tensors = {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}
    return entries | {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta")
        for name, value in tensors.items()
    }


def _sum_files(folder: Path, rank: int) -> dict[str, int]:
    """Return the checksums of the files that a rank has written."""
    mine = [*folder.glob(f"__{rank}_*"), *([folder / ".metadata"] if rank == 0 else [])]
    return {path.name: _checksum(path) for path in mine}


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_NBYTES):
            value = zlib.crc32(chunk, value)
    return value
