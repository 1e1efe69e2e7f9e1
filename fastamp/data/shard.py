"""The part of a dataset that one rank loads: DistributedSampler's, from any sample on."""

import copy
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler, IterableDataset
from typing_extensions import Self

from fastamp.data.sample_rng import Order
from fastamp.data.shuffle import make_order, ranges


class ShardSampler(DistributedSampler[Any]):
    """Yields what DistributedSampler yields, or the rest of an epoch, shared out anew.

    All ranks share one order of the dataset, a permutation seeded with `seed + epoch` or the rows
    in sequence: sample i belongs to rank `i % world_size`. The samples after the first `consumed`
    ones are shared out in the same way, padded with the order's first samples, or cut, so that each
    rank has as many. The permutation of a long dataset is computed, not torch's.
    """

    consumed = 0
    """Samples of the epoch's order that all ranks together have had before."""

    def __len__(self) -> int:
        return self._count(0)

    def _count(self, consumed: int) -> int:
        """Return how many samples this rank has after the first `consumed` of all ranks."""
        rounds, rest = divmod(len(self.dataset) - consumed, self.num_replicas)  # type: ignore[arg-type]
        return rounds + (rest > 0 and not self.drop_last)

    def at(self, epoch: int, consumed: int) -> Self:
        """Return the sampler of an epoch's samples after the first `consumed` ones."""
        placed = copy.copy(self)
        placed.epoch, placed.consumed = epoch, consumed
        return placed

    def order(self, key: int) -> Order:
        """Return the places of this rank's samples in the epoch, with the key of a pass."""
        return Order(key, self.consumed + self.rank, self.num_replicas - 1)

    def chunks(self, start: int = 0, size: int = 1) -> Iterator[Tensor]:
        """Yield the indices from `start` on, many batches of a size at a time."""
        length, count = len(self.dataset), self._count(self.consumed)  # type: ignore[arg-type]
        order = make_order(self.dataset, self.seed + self.epoch) if self.shuffle else None
        mine = self.order(0)
        for own in ranges(start, count, size):
            wrapped = mine.places(own).remainder_(length)  # the padding is the order's beginning
            yield wrapped if order is None else order[wrapped]

    def __iter__(self) -> Iterator[int]:
        for chunk in self.chunks():
            yield from chunk.tolist()


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
            "first, or give rank and world_size"
        )
        raise RuntimeError(msg)
    return 1, 0
