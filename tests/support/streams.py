"""Iterable datasets, and a loader with a state, for the tests of every loader."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import IterableDataset

if TYPE_CHECKING:
    from collections.abc import Iterable


class Stream(IterableDataset):
    """Items one after the other, and then the error, if there is one."""

    def __init__(self, items: Iterable[object], error: Exception | None = None) -> None:
        self.items, self.error = items, error

    def __iter__(self):
        yield from self.items
        if self.error is not None:
            raise self.error


class NoisyStream(Stream):
    """Pairs of a tensor, with noise from every generator of the process, and a target."""

    def __iter__(self):
        for x, y in self.items:
            noise = random.random() + np.random.rand()  # noqa: NPY002 - the program's
            yield x + torch.randn(()) + noise, y


class StatefulLoader:
    """A loader of another library, with a position."""

    def __init__(self, batches: list[object]) -> None:
        self.batches, self.place = batches, 0

    def __iter__(self):
        while self.place < len(self.batches):
            self.place += 1
            yield self.batches[self.place - 1]
        self.place = 0

    def __len__(self) -> int:
        return len(self.batches)

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]
