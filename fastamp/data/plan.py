"""The plan of a pass: its batches of indices, from any batch on."""

import copy
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fastamp.data.position import Position, find_save
from fastamp.data.sample_rng import Order, Placed, draw_seed, find_pass_key, generators_kept
from fastamp.data.shard import ShardSampler
from fastamp.data.shuffle import FeistelSampler, ranges

_OURS = (ShardSampler, FeistelSampler)  # begin anywhere, without the indices before
_WHOLE = (WeightedRandomSampler, SubsetRandomSampler, DistributedSampler)
"""Samplers of torch that make the whole order when their first index is asked for."""
_COMPUTED = (SequentialSampler, RandomSampler, *_OURS, *_WHOLE)
_DRAWING = (RandomSampler, WeightedRandomSampler, SubsetRandomSampler)
_DRAWN = 4096  # indices drawn at once, with replacement
_FIRST_SPLIT, _SPLIT = 4, 256  # batches split off at once: a pass may be left after the first one
_BOOLEANS = (bool, np.dtype(bool), torch.bool)


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
    found = (getattr(sampler, "generator", None) for sampler in samplers)
    return next((one for one in found if isinstance(one, torch.Generator)), None)


@dataclass(eq=False)
class Plan:
    """The batches of one pass, each with the number of its first sample, from a position on.

    The order of torch's own samplers, and of ours, is computed many batches at a time. Any other
    sampler is read one batch at a time, when its batch is asked for.
    """

    sampler: Any
    """What yields batches of indices, or single ones where the loader does not batch."""
    generator: torch.Generator | None
    """What the sampler draws from, None for torch's default generator."""
    seed: int | None
    """The generator is seeded with seed + epoch at each epoch; None does not seed it."""
    position: Position
    """Where to begin. The state of the generator before the sampler's draws is noted in it."""
    single: bool = False
    """Whether the sampler yields single indices."""
    states: deque[Any] = field(default_factory=deque)
    """The state of a sampler that has one, after each batch that it has yielded."""

    def __post_init__(self) -> None:
        self.move_to(self.position)

    def move_to(self, position: Position) -> None:
        """Let the next pass begin at a position."""
        self.position, self._resumed, self._noted = position, position.batch > 0, position.rng

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches as a sampler does, for torch's iterators."""
        order, batches = self.order, self.begin()
        return (Placed(rows, order, number) for rows, number in batches)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: torchdata's loader need not skip what the position has passed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""

    def begin(self) -> Iterator[tuple[Any, int]]:
        """Yield each batch of indices as a list, or as what else the sampler yields."""
        if self.is_computed:
            return self._compute(lists=True)
        return self._read()

    def begin_rows(self) -> Iterator[tuple[Any, int]]:
        """Yield batches as int64 tensors; as lists where they are not plain integers.

        In place of one that cannot be iterated comes the error.
        """
        if self.is_computed:
            return self._compute(lists=False)
        return ((_to_rows(batch), number) for batch, number in self._read())

    @property
    def is_computed(self) -> bool:
        """Whether the order is computed; else the sampler's own code runs for each batch."""
        if self.single:
            return _is_computed(self.sampler)
        return type(self.sampler) is BatchSampler and _is_computed(self.sampler.sampler)

    @property
    def num_full(self) -> float:
        """How many full batches are left, after which torch's RandomSampler draws once more.

        The program sees that draw if it comes from a generator of the program's own.
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
        for sampler in (self.sampler, getattr(self.sampler, "sampler", None)):
            if isinstance(sampler, ShardSampler):
                return sampler.at(position.epoch, position.consumed).order(key)
            if isinstance(sampler, DistributedSampler):
                return Order(key, sampler.rank, sampler.num_replicas - 1)
        return Order(key)

    @property
    def _source(self) -> torch.Generator:
        return torch.default_generator if self.generator is None else self.generator

    def _compute(self, *, lists: bool) -> Iterator[tuple[Any, int]]:
        """Yield the batches of a computed order. Its draws come with the first one, as torch's."""
        position, sampler, size, drop_last = self.position, self.sampler, 1, False
        if not self.single:
            size, drop_last, sampler = sampler.batch_size, sampler.drop_last, sampler.sampler
        if isinstance(sampler, ShardSampler):
            sampler = sampler.at(position.epoch, position.consumed)
        number = position.batch * size
        chunks = _chunks(sampler, number, size)
        with self._from_noted_state() if type(sampler) in _DRAWING else nullcontext():
            first = next(chunks, None)
        for chunk in chain(() if first is None else (first,), chunks):
            rest = len(chunk) % size if drop_last else 0
            begin, end, count = 0, len(chunk) - rest, _FIRST_SPLIT
            while begin < end:
                part = chunk[begin : min(end, begin + count * size)]
                begin, count = begin + count * size, _SPLIT
                for batch in _split(part, size, lists=lists):
                    if len(batch) < size and type(sampler) is RandomSampler:
                        next(chunks, None)  # torch's batch sampler reaches the end for this one
                    yield batch[0] if self.single else batch, number
                    number += size

    @contextmanager
    def _from_noted_state(self) -> Iterator[None]:
        """Let the sampler draw as when the pass began, or note what it draws from."""
        position, source = self.position, self._source
        if self.seed is not None:
            source.manual_seed(self.seed + position.epoch)
        elif self._noted is None:
            position.rng = source.get_state()
        elif self.generator is None:
            # The program's own draws go on as if nothing had been drawn here.
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self._noted)
                yield
            return
        else:
            source.set_state(self._noted)
        yield

    def _read(self) -> Iterator[tuple[Any, int]]:
        """Begin a sampler at once, as torch's iterators do, and yield its batches."""
        position, sampler, source = self.position, self.sampler, self._source
        parts = (sampler, getattr(sampler, "sampler", None))  # a sampler may lie in torch's
        own: Any = next((part for part in parts if find_save(part)), None)
        save = None if own is None else own.state_dict
        self.states.clear()
        if own is not None and position.sampler_state is not None:
            own.load_state_dict(position.sampler_state["state"])
            return self._rest(iter(sampler), position.sampler_state["samples"], save)
        if self._resumed or self._noted is not None:
            with generators_kept():
                if self._noted is not None:
                    source.set_state(self._noted)
                iterator = iter(sampler)
                passed = sum(map(self._count, islice(iterator, position.batch)))
            return self._rest(iterator, passed, save)
        if self.seed is not None:
            source.manual_seed(self.seed + position.epoch)
        before = source.get_state()
        iterator = iter(sampler)
        if not before.equal(source.get_state()):
            position.rng = before
        return self._rest(iterator, 0, save)

    def _rest(
        self, iterator: Iterator[Any], number: int, save: Callable[[], Any] | None
    ) -> Iterator[tuple[Any, int]]:
        if self.position.rng is None and self.seed is None:
            self.position.rng = self._source.get_state()
        for batch in iterator:
            first, number = number, number + self._count(batch)
            if save is not None:
                self.states.append({"samples": number, "state": copy.deepcopy(save())})
            yield batch, first

    def _count(self, batch: Any) -> int:
        return len(batch) if not self.single and hasattr(batch, "__len__") else 1


def _is_computed(sampler: Any) -> bool:
    if type(sampler) is RandomSampler and not sampler.replacement:
        return sampler.num_samples <= len(sampler.data_source)
    return type(sampler) in _COMPUTED


def _split(part: Any, size: int, *, lists: bool) -> Iterable[Any]:
    """Return the batches of a tensor or list of indices, as lists or as tensors."""
    if isinstance(part, Tensor) and not lists:
        return torch.split(part, size)
    rows = part.tolist() if isinstance(part, Tensor) else part
    batches = [rows[begin : begin + size] for begin in range(0, len(rows), size)]
    return batches if lists else map(_to_rows, batches)


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


def _chunks(sampler: Any, start: int, size: int) -> Iterator[Any]:
    """Yield the indices of torch's samplers and ours from one on, many batches at a time."""
    if type(sampler) is SequentialSampler:
        yield from ranges(start, len(sampler), size)
    elif isinstance(sampler, _OURS):
        yield from sampler.chunks(start, size)
    elif type(sampler) in _WHOLE:
        rows = list(sampler)
        found = as_rows(rows)
        yield (rows if found is None else found)[start:]
    elif sampler.replacement:
        yield from _draw_blocks(sampler, start, size)
    else:
        yield from _permute(sampler, start)


def _generator_of(sampler: RandomSampler) -> torch.Generator:
    """Return what RandomSampler draws from: without one of its own, a new one in each epoch."""
    if sampler.generator is not None:
        return cast("torch.Generator", sampler.generator)
    return torch.Generator().manual_seed(draw_seed())


def _draw_blocks(sampler: RandomSampler, start: int, size: int) -> Iterator[Tensor]:
    """Draw as RandomSampler does with replacement, 32 at a time, but many batches at once."""
    total, generator = len(sampler.data_source), _generator_of(sampler)
    block = math.lcm(32, size)
    block *= max(1, _DRAWN // block)
    for begin in range(0, sampler.num_samples, block):
        count = min(block, sampler.num_samples - begin)
        rows = torch.randint(total, (count,), generator=generator, device="cpu")
        if begin + count > start:
            yield rows[max(0, start - begin) :]


def _permute(sampler: RandomSampler, start: int) -> Iterator[Tensor]:
    """Draw as RandomSampler does, which after a whole epoch draws one more, unused permutation."""
    total, generator = len(sampler.data_source), _generator_of(sampler)
    yield torch.randperm(total, generator=generator, device="cpu")[start : sampler.num_samples]
    if sampler.num_samples == total and sampler.generator is not None:
        torch.randperm(total, generator=generator, device="cpu")
