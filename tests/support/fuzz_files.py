"""Fuzzed: token files and checkpoints."""

from __future__ import annotations

import io
import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.fuzz import Target, same
from support.fuzz_values import OBJECTS, damage

import fastamp
from fastamp.train import CheckpointError


class Tokens(Target):
    """A file of tokens gives the windows that plain NumPy gives, or is refused."""

    errors = (ValueError, TypeError, OSError)
    dtypes = (*OBJECTS, *(lambda v=v: v for v in ("uint8", "<i4", ">u2", np.int64, np.float32)))

    def make(self, rng: random.Random) -> Any:
        tokens = np.arange(rng.randrange(70)).astype(rng.choice(("u1", "u2", "i4", "i8", "f4")))
        suffix, data = rng.choice((".bin", ".npy")), tokens.tobytes()
        if suffix == ".npy":
            file = io.BytesIO()
            np.save(file, tokens)
            data = file.getvalue()
        if rng.random() < 0.7:
            data = damage(data, rng)
        block_size = rng.choice(OBJECTS)() if rng.random() < 0.2 else rng.randrange(1, 9)
        dtype = rng.choice(self.dtypes)() if rng.random() < 0.3 else None
        source = rng.choice(OBJECTS)() if rng.random() < 0.1 else suffix
        header = rng.choice(OBJECTS)() if rng.random() < 0.1 else rng.choice((0, 0, 0, 1, 8, 99))
        second = rng.choice((None, None, None, source, np.arange(9, dtype="u2"), [3]))
        return source, data, second, block_size, dtype, header

    def load(self, subject: None, given: Any) -> fastamp.TokenDataset:
        source, data, second, block_size, dtype, header = given
        if isinstance(source, str):
            path = self.folder / f"tokens{source.encode('ascii', 'ignore').decode()[:9]}"
            path = Path(str(path).replace("\0", ""))
            path.write_bytes(data)
            second = path if second is source else second
            source = path
        if second is not None:
            source = [source, second]
        return fastamp.TokenDataset(source, block_size, dtype, header)

    def use(self, subject: None, given: Any, loaded: fastamp.TokenDataset) -> None:
        n, size = len(loaded), loaded.block_size
        assert n > 0
        for index in (0, n - 1, -1):
            x, y = loaded[index]
            assert x.dtype == y.dtype == torch.int64
            assert same(x[1:], y[:-1])
            assert x.shape == y.shape == (size,)
        batches = list(itertools.islice(fastamp.DataLoader(loaded, 4), 20))
        assert same(batches[0][0][0], loaded[0][0])


class Checkpoint(Target):
    """A checkpoint with damaged bytes resumes the run, or is refused before anything is loaded."""

    errors = (CheckpointError,)
    x = torch.arange(16.0).reshape(8, 2)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.run(torch.nn.Linear(2, 2), 2)
        self.path = folder / "step-00000002.pt"
        self.data = self.path.read_bytes()

    def run(self, model: torch.nn.Module, max_steps: int) -> Any:
        config = fastamp.TrainConfig(
            max_steps=max_steps,
            batch_size=4,
            schedule="constant",
            checkpoint_dir=self.folder,
            precision="16-mixed",
        )
        torch.manual_seed(0)
        return fastamp.fine_tune(model, (self.x, self.x[:, 0].long() % 2), config=config)

    def make(self, rng: random.Random) -> bytes:
        return damage(self.data, rng)

    def fresh(self) -> torch.nn.Module:
        for path in self.folder.iterdir():
            path.unlink()
        return torch.nn.Linear(2, 2)

    def look(self, subject: torch.nn.Module) -> Any:
        numpy = np.random.get_state(legacy=False)  # noqa: NPY002 - what a checkpoint restores
        return subject.state_dict(), numpy, random.getstate(), subject.training

    def load(self, subject: torch.nn.Module, given: bytes) -> Any:
        self.path.write_bytes(given)
        return self.run(subject, 3)

    def use(self, subject: torch.nn.Module, given: bytes, loaded: Any) -> None:
        assert loaded.summary()

    def is_clear(self, error: BaseException) -> bool:
        assert {path.name for path in self.folder.iterdir()} <= {self.path.name}
        return super().is_clear(error) and self.path.name in str(error)


TARGETS = {"tokens": Tokens, "checkpoint": Checkpoint}
