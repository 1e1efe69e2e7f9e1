"""Where a loader is in its epoch, and how a state stores it."""

from base64 import b64decode, b64encode
from dataclasses import dataclass, field, fields, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from fastamp.data.checks import as_integer
from fastamp.data.states import Record, as_of_pass_before, read_records

_GENERATORS = ("rng", "generator", "workers_rng")


@dataclass
class Position:
    """How far a pass over the loader has come."""

    epoch: int
    batch: int = 0
    """Batches delivered to the consumer."""
    late: list[int] = field(default_factory=list)
    """With `in_order=False`: the batches that others have overtaken, by their place in order."""
    consumed: int = 0
    """Of a sharded loader: samples that all ranks have had before the first of these batches."""
    rng: Tensor | None = None
    """State of the generator before the sampler drew from it."""
    generator: Tensor | None = None
    """State of the loader's generator when the pass began."""
    dataset: Any = None
    """State of a dataset after the last batch delivered, or when the pass began if its copies in
    workers have their own. If no batches are made ahead: a method that returns it, with `iterator`
    and `exhausted`."""
    iterator: Any = None
    """State of an iterable dataset's iterator, where the iterator has it."""
    exhausted: bool = False
    """Whether an iterable dataset had ended with that batch."""
    workers: list[Record | None] | None = None
    """State of each worker's copy of the dataset after its last batch delivered."""
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
        """Move to the start of the next epoch."""
        kept = self if self.persist else Position(0)
        workers, seed = as_of_pass_before(kept.workers), kept.sample_seed
        vars(self).update(vars(Position(self.epoch + 1, workers=workers, sample_seed=seed)))

    def advance(self, news: Any) -> None:
        """Move behind a batch that is delivered, with what it brought."""
        self.batch += 1
        if news:
            self.take(news)

    def take(self, news: Any) -> None:
        """Note what a batch brought: notes of workers, and fields."""
        for note in news:
            if isinstance(note, dict):
                vars(self).update(note)
            elif note is not None and self.workers is not None:
                worker, record = note
                self.workers = [*self.workers]  # a state keeps the old list
                self.workers[worker] = record
                self.turn = (worker + 1) % len(self.workers)

    def now(self) -> "Position":
        """Return a copy that does not move with the pass."""
        if isinstance(self.dataset, MethodType):
            return replace(self, **self.dataset())
        return replace(self)

    @property
    def resumed(self) -> bool:
        """Whether the pass has delivered batches before, so that its first draws are made."""
        return self.batch + self.consumed > 0


def read_position(state: dict[str, Any]) -> tuple[Position, int | None]:
    """Return the position in a loader's state, and the epoch that its user has set.

    Raises:
        ValueError: a key is missing or has another kind of value.
    """
    names = [field.name for field in fields(Position)]
    for name in (*names, "told_epoch"):
        if name not in state:
            msg = f"state: expected what DataLoader.state_dict returns, it has no {name!r}"
            raise ValueError(msg)
    for name in ("epoch", "batch", "consumed", "turn", "told_epoch", "sample_seed"):
        optional = name in ("told_epoch", "sample_seed")
        as_integer(f"state: its {name}", state[name], least=0, optional=optional)
    _check_late(state["late"], state["batch"])
    for name in ("exhausted", "begun"):
        if type(state[name]) is not bool:
            msg = f"state: its {name}: expected True or False, got {state[name]!r}"
            raise ValueError(msg)
    values = {name: state[name] for name in names}
    values["workers"] = read_records(state["workers"])
    for name in _GENERATORS:
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
    """Return a position in the types of JSON, except for a dataset's own states."""
    state = vars(position).copy()
    for name in _GENERATORS:
        if state[name] is not None:
            state[name] = b64encode(state[name].numpy().tobytes()).decode()
    return state


def decode(text: Any) -> Tensor:
    """Return a generator's state out of its text; a tensor is returned as it is."""
    if isinstance(text, Tensor):
        return text
    return torch.frombuffer(bytearray(b64decode(text, validate=True)), dtype=torch.uint8)
