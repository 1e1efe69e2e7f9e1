"""Where a loader is in its epoch, and the indices that come from there on."""

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import chain, islice
from types import MethodType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from fastamp.data.shard import RankBatches, ShardSampler, ranges
from fastamp.data.states import Record, Skip, find_save, has_copies, read_records

_Begin: TypeAlias = Callable[[Iterable[Any], int], Iterator[Any]]
RANDOM = ("rng", "generator", "workers_rng")
"""The states of generators."""
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

    persist = False  # whether the copies in workers live on when the epoch ends

    def end_epoch(self) -> None:
        """Become the start of the next epoch."""
        workers = self.workers if self.persist else None
        vars(self).update(vars(Position(self.epoch + 1, workers=workers)))

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
    for name in ("epoch", "batch", "consumed", "turn", "told_epoch"):
        value = state[name]
        if isinstance(value, Tensor) or (value is None and name != "told_epoch"):
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


def check_resumable(dataset: Any, num_workers: int) -> None:
    """Refuse an iterable dataset that nobody but its owner can ask where it is."""
    if not isinstance(dataset, IterableDataset):
        return
    name = type(dataset).__name__
    if hasattr(dataset, "state_dict") and find_save(dataset) is None:
        msg = (
            f"dataset: the state_dict of {name} takes arguments, so its position is unknown; save "
            "and load the dataset's own state beside the loader"
        )
        raise TypeError(msg)
    if num_workers > 0 and not has_copies(dataset, num_workers):
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

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        """Yield what the sampler yields."""
        rest = self._from_position(lambda sampler, skip: islice(iter(sampler), skip, None))
        return chain([Skip()] * self.skips, rest)

    def batches(self) -> Iterator[Any]:
        """Yield batches as int64 tensors, or as lists where they are not plain integers."""
        return self._from_position(_index_batches)

    def _from_position(self, begin: _Begin) -> Iterator[Any]:
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

    def _rest(self, begin: _Begin, sampler: Iterable[Any]) -> Iterator[Any]:
        """Leave out what was delivered: the first batches, except for those that were late."""
        late, count = self.position.late, self.position.batch
        if not late:
            return begin(sampler, count)
        passed, first = count + len(late), late[0]
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


def _index_batches(sampler: Any, skip: int) -> Iterator[Any]:
    """Yield batches as int64 tensors; as lists where they are not plain integers."""
    chunks = None
    if type(sampler) is BatchSampler:
        chunks = _chunks(sampler.sampler, skip * sampler.batch_size, sampler.batch_size)
    if chunks is None:
        yield from map(_to_rows, islice(iter(sampler), skip, None))
        return
    for chunk in chunks:
        rest = len(chunk) % sampler.batch_size if sampler.drop_last else 0
        if len(chunk) > rest:
            yield from torch.split(chunk[: len(chunk) - rest], sampler.batch_size)


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
    if isinstance(sampler, ShardSampler):
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
