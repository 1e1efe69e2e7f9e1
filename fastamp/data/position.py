"""Where a loader is in its epoch, and the indices that come from there on."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

__all__ = ["Indices", "Position"]

_SEQUENTIAL_CHUNK = 1 << 16  # indices made at a time, for datasets that are longer than memory


@dataclass
class Position:
    """How far a pass over the loader has come."""

    epoch: int
    batch: int = 0
    """Delivered to the consumer."""
    rng: Tensor | None = None
    """State of the generator before the sampler drew from it."""
    generator: Tensor | None = None
    """State of the loader's generator when the pass began."""
    dataset: Any = None
    """State of an iterable dataset after the last batch delivered."""

    def end_epoch(self) -> None:
        """Become the start of the next epoch."""
        self.epoch, self.batch = self.epoch + 1, 0
        self.rng = self.generator = self.dataset = None


class Indices:
    """What a sampler yields in one epoch, from a position on, as a sampler itself.

    Args:
        sampler: what yields batches of indices, or single ones where the loader does not batch.
        generator: what the sampler draws from, None for torch's default generator.
        seed: seeds the generator anew for each epoch, together with the epoch; None does not.
        position: where to begin. Not yet there, the state of the generator is put into it.
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        generator: torch.Generator | None,
        seed: int | None,
        position: Position,
    ) -> None:
        self._sampler = sampler
        self._generator = generator
        self._seed = seed
        self.position = position

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Yield what the sampler yields."""
        return self._from_position(lambda skip: islice(iter(self._sampler), skip, None))

    def tensors(self) -> Iterator[Tensor]:
        """Yield the batches as int64 tensors; the sampler yields batches of integers."""
        return self._from_position(lambda skip: _index_tensors(self._sampler, skip))

    def _from_position(self, start: Callable[[int], Iterator[Any]]) -> Iterator[Any]:
        position, generator = self.position, self._generator
        if generator is None and position.rng is not None:
            # The program's own draws go on as if nothing had been drawn here.
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(position.rng)
                rest = start(position.batch)
                first = list(islice(rest, 1))
            yield from chain(first, rest)
            return
        source = torch.default_generator if generator is None else generator
        if self._seed is not None:
            source.manual_seed(self._seed + position.epoch)
        elif position.rng is not None:
            source.set_state(position.rng)
        else:
            position.rng = source.get_state()
        yield from start(position.batch)


def _index_tensors(sampler: Iterable[Any], skip: int) -> Iterator[Tensor]:
    if type(sampler) is not BatchSampler:
        for batch in islice(iter(sampler), skip, None):
            rows = _to_tensor(batch)
            if not len(rows):
                msg = "batch_sampler: a batch without indices"
                raise IndexError(msg)
            yield rows
        return
    size = sampler.batch_size
    left, skipped = torch.empty(0, dtype=torch.int64), skip * size
    for chunk in _chunks(sampler.sampler, size):
        here = min(skipped, len(chunk))
        skipped -= here
        chunk = torch.cat([left, chunk[here:]]) if len(left) else chunk[here:]  # noqa: PLW2901
        full = len(chunk) // size * size
        if full:
            yield from torch.split(chunk[:full], size)
        left = chunk[full:]
    if len(left) and not sampler.drop_last:
        yield left


def _chunks(sampler: Iterable[int], size: int) -> Iterator[Tensor]:
    """Yield a sampler's indices in the order of torch, many at a time where it is torch's own."""
    if type(sampler) is SequentialSampler:
        total = len(sampler)
        for start in range(0, total, _SEQUENTIAL_CHUNK):
            yield torch.arange(start, min(start + _SEQUENTIAL_CHUNK, total))
    elif type(sampler) is RandomSampler and not sampler.replacement:
        yield from _permutations(sampler)
    else:
        iterator = iter(sampler)
        while len(chunk := _to_tensor(islice(iterator, size))):
            yield chunk


def _to_tensor(indices: Iterable[Any]) -> Tensor:
    """Return indices as int64; what is no integer is refused."""
    return torch.from_numpy(np.fromiter(map(operator.index, indices), np.int64))


def _permutations(sampler: RandomSampler) -> Iterator[Tensor]:
    """Draw as RandomSampler does, the last permutation too, of which it may take nothing."""
    total = len(sampler.data_source)
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    for _ in range(sampler.num_samples // total):
        yield torch.randperm(total, generator=generator)
    yield torch.randperm(total, generator=generator)[: sampler.num_samples % total]
