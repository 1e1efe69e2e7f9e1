"""The part of a dataset that one rank loads: DistributedSampler's, from any sample on."""

import copy
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler, IterableDataset
from typing_extensions import Self

_CHUNK = 1 << 16  # indices made at a time, for datasets that are longer than memory


class ShardSampler(DistributedSampler[Any]):
    """Yields what DistributedSampler yields, or what is left of it when it is shared out anew.

    All ranks together go through one order of the dataset, a permutation seeded with `seed + epoch`
    or the rows in sequence: sample i is that of rank `i % world_size`. From `consumed` samples of
    this order on, the rest is shared out in the same way, padded with the order's first samples, or
    cut, so that each rank has as many.
    """

    consumed = 0
    """Samples of the epoch's order that all ranks have had before."""

    def at(self, epoch: int, consumed: int) -> Self:
        """Return the sampler of a place in an epoch."""
        placed = copy.copy(self)
        placed.epoch, placed.consumed = epoch, consumed
        return placed

    def chunks(self, start: int = 0, size: int = 1) -> Iterator[Tensor]:
        """Yield the indices from `start` on, many batches of a size at a time."""
        length, ranks = len(self.dataset), self.num_replicas  # type: ignore[arg-type]
        left = length - self.consumed
        count = left // ranks if self.drop_last else -(-left // ranks)
        first = self.consumed + self.rank
        order = None
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(length, generator=generator, device="cpu")
        for places in strides(first + start * ranks, first + count * ranks, ranks, size):
            wrapped = places.remainder_(length)  # the padding is the order's beginning
            yield wrapped if order is None else order[wrapped]

    def __iter__(self) -> Iterator[int]:
        for chunk in self.chunks():
            yield from chunk.tolist()


def strides(start: int, stop: int, step: int, size: int) -> Iterator[Tensor]:
    """Yield the numbers of a range as int64 tensors, each of whole batches but the last."""
    span = step * size * max(1, _CHUNK // size)
    for begin in range(start, stop, span):
        yield torch.arange(begin, min(stop, begin + span), step, device="cpu")


def check_shardable(dataset: Any, **samplers: Any) -> None:
    """Refuse an iterable dataset, and samplers of the user's."""
    if isinstance(dataset, IterableDataset):
        name = type(dataset).__name__
        msg = f"dataset: {name} is iterable: it has no indices to share out among ranks"
        raise TypeError(msg)
    for name, sampler in samplers.items():
        if sampler is not None:
            msg = f"{name}: expected None for a sharded loader, which makes its own"
            raise ValueError(msg)


def find_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the number of ranks and this one: those given, torch.distributed's, or 1 and 0."""
    if (rank is None) != (world_size is None):
        missing, given = ("rank", "world_size") if rank is None else ("world_size", "rank")
        msg = f"{missing}: expected together with {given}, got None"
        raise ValueError(msg)
    if rank is not None and world_size is not None:
        if rank >= world_size:
            msg = f"rank: expected less than world_size={world_size}, got {rank}"
            raise ValueError(msg)
        return world_size, rank
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched != "1":
        msg = (
            f"shard=True with WORLD_SIZE={launched}: call torch.distributed.init_process_group "
            "before, or give rank and world_size"
        )
        raise RuntimeError(msg)
    return 1, 0
