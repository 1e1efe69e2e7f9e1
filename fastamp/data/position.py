"""Where a loader is in its epoch, and how a state tells it."""

from base64 import b64decode, b64encode
from dataclasses import dataclass, field, fields, replace
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor

from fastamp.data.checks import check_integer
from fastamp.data.states import Record, of_pass_before, read_records

_GENERATORS = ("rng", "generator", "workers_rng")


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
    drawn = cast("Any", None)  # what the sampler has yielded, where other workers may go on

    def end_epoch(self) -> None:
        """Become the start of the next epoch."""
        kept = self if self.persist else Position(0)
        following = replace(Position(self.epoch + 1), workers=of_pass_before(kept.workers))
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
        optional = name in ("told_epoch", "sample_seed")
        check_integer(f"state: its {name}", state[name], least=0, optional=optional)
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
    """Return a position as JSON knows it, except for the states that datasets have."""
    state = vars(position).copy()
    for name in _GENERATORS:
        if state[name] is not None:
            state[name] = b64encode(state[name].numpy().tobytes()).decode()
    return state


def decode(text: Any) -> Tensor:
    """Return a generator's state, which may also be a tensor."""
    if isinstance(text, Tensor):
        return text
    return torch.frombuffer(bytearray(b64decode(text, validate=True)), dtype=torch.uint8)
