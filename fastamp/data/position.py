"""Where a loader is in its epoch, and the indices that come from there on."""

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import chain, count, islice
from operator import itemgetter
from types import MethodType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from fastamp.data.sample_rng import Order, Placed, find_pass_key
from fastamp.data.shard import RankBatches, ShardSampler
from fastamp.data.shuffle import FeistelSampler, ranges
from fastamp.data.states import Record, Skip, find_save, has_copies, read_records

_Begin: TypeAlias = Callable[[Iterable[Any], int], Iterator[tuple[Any, int]]]
RANDOM = ("rng", "generator", "workers_rng")
"""The states of generators."""
_COMPUTED = (SequentialSampler, FeistelSampler)  # of which nothing before a place is drawn
_BOOLEANS = (bool, np.dtype(bool), torch.bool)


@dataclass
class Position:
    """How far a pass over the loader has come."""

    epoch: int
    batch: int = 0
    """Delivered to the consumer."""
    late: list[int] = field(default_factory=list)
    """With `in_order=False`: the batches that were passed by others, by their place in order."""
    consumed: int = 0
    """Samples that the ranks of a sharded loader had had before the first of these batches."""
    rng: Tensor | None = None
    """State of the generator before the sampler drew from it."""
    generator: Tensor | None = None
    """State of the loader's generator when the pass began."""
    dataset: Any = None
    """State of a dataset after the last batch delivered, or when the pass began if its copies in
    workers have their own. While no batch is made ahead: the method that asks for it, and for
    `iterator` and `exhausted`."""
    iterator: Any = None
    """State of an iterable dataset's iterator, where the iterator has it."""
    exhausted: bool = False
    """Whether an iterable dataset had ended with that batch."""
    workers: list[Record | None] | None = None
    """What each worker's copy of the dataset was after its last batch delivered."""
    turn: int = 0
    """The worker that makes the next batch."""
    workers_rng: Tensor | None = None
    """State of torch's default generator before the seed of the workers was drawn from it."""
    begun: bool = False
    """Whether the pass had begun, and had drawn that seed."""
    sample_seed: int | None = None
    """Seed of the samples' random numbers: the loader's, or the one that torch's iterators draw."""

    persist = False  # whether the copies in workers live on when the epoch ends

    def end_epoch(self) -> None:
        """Become the start of the next epoch."""
        kept = self if self.persist else Position(0)
        following = replace(Position(self.epoch + 1), workers=kept.workers)
        vars(self).update(vars(replace(following, sample_seed=kept.sample_seed)))

    def take(self, news: Any) -> None:
        """Note what a batch brought: notes of workers, or the state of the dataset."""
        if isinstance(news, dict):
            vars(self).update(news)
            return
        for note in news:
            if isinstance(note, dict):
                vars(self).update(note)
            elif note is not None and self.workers is not None:
                worker, record = note
                self.workers = [*self.workers]  # that of a state stays
                self.workers[worker] = record
                self.turn = (worker + 1) % len(self.workers)

    def now(self) -> "Position":
        """Return a copy that stays where it is."""
        if isinstance(self.dataset, MethodType):
            return replace(self, **self.dataset())
        return replace(self)

    @property
    def resumed(self) -> bool:
        """Whether the pass began earlier, with the draws of its beginning."""
        return self.batch + self.consumed > 0


def read_position(state: dict[str, Any]) -> tuple[Position, int | None]:
    """Return the position that a loader's state tells, and the epoch that its user told it.

    Raises:
        ValueError: a key is missing or has another kind of value.
    """
    names = [field.name for field in fields(Position)]
    for name in (*names, "told_epoch"):
        if name not in state:
            msg = f"state: expected what DataLoader.state_dict returns, it has no {name!r}"
            raise ValueError(msg)
    for name in ("epoch", "batch", "consumed", "turn", "told_epoch", "sample_seed"):
        value = state[name]
        optional = name in ("told_epoch", "sample_seed")
        if isinstance(value, Tensor) or (value is None and not optional):
            msg = f"state: its {name}: expected an integer of at least 0, got {value!r}"
            raise ValueError(msg)
        check_integer(f"state: its {name}", value, least=0)
    _check_late(state["late"], state["batch"])
    for name in ("exhausted", "begun"):
        if type(state[name]) is not bool:
            msg = f"state: its {name}: expected True or False, got {state[name]!r}"
            raise ValueError(msg)
    values = {name: state[name] for name in names}
    values["workers"] = read_records(state["workers"])
    for name in RANDOM:
        if state[name] is not None:
            try:
                values[name] = decode(state[name])
                torch.Generator().set_state(values[name])
            except (RuntimeError, TypeError, ValueError) as error:
                msg = f"state: its {name}: expected the state of a generator or None; {error}"
                raise ValueError(msg) from error
    return Position(**values), state["told_epoch"]


def _check_late(late: Any, batch: int) -> None:
    is_list = isinstance(late, list) and all(type(place) is int for place in late)
    if not is_list or sorted({-1, *late}) != [-1, *late] or late[-1:] >= [batch + len(late)]:
        msg = f"state: its late: expected places that {batch} batches have passed, got {late!r}"
        raise ValueError(msg)


def encode(position: Position) -> dict[str, Any]:
    """Return a position as JSON knows it, except for the states that datasets have."""
    state = vars(position).copy()
    for name in RANDOM:
        if state[name] is not None:
            state[name] = b64encode(state[name].numpy().tobytes()).decode()
    return state


def decode(text: Any) -> Tensor:
    """Return a generator's state, which may also be a tensor."""
    if isinstance(text, Tensor):
        return text
    return torch.frombuffer(bytearray(b64decode(text, validate=True)), dtype=torch.uint8)


def check_integer(name: str, value: Any, *, least: int) -> None:
    """Refuse an argument that is neither None nor an integer of 64 bits from `least` on."""
    if value is None:
        return
    if isinstance(value, bool) or not hasattr(value, "__index__") or not least <= value < 2**63:
        msg = f"{name}: expected an integer of at least {least}, got {value!r}"
        raise ValueError(msg)


def check_resumable(loader: Any) -> None:
    """Refuse a dataset that nobody but its owner can ask where it is."""
    dataset, num_workers = loader.dataset, loader.num_workers
    name = type(dataset).__name__
    if not isinstance(dataset, IterableDataset):
        if loader._in_threads and find_save(dataset) is not None:
            msg = (
                f"worker={loader.worker!r}: {name} has a state_dict, and threads read ahead of it "
                "in any order; use worker='process' to save and load it"
            )
            raise TypeError(msg)
        return
    if hasattr(dataset, "state_dict") and find_save(dataset) is None:
        msg = (
            f"dataset: the state_dict of {name} takes arguments, so its position is unknown; save "
            "and load the dataset's own state beside the loader"
        )
        raise TypeError(msg)
    if num_workers > 0 and not has_copies(loader):
        msg = (
            f"num_workers={num_workers}: {name} is a data pipe, and its position is known to "
            "its workers only; use num_workers=0 to save and load it"
        )
        raise TypeError(msg)


@dataclass(eq=False)
class Indices:
    """What a sampler yields in one epoch, from a position on, as a sampler itself."""

    sampler: Any
    """What yields batches of indices, or single ones where the loader does not batch."""
    generator: torch.Generator | None
    """What the sampler draws from, None for torch's default generator."""
    seed: int | None
    """Seeds the generator anew for each epoch, together with the epoch; None does not."""
    position: Position
    """Where to begin. Not yet there, the state of the generator is put into it."""
    skips: int = 0
    """Turns to leave out, before the worker whose turn it is."""
    single: bool = False
    """Whether the sampler yields single indices."""
    plain: bool = False
    """Whether samples get no places, as for data pipes of torch's."""

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
        """Yield batches as int64 tensors, or as lists where they are not plain integers."""
        return map(itemgetter(0), self._from_position(_index_batches))

    def placed_batches(self) -> Iterator[tuple[Any, Tensor]]:
        """Yield such batches with the places of their samples, as int64 tensors."""
        order = self.order
        for indices, number in self._from_position(_index_batches):
            numbers = torch.arange(number, number + len(indices), device="cpu")
            yield indices, order.places(numbers)

    @property
    def order(self) -> Order:
        """The keys of the pass's samples, for which the position has a seed."""
        position = self.position
        key = find_pass_key(position.sample_seed or 0, position.epoch)
        samplers = (self.sampler, getattr(self.sampler, "sampler", None))
        for sampler in samplers:
            if isinstance(sampler, ShardSampler):
                return sampler.at(position.epoch, position.consumed).order(key)
            if isinstance(sampler, DistributedSampler):
                return Order(key, sampler.rank, 1, sampler.num_replicas - 1)
        return Order(key)

    def _from_position(self, begin: _Begin) -> Iterator[tuple[Any, int]]:
        position, generator = self.position, self.generator
        placed = _place_shard(self.sampler, position)
        if placed is not None:
            yield from self._rest(begin, placed)
            return
        if generator is None and position.rng is not None:
            # The program's own draws go on as if nothing had been drawn here.
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(position.rng)
                rest = self._rest(begin, self.sampler)
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
        yield from self._rest(begin, self.sampler)

    def _rest(self, begin: _Begin, sampler: Iterable[Any]) -> Iterator[tuple[Any, int]]:
        """Leave out what was delivered: the first batches, except for those that were late."""
        late, delivered = self.position.late, self.position.batch
        if not late:
            return begin(sampler, delivered)
        passed, first = delivered + len(late), late[0]
        places = enumerate(begin(sampler, first), first)
        return (batch for place, batch in places if place >= passed or place in late)


def _place_shard(sampler: Any, position: Position) -> Iterable[Any] | None:
    """Return a rank's sampler, or the one of its batches, for what is left of the epoch."""
    if isinstance(sampler, ShardSampler):
        return sampler.at(position.epoch, position.consumed)
    inner = sampler.sampler if type(sampler) in (BatchSampler, RankBatches) else None
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
        number += len(batch) if hasattr(batch, "__len__") else 1


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
        if len(chunk) > rest:
            for batch in torch.split(chunk[: len(chunk) - rest], sampler.batch_size):
                yield batch, number
                number += sampler.batch_size


def _to_rows(batch: Iterable[Any]) -> Any:
    batch = list(batch)
    rows = as_rows(batch)
    return batch if rows is None else rows


def as_rows(indices: Any) -> Tensor | None:
    """Return integers as an int64 tensor; None where anything else is among them, also booleans."""
    if isinstance(indices, list | tuple) and set(map(type, indices)) != {int}:
        dtypes = [getattr(index, "dtype", type(index)) for index in indices]
        if any(dtype in _BOOLEANS for dtype in dtypes):  # which NumPy takes for 0 and 1
            return None
    try:
        rows = np.asarray(indices)
    except (TypeError, ValueError, RuntimeError):
        return None
    if rows.ndim != 1 or rows.dtype.kind not in "iu" or rows.dtype == np.uint64:
        return None
    return torch.from_numpy(rows.astype(np.int64))


def _chunks(sampler: Any, start: int, size: int) -> Iterator[Tensor] | None:
    """Return the indices of torch's own samplers, in torch's order, many batches at a time."""
    if type(sampler) is SequentialSampler:
        return ranges(start, len(sampler), size)
    if isinstance(sampler, ShardSampler | FeistelSampler):
        return sampler.chunks(start, size)
    plain = type(sampler) is RandomSampler and not sampler.replacement
    if plain and sampler.num_samples <= len(sampler.data_source):
        return _permutation(sampler, start)
    return None


def _permutation(sampler: RandomSampler, start: int) -> Iterator[Tensor]:
    """Draw as RandomSampler does: a generator that is kept draws another permutation in vain."""
    total = len(sampler.data_source)
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    yield torch.randperm(total, generator=generator, device="cpu")[start : sampler.num_samples]
    if sampler.num_samples == total and sampler.generator is not None:
        torch.randperm(total, generator=generator, device="cpu")
