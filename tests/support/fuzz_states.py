"""Fuzzed: the states of loaders."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
from support.fuzz import Target, same
from support.fuzz_values import OBJECTS, mutate
from support.loading import Squares
from support.resumable import VARIANTS, make_loader

import fastamp


class Stream(torch.utils.data.IterableDataset):
    """An iterable dataset with a state, which refuses a state that it cannot have."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < 20:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"] if type(state) is dict and type(state.get("at")) is int else 0


class LoaderState(Target):
    """What `DataLoader.load_state_dict` accepts can be read from, to the end, and saved again."""

    errors = (ValueError, TypeError)
    names = (*VARIANTS, "sharded", "a stream")

    def make(self, rng: random.Random) -> Any:
        self.name, self.to_read = rng.choice(self.names), rng.choice((2, 2, 2, 50))
        loader, n = self.fresh(), rng.randrange(4)
        for _ in zip(range(n), loader, strict=False):
            pass
        return mutate(loader.state_dict(), rng, OBJECTS)

    def fresh(self) -> fastamp.DataLoader[Any]:
        if self.name == "sharded":
            return fastamp.DataLoader(Squares(20), 2, shuffle=True, rank=0, world_size=2)
        if self.name == "a stream":
            return fastamp.DataLoader(Stream(), 3)
        return make_loader(self.name)

    def look(self, subject: fastamp.DataLoader[Any]) -> Any:
        sampler = getattr(subject.sampler, "epoch", None)
        generators = [subject.generator, getattr(subject.sampler, "generator", None)]
        drawn = [each and each.get_state() for each in generators]
        return subject.state_dict(), sampler, drawn, torch.get_rng_state()

    def load(self, subject: fastamp.DataLoader[Any], given: Any) -> None:
        subject.load_state_dict(given)

    def use(self, subject: fastamp.DataLoader[Any], given: Any, loaded: None) -> None:
        saved = subject.state_dict()
        again = self.fresh()
        again.load_state_dict(saved)
        assert same(again.state_dict(), saved)
        n = sum(1 for _ in itertools.islice(subject, self.to_read))
        assert n <= 42, "more batches than an epoch has"


TARGETS = {"loader_state": LoaderState}
