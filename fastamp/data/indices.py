"""The indices of a pass from a position on, as a sampler or in tensors."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from operator import itemgetter
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from fastamp.data.position import Position
from fastamp.data.sample_rng import Order, Placed, draw_seed, find_pass_key
from fastamp.data.shard import ShardSampler
from fastamp.data.shuffle import FeistelSampler, ranges
from fastamp.data.states import Skip

_Begin: TypeAlias = Callable[[Iterable[Any], int], Iterator[tuple[Any, int]]]
_COMPUTED = (SequentialSampler, FeistelSampler)  # begin anywhere, without the indices before
_LAZY = (BatchSampler, RandomSampler, ShardSampler, *_COMPUTED)
"""Samplers whose `__iter__` draws nothing before the first index is asked for."""
_DRAWN = 4096  # indices drawn at once, with replacement
_SPLIT = 256  # batches split off a chunk of indices at once
_BOOLEANS = (bool, np.dtype(bool), torch.bool)


def find_samplers(loader: Any) -> list[Any]:
    """Return the samplers of any loader, also those inside of other samplers."""
    own = getattr(loader, "batch_sampler", None)
    outer = getattr(loader, "_batches", own)
    batches = getattr(outer, "batch_sampler", outer)  # in Accelerate's
    found = (batches, getattr(batches, "sampler", None), getattr(loader, "sampler", None), own)
    return [*{id(sampler): sampler for sampler in found if sampler is not None}.values()]


def find_generator(loader: Any) -> torch.Generator | None:
    """Return what the sampler of a loader draws from; None for torch's default generator.

    What a sampler of the user's calls its generator may be NumPy's or Python's.
    """
    found = (getattr(sampler, "generator", None) for sampler in find_samplers(loader))
    return next((one for one in found if isinstance(one, torch.Generator)), None)


@dataclass(eq=False)
class Indices:
    """What a sampler yields in one epoch, from a position on, as a sampler itself."""

    sampler: Any
    """What yields batches of indices, or single ones where the loader does not batch."""
    generator: torch.Generator | None
    """What the sampler draws from, None for torch's default generator."""
    seed: int | None
    """The generator is seeded with seed + epoch at each epoch; None does not seed it."""
    position: Position
    """Where to begin. If it has no state of the generator, that state is stored in it."""
    skips: int = 0
    """Turns of workers to skip, before the worker whose turn it is."""
    single: bool = False
    """Whether the sampler yields single indices."""
    plain: bool = False
    """Whether samples get no places, as for data pipes of torch's."""

    _drew_at: Position | None = None  # where the sampler's `__iter__` drew, before the first index

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        """Yield what the sampler yields, with the place of the first sample."""
        numbered = self._from_position(_number_single if self.single else _number_batches)
        if self.plain:
            return chain([Skip()] * self.skips, map(itemgetter(0), numbered))
        order = self.order
        placed = (Placed(indices, order, number) for indices, number in numbered)
        return chain([Skip()] * self.skips, placed)

    def batches(self) -> Iterator[Any]:
        """Yield batches as int64 tensors, or as lists where they are not plain integers.

        In place of one that cannot be iterated it yields the error.
        """
        return map(itemgetter(0), self._from_position(_index_batches))

    def placed_batches(self) -> Iterator[tuple[Any, Tensor]]:
        """Yield such batches with the places of their samples, as int64 tensors."""
        order = self.order
        return (
            (indices, order.places(torch.arange(number, number + _count(indices), device="cpu")))
            for indices, number in self._from_position(_index_batches)
        )

    @property
    def num_left(self) -> float:
        """How many full batches are left, after which torch's RandomSampler draws once more.

        It does so for the program to see if it draws from a generator of the program's own.
        """
        batches = self.sampler
        sampler = batches.sampler if type(batches) is BatchSampler else None
        if type(sampler) is not RandomSampler or not sampler.generator or self.seed is not None:
            return math.inf
        num_full: int = sampler.num_samples // batches.batch_size
        return num_full - self.position.batch

    @property
    def order(self) -> Order:
        """The keys of the pass's samples, by the position's seed."""
        position = self.position
        key = find_pass_key(position.sample_seed or 0, position.epoch)
        samplers = (self.sampler, getattr(self.sampler, "sampler", None))
        for sampler in samplers:
            if isinstance(sampler, ShardSampler):
                return sampler.at(position.epoch, position.consumed).order(key)
            if isinstance(sampler, DistributedSampler):
                return Order(key, sampler.rank, sampler.num_replicas - 1)
        return Order(key)

    def _from_position(self, begin: _Begin) -> Iterator[tuple[Any, int]]:
        """Begin a sampler at once, as torch's iterators do, and read it later."""
        position, sampler = self.position, self.sampler
        known = position.resumed or position.begun
        known = known or (position.rng is not None and self._drew_at is not position)
        if known or self.seed is not None or type(sampler) in _LAZY:
            return self._read(begin, sampler)
        source = torch.default_generator if self.generator is None else self.generator
        state = source.get_state()
        sampler = iter(sampler)
        if state.equal(source.get_state()):
            return self._read(begin, sampler)
        position.rng, self._drew_at = state, position
        return self._rest(begin, sampler)

    def _read(self, begin: _Begin, sampler: Any) -> Iterator[tuple[Any, int]]:
        """Read a sampler that has drawn nothing, with the generator's state at the position."""
        position, generator = self.position, self.generator
        placed = _place_shard(sampler, position)
        if placed is not None:
            yield from self._rest(begin, placed)
            return
        drawn = position.rng
        if generator is None and drawn is not None and not drawn.equal(torch.get_rng_state()):
            # The program's own draws go on as if nothing had been drawn here.
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(drawn)
                rest = self._rest(begin, sampler)
                first = list(islice(rest, 1))
            yield from chain(first, rest)
            return
        source = torch.default_generator if generator is None else generator
        if self.seed is not None:
            source.manual_seed(self.seed + position.epoch)
        elif position.rng is not None:
            source.set_state(position.rng)
        else:
            position.rng = source.get_state()
        yield from self._rest(begin, sampler)

    def _rest(self, begin: _Begin, sampler: Iterable[Any]) -> Iterator[tuple[Any, int]]:
        """Skip the delivered batches: the first ones, except those that were late."""
        late, delivered = self.position.late, self.position.batch
        if not late:
            return begin(sampler, delivered)
        passed, first = delivered + len(late), late[0]
        places = enumerate(begin(sampler, first), first)
        return (batch for place, batch in places if place >= passed or place in late)


def _place_shard(sampler: Any, position: Position) -> Iterable[Any] | None:
    """Return a rank's sampler, of samples or batches, for the rest of the epoch; None without."""
    if isinstance(sampler, ShardSampler):
        return sampler.at(position.epoch, position.consumed)
    inner = sampler.sampler if type(sampler) is BatchSampler else None
    if not isinstance(inner, ShardSampler):
        return None
    placed = inner.at(position.epoch, position.consumed)
    return BatchSampler(placed, sampler.batch_size, sampler.drop_last)


def _number_single(sampler: Any, skip: int) -> Iterator[tuple[Any, int]]:
    """Yield single indices, each with its number in the epoch."""
    if type(sampler) not in _COMPUTED:
        return zip(islice(iter(sampler), skip, None), count(skip))
    chunks = _chunks(sampler, skip, 1) or ()
    return zip(chain.from_iterable(chunk.tolist() for chunk in chunks), count(skip))


def _number_batches(sampler: Any, skip: int) -> Iterator[tuple[Any, int]]:
    """Yield batches, each with the number of its first sample in the epoch."""
    if type(sampler) is BatchSampler and type(sampler.sampler) in _COMPUTED:
        for rows, number in _index_batches(sampler, skip):
            yield rows.tolist(), number
        return
    number = 0
    for place, batch in enumerate(iter(sampler)):
        if place >= skip:
            yield batch, number
        number += _count(batch)


def _count(batch: Any) -> int:
    return len(batch) if hasattr(batch, "__len__") else 1


def _index_batches(sampler: Any, skip: int) -> Iterator[tuple[Any, int]]:
    """Yield such batches as int64 tensors; as lists where they are not plain integers."""
    chunks, number = None, 0
    if type(sampler) is BatchSampler:
        number = skip * sampler.batch_size
        chunks = _chunks(sampler.sampler, number, sampler.batch_size)
    if chunks is None:
        for batch, number in _number_batches(sampler, skip):
            yield _to_rows(batch), number
        return
    for chunk in chunks:
        rest = len(chunk) % sampler.batch_size if sampler.drop_last else 0
        # Some batches at a time: a pass may be left after the first one.
        for part in range(0, len(chunk) - rest, _SPLIT * sampler.batch_size):
            end = min(len(chunk) - rest, part + _SPLIT * sampler.batch_size)
            for batch in torch.split(chunk[part:end], sampler.batch_size):
                if len(batch) < sampler.batch_size and type(sampler.sampler) is RandomSampler:
                    next(chunks, None)  # torch's batch sampler reaches the end for a short batch
                yield batch, number
                number += sampler.batch_size


def _to_rows(batch: Iterable[Any]) -> Any:
    try:
        batch = list(batch)
    except Exception as error:  # noqa: BLE001 - raised where the batch would come
        return error
    rows = as_rows(batch)
    return batch if rows is None else rows


def as_rows(indices: Any) -> Tensor | None:
    """Return integers as an int64 tensor; None if anything else, such as a bool, is among them."""
    if isinstance(indices, list | tuple) and set(map(type, indices)) != {int}:
        dtypes = [getattr(index, "dtype", type(index)) for index in indices]
        if any(dtype in _BOOLEANS for dtype in dtypes):  # NumPy would convert them to 0 and 1
            return None
    try:
        rows = np.asarray(indices)
    except (TypeError, ValueError, RuntimeError):
        return None
    if rows.ndim != 1 or rows.dtype.kind not in "iu" or rows.dtype == np.uint64:
        return None
    return torch.from_numpy(rows.astype(np.int64))


def _chunks(sampler: Any, start: int, size: int) -> Iterator[Tensor] | None:
    """Return the indices of torch's samplers and ours, many batches at a time; None of others."""
    if type(sampler) is SequentialSampler:
        return ranges(start, len(sampler), size)
    if isinstance(sampler, ShardSampler | FeistelSampler):
        return sampler.chunks(start, size)
    if type(sampler) is not RandomSampler:
        return None
    if sampler.replacement:
        return _with_replacement(sampler, start, size)
    return _permutation(sampler, start) if sampler.num_samples <= len(sampler.data_source) else None


def _generator_of(sampler: RandomSampler) -> torch.Generator:
    """Return what RandomSampler draws from: without one of its own, a new one in each epoch."""
    if sampler.generator is not None:
        return cast("torch.Generator", sampler.generator)
    return torch.Generator().manual_seed(draw_seed())


def _with_replacement(sampler: RandomSampler, start: int, size: int) -> Iterator[Tensor]:
    """Draw as RandomSampler does, which draws 32 at a time, but many batches at once."""
    total, generator = len(sampler.data_source), _generator_of(sampler)
    block = math.lcm(32, size)
    block *= max(1, _DRAWN // block)
    for begin in range(0, sampler.num_samples, block):
        count = min(block, sampler.num_samples - begin)
        rows = torch.randint(total, (count,), generator=generator, device="cpu")
        if begin + count > start:
            yield rows[max(0, start - begin) :]


def _permutation(sampler: RandomSampler, start: int) -> Iterator[Tensor]:
    """Draw as RandomSampler does, which after a whole epoch draws one more, unused permutation."""
    total, generator = len(sampler.data_source), _generator_of(sampler)
    yield torch.randperm(total, generator=generator, device="cpu")[start : sampler.num_samples]
    if sampler.num_samples == total and sampler.generator is not None:
        torch.randperm(total, generator=generator, device="cpu")
