"""What a model is trained on: passes over data of any kind, with a position to resume at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, IterableDataset

from fastamp.data import DataLoader
from fastamp.data.arrays import is_arrays
from fastamp.data.structure import map_tensors
from fastamp.train.checkpoint import rng_state, set_rng_state

if TYPE_CHECKING:
    import torch

    from fastamp.train.config import TrainConfig

__all__ = ["Batches", "count_samples"]


class Batches:
    """Batches on a device, of a Dataset, tensors, a loader or an iterable of batches.

    A loader with `state_dict` and `load_state_dict`, as fastamp's, resumes by itself. Of any other
    iterable a resumed pass is begun anew, with the random numbers that it began with, and what was
    consumed is passed over: it must yield the same batches again.

    Args:
        name: of the argument, for errors.
        data: what the user gave.
        config: says how a Dataset or tensors are loaded.
        shuffle: whether they are shuffled.

    Raises:
        TypeError: it is nothing of these.
    """

    def __init__(self, name: str, data: Any, config: TrainConfig, *, shuffle: bool) -> None:
        self._name, self._device = name, config.chosen_device
        self._loader = _make_loader(data, config, shuffle=shuffle)
        if not isinstance(self._loader, Iterable):
            kinds = "a Dataset, tensors, a DataLoader or an iterable of batches"
            msg = f"{name}: expected {kinds}, got {type(data).__name__}"
            raise TypeError(msg)
        self._is_stateful = _has_state(self._loader)
        self.n_consumed = 0
        """Batches of this pass."""
        self._began: dict[str, Any] | None = None
        self._resumed = False

    def __len__(self) -> int:
        """Return the batches of a pass; raises a TypeError where that is not known."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass, or go on with the one that a loaded state was in."""
        batches = self._resume() if self._resumed else self._begin()
        for batch in batches:
            self.n_consumed += 1
            yield map_tensors(lambda t: t.to(self._device, non_blocking=True), batch)
        if not self.n_consumed:
            msg = f"{self._name}: no batch in this pass; an iterator, too, can be passed only once"
            raise ValueError(msg)
        self.n_consumed, self._began = 0, None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch taken."""
        own = self._loader.state_dict() if self._is_stateful else None
        return {"n_consumed": self.n_consumed, "began": self._began, "loader": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass begin at a position."""
        if self._is_stateful:
            self._loader.load_state_dict(state["loader"])
        self.n_consumed, self._began = state["n_consumed"], state["began"]
        self._resumed = self.n_consumed > 0

    def _begin(self) -> Iterator[Any]:
        if not self._is_stateful:
            self._began = rng_state(self._device)
            generator = getattr(self._loader, "generator", None)
            self._began["loader"] = generator and generator.get_state()
        return iter(self._loader)

    def _resume(self) -> Iterator[Any]:
        self._resumed = False
        if self._began is None:
            return iter(self._loader)
        now = rng_state(self._device)
        set_rng_state(self._began, self._device)
        if self._began["loader"] is not None:
            self._loader.generator.set_state(self._began["loader"])
        batches: Iterator[Any] = iter(self._loader)
        n_passed = sum(1 for _ in islice(batches, self.n_consumed))
        set_rng_state(now, self._device)
        if n_passed < self.n_consumed:
            wanted = f"the checkpoint was written after {self.n_consumed}"
            msg = f"{self._name}: ended after {n_passed} batches, and {wanted}"
            raise ValueError(msg)
        return batches


def _make_loader(data: Any, config: TrainConfig, *, shuffle: bool) -> Any:
    is_mapped = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    is_dataset = isinstance(data, Dataset) or (
        is_mapped and not isinstance(data, (list, tuple, dict))
    )
    if not (is_dataset or is_arrays(data)):
        return data
    return DataLoader(
        data,
        config.batch_size,
        shuffle=shuffle and not isinstance(data, IterableDataset),
        num_workers=config.num_workers,
        device=config.chosen_device,
        seed=config.seed,
    )


def _has_state(loader: Any) -> bool:
    if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        return False
    try:
        loader.state_dict()
    except TypeError:  # of a loader whose dataset has none
        return False
    return True


def count_samples(batch: Any) -> int:
    """Return the length of the first tensor in a batch, 1 if there is none."""
    lengths: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        lengths.append(len(tensor) if tensor.ndim else 1)
        return tensor

    map_tensors(note, batch)
    return lengths[0] if lengths else 1
