"""A tiny job that the bench trains in frameworks."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

import fastamp
from fastamp.bench import frameworks
from fastamp.bench.__main__ import main
from fastamp.bench.race import Plan


def make_tiny(_device, seed):
    """A layer."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(64, 4, generator=generator), torch.randint(3, (64,), generator=generator)
    options = {"batch_size": 8, "max_norm": 0.1}
    return torch.nn.Linear(4, 3), TensorDataset(x, y), torch.nn.functional.cross_entropy, options


def race_frameworks(names, monkeypatch, capsys):
    """Race frameworks for three blocks, and hold that the arms are what they are called."""
    sides = []

    class Side(frameworks.Side):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            sides.append(self)

    monkeypatch.setitem(frameworks.JOBS, "tiny", make_tiny)
    monkeypatch.setattr(frameworks, "PLAN", Plan(rounds=8, warmup=2))
    monkeypatch.setattr(frameworks, "Side", Side)
    assert main(["frameworks", *names, "--task", "tiny"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in names)
    assert [side.ours for side in sides] == [False, True] * len(names)
    assert all(isinstance(side.loader, fastamp.DataLoader) is side.ours for side in sides)
