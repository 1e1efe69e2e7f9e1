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


class DrawingLoader:
    """Makes its iterator, and draws, when a pass begins or its state is taken.

    torchdata's StatefulDataLoader does the same.
    """

    def __init__(self, batches: list[object]) -> None:
        self.batches, self.begun = batches, False
        self.place, self.ended = 0, False

    def _begin(self) -> None:
        if not self.begun:
            torch.rand(1)
        self.begun = True

    def __iter__(self):
        self._begin()
        if self.ended:
            self.place, self.ended, self.begun = 0, False, False
            self._begin()
        return self._rest()

    def _rest(self):
        while self.place < len(self.batches):
            self.place += 1
            yield self.batches[self.place - 1]
        self.ended = True

    def state_dict(self):
        self._begin()
        return {"place": self.place, "ended": self.ended}

    def load_state_dict(self, state):
        self.place, self.ended, self.begun = state["place"], state["ended"], False
