"""Where a loader is in its epoch, and the indices that come from there on."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain, islice
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from fastamp.data.shard import RankBatches, ShardSampler, ranges

_BOOLEANS = (bool, np.dtype(bool), torch.bool)


@dataclass
class Position:
    """How far a pass over the loader has come."""

    epoch: int
    batch: int = 0
    """Delivered to the consumer."""
    consumed: int = 0
    """Samples that the ranks of a sharded loader had had before the first of these batches."""
    rng: Tensor | None = None
    """State of the generator before the sampler drew from it."""
    generator: Tensor | None = None
    """State of the loader's generator when the pass began."""
    dataset: Any = None
    """State of an iterable dataset after the last batch delivered. While no batch is made ahead:
    the method that asks for it, and for `exhausted`."""
    exhausted: bool = False
    """Whether an iterable dataset had ended with that batch."""

    def end_epoch(self) -> None:
        """Become the start of the next epoch."""
        self.epoch, self.batch, self.consumed = self.epoch + 1, 0, 0
        self.rng = self.generator = self.dataset = None
        self.exhausted = False

    def now(self) -> "Position":
        """Return a copy that stays where it is."""
        if isinstance(self.dataset, MethodType):
            state, exhausted = self.dataset()
            return replace(self, dataset=state, exhausted=exhausted)
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
    for name in ("epoch", "batch", "consumed", "told_epoch"):
        value = state[name]
        if isinstance(value, Tensor) or (value is None and name != "told_epoch"):
            msg = f"state: its {name}: expected an integer of at least 0, got {value!r}"
            raise ValueError(msg)
        check_integer(f"state: its {name}", value, least=0)
    if type(state["exhausted"]) is not bool:
        msg = f"state: its exhausted: expected True or False, got {state['exhausted']!r}"
        raise ValueError(msg)
    for name in ("rng", "generator"):
        if state[name] is not None:
            try:
                torch.Generator().set_state(state[name])
            except (RuntimeError, TypeError) as error:
                msg = f"state: its {name}: expected the state of a generator or None; {error}"
                raise ValueError(msg) from error
    return Position(**{name: state[name] for name in names}), state["told_epoch"]


def check_integer(name: str, value: Any, *, least: int) -> None:
    """Refuse an argument that is neither None nor an integer of 64 bits from `least` on."""
    if value is None:
        return
    if isinstance(value, bool) or not hasattr(value, "__index__") or not least <= value < 2**63:
        msg = f"{name}: expected an integer of at least {least}, got {value!r}"
        raise ValueError(msg)


def check_resumable(dataset: Any, num_workers: int) -> None:
    """Refuse an iterable dataset that does not say where it is."""
    if not isinstance(dataset, IterableDataset):
        return
    name = type(dataset).__name__
    if not hasattr(dataset, "state_dict"):
        msg = f"dataset: {name} is iterable and has no state_dict, so its position is unknown"
        raise TypeError(msg)
    if find_save(dataset) is None:
        msg = (
            f"dataset: the state_dict of {name} takes arguments, so its position is unknown; save "
            "and load the dataset's own state beside the loader"
        )
        raise TypeError(msg)
    if num_workers > 0:
        msg = (
            f"num_workers={num_workers}: {name} is iterable, and its position is known to "
            "its workers only; use num_workers=0 to save and load it"
        )
        raise TypeError(msg)


def find_save(dataset: Any) -> Callable[[], Any] | None:
    """Return the dataset's `state_dict` if it can be called without arguments."""
    save: Callable[[], Any] | None = getattr(dataset, "state_dict", None)
    try:
        inspect.signature(save).bind()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return save


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

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        """Yield what the sampler yields."""
        return self._from_position(lambda sampler, skip: islice(iter(sampler), skip, None))

    def batches(self) -> Iterator[Any]:
        """Yield batches as int64 tensors, or as lists where they are not plain integers."""
        return self._from_position(_index_batches)

    def _from_position(self, begin: Callable[[Iterable[Any], int], Iterator[Any]]) -> Iterator[Any]:
        position, generator = self.position, self.generator
        placed = _place_shard(self.sampler, position)
        if placed is not None:
            yield from begin(placed, position.batch)
            return
        if generator is None and position.rng is not None:
            # The program's own draws go on as if nothing had been drawn here.
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(position.rng)
                rest = begin(self.sampler, position.batch)
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
        yield from begin(self.sampler, position.batch)


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
