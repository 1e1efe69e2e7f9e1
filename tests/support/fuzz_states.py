"""Fuzzed: the states of loaders, and the options of config and loader."""

from __future__ import annotations

import itertools
import random
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from support.fuzz import OURS, Target, is_raised_by, same
from support.fuzz_values import OBJECTS, PLAIN, mutate
from support.loading import Squares
from support.resumable import VARIANTS, make_loader

import fastamp

TORCH = str(Path(torch.__file__).parent)


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


class Config(Target):
    """`TrainConfig` takes a value or refuses it by its name."""

    options = (*(field.name for field in fields(fastamp.TrainConfig)),)
    values = (
        *OBJECTS,
        *(lambda v=v: v for v in ("adamw", "cosine", "bf16-mixed", "16", 16, 32, "cpu", "cuda:99")),
        *(lambda v=v: v for v in ("meta", "mps", "fsdp", torch.device("cpu"), len, print)),
        fastamp.MetricsTracker,
        lambda: torch.optim.SGD,
        lambda: torch.tensor(1.5),
        lambda: 0.25,
    )

    def make(self, rng: random.Random) -> Any:
        names = rng.sample(self.options, rng.choice((1, 1, 2, 3)))
        return {name: rng.choice(self.values)() for name in names}

    def load(self, subject: None, given: dict[str, Any]) -> fastamp.TrainConfig:
        self.given = given
        return fastamp.TrainConfig(**given)

    def use(self, subject: None, given: Any, loaded: fastamp.TrainConfig) -> None:
        assert loaded.effective_precision in {"32-true", "bf16-mixed", "16-mixed"}
        assert loaded.chosen_device.type == "cpu"
        assert loaded.checkpoint_dir is None or Path(loaded.checkpoint_dir)
        for total in (None, 10) if loaded.schedule == "constant" else (10,):
            assert all(0 <= loaded.lr_factor(n, total) <= 1 for n in (0, 1, 5, 10, 11))

    def is_clear(self, error: BaseException) -> bool:
        named = str(error).partition(":")[0]
        return super().is_clear(error) and named in {*self.given, "loss_fn", "precision"}


class LoaderOptions(Target):
    """`DataLoader` takes what torch's takes, with the same batches, and refuses what it refuses."""

    errors = (Exception,)
    own = ("device", "seed", "shard", "rank", "world_size", "max_bytes")
    options = ("batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn")
    options += ("pin_memory", "drop_last", "timeout", "worker_init_fn", "multiprocessing_context")
    options += ("generator", "prefetch_factor", "persistent_workers", "in_order", *own)
    values = (
        *PLAIN,
        *(lambda v=v: v for v in (3, 4, 50, 10**6, "cpu", "cuda:99", "meta", "spawn", list)),
        lambda: [3, 1, 2],
        lambda: [[3, 1], [2]],
        lambda: [-1, 19],
        lambda: torch.utils.data.SequentialSampler(range(20)),
        lambda: torch.Generator().manual_seed(1),
        lambda: torch.utils.data.default_collate,
        fastamp.BatchCollator,
    )
    x = torch.arange(60.0).reshape(20, 3)

    def make(self, rng: random.Random) -> Any:
        names = rng.sample(self.options, rng.choice((1, 1, 2, 3)))
        given = {name: rng.choice(self.values)() for name in names}
        return rng.choice((self.x, "squares", {"x": self.x})), rng.randrange(2**31), given

    def look(self, subject: None) -> None:
        """Nothing is loaded into anything."""

    def load(self, subject: None, given: Any) -> Any:
        dataset, seed, options = given
        made = Squares(20) if isinstance(dataset, str) else dataset
        self.options_given = options
        plain = fastamp.ArrayDataset(made) if type(made) is dict else made
        stock = {name: value for name, value in options.items() if name not in self.own}
        self.refused = None
        self.expected: Any = None
        try:
            loader = torch.utils.data.DataLoader(plain, **stock)
            self.expected = self.read(loader, seed)
        except Exception as error:  # noqa: BLE001 - torch's, whatever it is
            self.refused = error
        return self.read(fastamp.DataLoader(made, **options), seed)

    def read(self, loader: Any, seed: int) -> Any:
        if type(loader.num_workers) is not int or loader.num_workers != 0:
            return None  # processes are started elsewhere
        torch.manual_seed(seed)
        if isinstance(loader.generator, torch.Generator):
            loader.generator.manual_seed(seed)
        return [batch for _, batch in zip(range(30), loader, strict=False)]

    def use(self, subject: None, given: Any, loaded: Any) -> None:
        # A timeout without workers has no meaning, and a batch may be larger than any dataset.
        texts = ("timeout == 0", "index-sized integer")
        lax = isinstance(self.refused, MemoryError) or any(t in str(self.refused) for t in texts)
        assert self.refused is None or lax, f"torch raises {self.refused!r}"
        if not (lax or {*given[2]} & {*self.own} or loaded is None):
            assert same(loaded, self.expected)

    def is_clear(self, error: BaseException) -> bool:
        given = self.options_given
        if self.refused is not None and (len(given) > 1 or type(error) is type(self.refused)):
            return True
        if "device" in given and error.__traceback__ is not None:  # torch says what is no device
            return True
        return any(name in str(error) for name in given) and is_raised_by(error, OURS)


TARGETS = {
    "loader_state": LoaderState,
    "config": Config,
    "loader_options": LoaderOptions,
}
