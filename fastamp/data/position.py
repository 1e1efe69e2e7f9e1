"""Where a loader is in its epoch, and how a state stores it."""

import inspect
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fastamp.data.checks import as_integer

VERSION = 2
_GENERATORS = ("rng", "generator")
_MARK = "_fastamp_undelivered"


@dataclass
class Position:
    """How far a pass over the loader has come."""

    epoch: int
    batch: int = 0
    """Batches delivered to the consumer."""
    consumed: int = 0
    """Of a sharded loader: samples that all ranks have had before the first of these batches."""
    begun: bool = False
    """Whether the draw that seeds workers is made, in this pass or for workers that persist."""
    sample_seed: int | None = None
    """Seed of the samples' random numbers: the loader's, or the one that torch's iterators draw."""
    rng: Tensor | None = None
    """State of what the sampler draws from, before its draws."""
    generator: Tensor | None = None
    """State of the loader's generator after the draw that seeds workers."""
    sampler_state: Any = None
    """State of a sampler of the user's after the last batch delivered, if it has one."""
    dataset_state: Any = None
    """torchdata's state of a dataset with a state of its own."""

    ask: Callable[[], Any] | None = None
    """If no batches are taken ahead: returns the dataset's state now. Not stored."""
    persists: bool = False
    """Whether workers live on when the epoch ends. Not stored."""

    def advance(self, sampler: Any = None, dataset: Any = None) -> None:
        """Move behind a batch that is delivered."""
        if sampler is not None:
            self.sampler_state = sampler
        if dataset is not None:
            self.dataset_state = dataset
        self.batch += 1

    def end_epoch(self) -> None:
        """Move to the start of the next epoch."""
        kept: dict[str, Any] = {"dataset_state": self.dataset_state, "ask": self.ask}
        if self.persists:
            kept |= {"begun": True, "sample_seed": self.sample_seed, "persists": True}
        vars(self).update(vars(Position(self.epoch + 1)) | kept)

    def now(self) -> "Position":
        """Return a copy that does not move with the pass."""
        return replace(self, dataset_state=self.ask() if self.ask else self.dataset_state, ask=None)


_STORED = tuple(one.name for one in fields(Position) if one.name not in ("ask", "persists"))


def find_save(dataset: Any) -> Callable[[], Any] | None:
    """Return the `state_dict` of a dataset or sampler if it needs no arguments."""
    save: Callable[[], Any] | None = getattr(dataset, "state_dict", None)
    try:
        inspect.signature(save).bind()  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return save if hasattr(dataset, "load_state_dict") else None


def mark_undelivered(error: Exception) -> Exception:
    """Mark an error that comes in place of no batch, as a timeout, and return it."""
    vars(error)[_MARK] = True
    return error


def unmark(error: Exception) -> bool:
    """Take the mark away, which says nothing to a loader whose dataset reads this one."""
    return bool(vars(error).pop(_MARK, False))


def encode(position: Position) -> dict[str, Any]:
    """Return a position in the types of JSON, except for states of the user's own."""
    state = {name: getattr(position, name) for name in _STORED}
    for name in _GENERATORS:
        if state[name] is not None:
            state[name] = b64encode(state[name].numpy().tobytes()).decode()
    return state


def decode(state: Any, identity: dict[str, Any]) -> tuple[Position, int | None]:
    """Return the position in a loader's state, and the epoch that its user has set.

    Args:
        state: what `DataLoader.state_dict` returns.
        identity: what the loaders that saved and load it must have in common, by its name.

    Raises:
        ValueError: the state is of another version, or of another loader; or one of its keys is
            missing or has another kind of value.
    """
    _check_identity(state, identity)
    for name in (*_STORED, "told_epoch"):
        if name not in state:
            msg = f"state: expected what DataLoader.state_dict returns, it has no {name!r}"
            raise ValueError(msg)
    for name in ("epoch", "batch", "consumed", "told_epoch", "sample_seed"):
        optional = name in ("told_epoch", "sample_seed")
        as_integer(f"state: its {name}", state[name], least=0, optional=optional)
    if type(state["begun"]) is not bool:
        msg = f"state: its begun: expected True or False, got {state['begun']!r}"
        raise ValueError(msg)
    values = {name: state[name] for name in _STORED}
    for name in _GENERATORS:
        if state[name] is not None:
            try:
                values[name] = _as_rng_state(state[name])
                torch.Generator().set_state(values[name])
            except (RuntimeError, TypeError, ValueError) as error:
                msg = f"state: its {name}: expected the state of a generator or None; {error}"
                raise ValueError(msg) from error
    return Position(**values), state["told_epoch"]


def _check_identity(state: Any, identity: dict[str, Any]) -> None:
    version = state.get("version") if isinstance(state, dict) else None
    if type(version) is not int or version != VERSION:
        found = "" if version is None else f", got version {version!r}"
        msg = f"state: expected what DataLoader.state_dict returns, version {VERSION}{found}"
        raise ValueError(msg)
    for name, ours in identity.items():
        value = state.get(name)
        if type(value) is not type(ours) or value != ours:
            msg = f"state: its {name} is {value!r}, the loader's {ours!r}"
            raise ValueError(msg)


def _as_rng_state(text: Any) -> Tensor:
    """Return a generator's state out of its text; a tensor is returned as it is."""
    if isinstance(text, Tensor):
        return text
    return torch.frombuffer(bytearray(b64decode(text, validate=True)), dtype=torch.uint8)
