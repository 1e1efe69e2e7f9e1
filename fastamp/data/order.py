"""Which rows the batches of a pass hold, from any batch on, on any rank."""

import copy
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fastamp.data.checks import as_integer
from fastamp.data.position import Position
from fastamp.data.sample_rng import Order, draw_seed, find_pass_key, generators_kept

Job: TypeAlias = tuple[Any, Order, int]
"""A batch's rows, the keys of the pass, and the number of the batch's first sample."""
_DRAWING = (RandomSampler, WeightedRandomSampler, SubsetRandomSampler)
_CUT_BATCHES = 64


class SeededSampler(RandomSampler):
    """The shuffled order of a whole dataset by a seed: each pass is that of the next epoch."""

    def __init__(self, data_source: Any, seed: int) -> None:
        super().__init__(data_source)
        self.seed, self.epoch, self._passes = seed, 0, 0
        self.told: int | None = None
        """The epoch of a call of `set_epoch` that the loader has not followed yet."""

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be that of an epoch."""
        self.place(epoch)
        self.told = epoch

    def place(self, epoch: int) -> None:
        """Follow a loader, whose next pass is that of an epoch; its copies share the sampler."""
        self.epoch, self._passes = epoch, 0

    def __iter__(self) -> Iterator[int]:
        seed = self.seed + self.epoch + self._passes
        self._passes += 1
        return iter(_permute(len(self.data_source), seeded(seed)).tolist())


class Share(NamedTuple):
    """One rank's part of a dataset: as DistributedSampler's, sample i is of rank `i % ranks`."""

    rank: int
    ranks: int

    def size(self, length: int, consumed: int, *, drop_last: bool) -> int:
        """Return how many samples a rank has after the first `consumed` of all ranks."""
        rounds, rest = divmod(length - consumed, self.ranks)
        return rounds + (rest > 0 and not drop_last)

    def take(self, rows: Any, consumed: int, *, drop_last: bool) -> Any:
        """Return this rank's rows; those of the order's beginning pad the last round."""
        count = self.size(len(rows), consumed, drop_last=drop_last)
        places = torch.arange(count, device="cpu") * self.ranks + (consumed + self.rank)
        places = places % max(len(rows), 1)
        return places if isinstance(rows, range) else rows[places]


def find_share(rank: int | None, world_size: int | None) -> Share:
    """Return this rank's share: the one given, torch.distributed's, or all."""
    rank = as_integer("rank", rank, least=0)
    world_size = as_integer("world_size", world_size, least=1)
    if (rank is None) != (world_size is None) or (rank or 0) >= (world_size or 1):
        msg = f"rank, world_size: expected a rank below world_size, got {rank} and {world_size}"
        raise ValueError(msg)
    if rank is not None:
        return Share(rank, world_size)
    if dist.is_available() and dist.is_initialized():
        return Share(dist.get_rank(), dist.get_world_size())
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched != "1":
        msg = f"shard=True with WORLD_SIZE={launched}: call torch.distributed.init_process_group "
        raise RuntimeError(msg + "first, or give rank and world_size")
    return Share(0, 1)


def find_samplers(loader: Any) -> list[Any]:
    """Return the samplers of any loader, also those inside of other samplers."""
    own = getattr(loader, "batch_sampler", None)
    outer = getattr(loader, "sampler", None) if own is None else own
    batches = getattr(outer, "batch_sampler", outer)  # in Accelerate's
    found = (batches, getattr(batches, "sampler", None), getattr(loader, "sampler", None), own)
    return [*{id(sampler): sampler for sampler in found if sampler is not None}.values()]


def find_generator(samplers: Iterable[Any]) -> torch.Generator | None:
    """Return what samplers draw from; None for torch's default generator.

    What a sampler of the user's calls its generator may be NumPy's or Python's.
    """
    for sampler in samplers:
        found = getattr(sampler, "generator", None)
        if found is not None and isinstance(found, torch.Generator):
            return found
    return None


class Plan(NamedTuple):
    """How a loader orders its batches; `begin` yields those of a pass."""

    sampler: Any
    """What yields batches of indices, or single ones where the loader does not batch."""
    single: bool
    seed: int | None
    """Of the order; None draws one for each pass."""
    share: Share | None
    source: torch.Generator | None
    """What the sampler or the loader draws from; None for torch's default generator."""

    def begin(self, position: Position, draw_base: Callable[[bool], object]) -> Iterator[Job]:
        """Draw what torch's iterators draw at the start, in their order, and return the batches.

        Rows are an int64 tensor or a range where the order is computed; else what the sampler
        yields. `draw_base` draws the seed of workers; True lets the program's generators be.
        """
        size, drop_last, rows = 1, False, self.sampler
        if not self.single and type(rows) is BatchSampler:
            size, drop_last, rows = rows.batch_size, rows.drop_last, rows.sampler
        if not _is_computed(rows) or (rows is self.sampler and not self.single):
            return self._read(position, draw_base)
        draw_base(position.sample_seed is not None)
        order = self._compute(rows, position)
        if self.share is not None:
            order = self.share.take(order, position.consumed, drop_last=drop_last)
        count = len(order) if isinstance(order, range) else order.numel()
        stop = count // size * size if drop_last else count
        begins = range(position.batch * size, stop, size)
        return self._cut(order, begins, self._order(position))

    def _compute(self, sampler: Any, position: Position) -> Any:
        """Return all rows in order."""
        if self.source is not None:
            if position.generator is None:
                position.generator = self.source.get_state()
            self.source.set_state(position.generator)
        length = len(sampler.data_source)
        if not isinstance(sampler, RandomSampler):
            return range(length)
        generator = sampler.generator
        if generator is None:
            if self.seed is None and position.order is None:
                position.order = draw_seed()
            seed = position.order if self.seed is None else self.seed + position.epoch
            generator = seeded(seed or 0)
        rows = _permute(length, generator)
        if sampler.num_samples < length:
            return rows[: sampler.num_samples]
        if generator is sampler.generator:
            _permute(length, generator)  # torch draws one more, and uses nothing of it
        return rows

    def _cut(self, rows: Any, begins: range, order: Order) -> Iterator[Job]:
        """Yield the batches of a computed order; a tensor is cut faster into many at once."""
        size, single, number = begins.step, self.single, begins.start
        at_once = size if isinstance(rows, range) else _CUT_BATCHES * size
        for begin in range(begins.start, begins.stop, at_once):
            some = rows[begin : min(begin + at_once, begins.stop)]
            for batch in (some,) if at_once == size else some.unsafe_split(size):
                yield int(batch[0]) if single else batch, order, number
                number += size

    def _order(self, position: Position) -> Order:
        """Return the keys of the pass's samples."""
        key = find_pass_key(position.sample_seed or 0, position.epoch)
        if self.share is not None:
            return Order(key, position.consumed + self.share.rank, self.share.ranks - 1)
        for sampler in (self.sampler, getattr(self.sampler, "sampler", None)):
            if isinstance(sampler, DistributedSampler):
                return Order(key, sampler.rank, sampler.num_replicas - 1)
        return Order(key)

    def _read(self, position: Position, draw_base: Callable[[bool], object]) -> Iterator[Job]:
        """Begin a sampler that is no plain one of torch's, and yield its batches."""
        sampler, resumed = self.sampler, position.generator is not None
        if self.seed is not None:
            sampler = _with_generator(sampler, seeded(self.seed + position.epoch))
        # The loader's own generator draws the seed of workers alone.
        own = find_generator([sampler, *find_samplers(sampler)])
        source = torch.default_generator if own is None else own
        with generators_kept() if resumed else nullcontext():
            if position.generator is None:
                position.generator = source.get_state()
            source.set_state(position.generator)
            iterator = iter(sampler)
            draw_base(False)
            begun = partial(source.set_state, source.get_state())
        return self._place(iterator, self._order(position), position.batch, begun)

    def _place(
        self, iterator: Iterator[Any], order: Order, skipped: int, begun: Callable[[], object]
    ) -> Iterator[Job]:
        """Yield the batches of a sampler that has begun, after those that were delivered.

        Those are drawn again when the first one is asked for: until then a program may call the
        sampler's `set_epoch`, as Lightning does.
        """
        number = 0
        if skipped:
            with generators_kept():
                begun()
                number = sum(map(self._count, islice(iterator, skipped)))
        for batch in iterator:
            first, number = number, number + self._count(batch)
            if isinstance(batch, list | np.ndarray):  # which may be the same object again
                batch = batch.copy()  # noqa: PLW2901
            elif isinstance(batch, Tensor):
                batch = batch.tolist() if batch.ndim else batch.clone()  # noqa: PLW2901
            yield batch, order, first

    def _count(self, batch: Any) -> int:
        return len(batch) if not self.single and hasattr(batch, "__len__") else 1


def _is_computed(sampler: Any) -> bool:
    """Say whether a sampler's order is known at once: as the rows lie, or one permutation."""
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return type(sampler) in (SequentialSampler, SeededSampler)


def _with_generator(sampler: Any, generator: torch.Generator) -> Any:
    """Return samplers of torch's that have no generator with this one; any other as it is."""
    if type(sampler) is BatchSampler:
        sampler = copy.copy(sampler)
        sampler.sampler = _with_generator(sampler.sampler, generator)
    elif type(sampler) in _DRAWING and sampler.generator is None:
        sampler = copy.copy(sampler)
        sampler.generator = generator
    return sampler


def seeded(seed: int) -> torch.Generator:
    """Return a generator that begins at a seed."""
    return torch.Generator().manual_seed(seed)


def _permute(length: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(length, generator=generator, device="cpu")


def as_rows(indices: Any) -> Tensor | None:
    """Return integers as an int64 tensor; None if anything else, such as a bool, is among them."""
    if isinstance(indices, range) and len(indices):
        return torch.arange(indices.start, indices.stop, indices.step, device="cpu")
    if isinstance(indices, list | tuple):
        kinds = {*map(type, indices)}
        if bool in kinds or not all(issubclass(kind, Integral) for kind in kinds):
            return None
    elif isinstance(indices, Tensor):
        return indices.to("cpu") if len(indices) and indices.dtype == torch.int64 else None
    elif not isinstance(indices, np.ndarray):
        return None
    rows = np.asarray(indices)
    if rows.ndim != 1 or rows.dtype.kind not in "iu" or rows.dtype == np.uint64:
        return None
    return torch.from_numpy(rows.astype(np.int64))
