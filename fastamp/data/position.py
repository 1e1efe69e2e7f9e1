"""Where a loader is in its epochs, and how a state stores it."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fastamp.data.checks import as_integer


@dataclass
class Position:
    """How far a pass over a loader has come. What is made ahead of the loop is not in it."""

    epoch: int = 0
    batch: int = 0
    """Batches delivered to the loop."""
    consumed: int = 0
    """Of a sharded loader: samples that all ranks have had before the first of these batches."""
    sample_seed: int | None = None
    """Seed of the samples' random numbers: the loader's, or the one that torch's iterators draw."""
    order: int | None = None
    """Seed of the order, where torch's sampler draws one."""
    generator: Tensor | None = None
    """State of what the order is drawn from, before it is drawn."""
    told_epoch: int | None = None
    """The epoch of the last call of `set_epoch`, which samplers were told."""
    dataset_state: Any = None
    """Of a dataset that has a state, and is read in the loop's process."""
    is_read_out: bool = False
    """Whether an iterable dataset had no more samples for the last of these batches."""


_NAMES = {field.name for field in fields(Position)}


def has_state(owner: Any) -> bool:
    """Say whether a dataset, a sampler or a loader can be asked for its state, and take one."""
    return hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")


def encode(position: Position) -> dict[str, Any]:
    """Return a position in the types of JSON, except for states of the user's own."""
    generator = position.generator
    return {**vars(position), "generator": None if generator is None else generator.tolist()}


def decode(state: Any, identity: dict[str, Any]) -> Position:
    """Return the position in a loader's state.

    Args:
        state: what `DataLoader.state_dict` returns.
        identity: what the loaders that saved and load it must have in common, by its name.

    Raises:
        ValueError: the state is of another version, or of another loader, or lacks a key, or a
            number in it is none.
    """
    if not isinstance(state, dict) or not state.keys() >= _NAMES:
        msg = f"state: expected what DataLoader.state_dict returns, got {state!r:.200}"
        raise ValueError(msg)
    for name, ours in identity.items():
        value = state.get(name)
        if type(value) is not type(ours) or value != ours:
            msg = f"state: its {name} is {value!r}, the loader's {ours!r}"
            raise ValueError(msg)
    values = {name: state[name] for name in _NAMES}
    for name in _NAMES - {"generator", "dataset_state", "is_read_out"}:
        is_optional = getattr(Position, name) is None
        as_integer(f"state: its {name}", values[name], least=0, optional=is_optional)
    if state["generator"] is not None:
        values["generator"] = torch.tensor(state["generator"], dtype=torch.uint8, device="cpu")
    return Position(**values)
