"""Batches of any kind of data, with a position to resume at."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from fastamp.data import ArrayDataset, DataLoader
from fastamp.data.datasets import count_rows
from fastamp.data.loader import find_share_of
from fastamp.data.order import find_samplers
from fastamp.data.structure import map_tensors
from fastamp.train.config import TrainConfig
from fastamp.train.random_state import rng_state, set_rng_state
from fastamp.train.ranks import Ranks


class Batches:
    """Batches on a device, each with the number of its samples.

    A loader with `state_dict` and `load_state_dict`, as fastamp's, resumes within a pass. Any other
    iterable begins its next pass.

    A Dataset or tensors are divided among the ranks. Without `shuffle`, samples that pad a rank's
    share do not count.

    Raises:
        TypeError: `data` is no Dataset, tensors or iterable.
        ValueError: it has no samples.
    """

    def __init__(
        self, name: str, data: Any, config: TrainConfig, ranks: Ranks, *, shuffle: bool
    ) -> None:
        self._name, self._device, self._n_ranks = name, config.chosen_device, ranks.count
        self.loader: Any = _make_loader(name, data, config, ranks, shuffle=shuffle)
        if not hasattr(self.loader, "__iter__"):
            kinds = "a Dataset, tensors, a DataLoader or an iterable of batches"
            msg = f"{name}: expected {kinds}, got {type(data).__name__}"
            raise TypeError(msg)
        share = find_share_of(self.loader)
        self.is_shared, self._n_own = share is not None, sys.maxsize
        if share is not None and not shuffle:  # without the padding of its share
            self._n_own = len(range(share.rank, len(self.loader.dataset), share.ranks))
        self.has_state = isinstance(self.loader, DataLoader)
        """Whether the loader can resume within a pass."""
        if self.has_state and shuffle and config.checkpoint_dir is not None:
            self.loader.state_dict()  # which refuses a position that cannot be known
        if not self.has_state:
            with suppress(AttributeError, TypeError):  # a loader without a state, or its dataset
                self.has_state = self.loader.state_dict() is not None
        self.n_consumed = 0
        """Batches of this pass."""
        self._is_resumed = False
        self._batches: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        """Start a pass, or continue the one of a loaded state."""
        n_left, n_empty = self._n_own, 0
        # Held, as its end would end the epoch: a run that stops within one may be made longer.
        self._batches = self._start()
        for batch in self._batches:
            self.n_consumed += 1
            lengths: list[int] = []

            def move(tensor: torch.Tensor, lengths: list[int] = lengths) -> torch.Tensor:
                lengths.append(len(tensor) if tensor.ndim else 1)
                # On the CPU a batch may be read at once.
                return tensor.to(self._device, non_blocking=self._device.type != "cpu")

            moved, n = map_tensors(move, batch), count_samples(batch, lengths)
            if 0 < n_left < n:
                moved = map_tensors(partial(_first, n_left), moved)
            n_empty += not n
            n = min(n, n_left)
            n_left -= n
            yield moved, n
        if self.n_consumed == n_empty:
            msg = f"{self._name}: no sample in this pass; an iterator can be read only once"
            raise ValueError(msg)
        self.n_consumed, self._batches = 0, iter(())

    @property
    def can_resume(self) -> bool:
        """Whether a checkpoint that is written now can be resumed: in a pass it needs a state."""
        return self.has_state or not self.n_consumed

    @property
    def n_batches(self) -> int | None:
        """Batches in a pass; None if the loader has no length."""
        try:
            return len(self.loader)
        except TypeError:
            return None

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, or else its samplers, and the dataset which epoch comes next.

        So do Hugging Face's Trainer and Lightning. A resumed pass is told its own epoch again.
        """
        has_own = callable(getattr(self.loader, "set_epoch", None))
        told = [self.loader] if has_own else find_samplers(self.loader)
        for one in (*told, getattr(self.loader, "dataset", None)):
            if callable(getattr(one, "set_epoch", None)):
                one.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch delivered."""
        loader = self.loader.state_dict() if self.has_state else None
        return {"n_consumed": self.n_consumed, "n_ranks": self._n_ranks, "loader": loader}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise a ValueError unless this kind of data can resume; a loader checks its own state."""
        n_ranks = state["n_ranks"]
        if n_ranks != self._n_ranks and state["n_consumed"] and not self.is_shared:
            msg = f"{n_ranks} ranks wrote it within a pass over loaders of their own: use as many"
            raise ValueError(msg)
        if (state["loader"] is None) is self.has_state:
            states = ("resumes by itself", "has no state of it"), ("has no state", "has one")
            here, there = states[not self.has_state]
            msg = f"{self._name} {here}, and the checkpoint {there}"
            raise ValueError(msg)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass start at a position."""
        self.n_consumed = state["n_consumed"]
        if self.has_state:
            self.loader.load_state_dict(state["loader"])
            if not self.n_consumed:  # torchdata's loader draws here for the pass that has ended
                self.loader.state_dict()
        self._is_resumed = self.has_state and self.n_consumed > 0

    def _start(self) -> Iterator[Any]:
        """Begin a pass; one that resumes has drawn its random numbers when it began at first."""
        if not self._is_resumed:
            return iter(self.loader)
        self._is_resumed, rng = False, rng_state([self._device])
        batches: Iterator[Any] = iter(self.loader)
        set_rng_state(rng, [self._device])
        return batches


def count_samples(batch: Any, lengths: list[int]) -> int:
    """Return how many samples a batch has, given the lengths of all tensors in it.

    That is the length of its first column that is a tensor. Where every column is a list, these
    are columns in turn if all tensors are equally long; else they hold a value for each sample, as
    images or sequences of a size of their own, or a mapping.
    """
    columns = [*batch.values()] if isinstance(batch, Mapping) else batch
    columns = columns if isinstance(columns, (list, tuple)) else [columns]
    for column in columns:
        if isinstance(column, torch.Tensor):
            return len(column) if column.ndim else 1
    lists = [column for column in columns if isinstance(column, (list, tuple))]
    are_samples = len(set(lengths)) > 1 or any(isinstance(x, Mapping) for c in lists for x in c)
    return len(lists[0]) if lists and are_samples else next(iter(lengths), 1)


def _first(n: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:n] if tensor.ndim else tensor


def _make_loader(name: str, data: Any, config: TrainConfig, ranks: Ranks, *, shuffle: bool) -> Any:
    if isinstance(data, (tuple, dict)):
        count_rows((*data,) if isinstance(data, tuple) else data, name)
        data = ArrayDataset(*data) if isinstance(data, tuple) else ArrayDataset(data)
    if not (hasattr(data, "__getitem__") or isinstance(data, Dataset)):
        return data
    if not isinstance(data, IterableDataset) and hasattr(data, "__len__") and not len(data):
        msg = f"{name}: has no samples"
        raise ValueError(msg)
    is_shared = ranks.mode is not None and not isinstance(data, IterableDataset)
    return DataLoader(
        data,
        config.batch_size,
        shuffle=shuffle and not isinstance(data, IterableDataset),
        num_workers=config.num_workers,
        shard=is_shared,
        device=config.chosen_device,
        seed=config.seed,
    )
