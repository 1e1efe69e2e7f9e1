"""A tiny job that the bench trains in frameworks."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

import fastamp
from fastamp.bench import frameworks, in_frameworks
from fastamp.bench.__main__ import main
from fastamp.bench.jobs import JobRow
from fastamp.bench.race import Plan


def make_tiny(_device, seed):
    """A layer."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(64, 4, generator=generator), torch.randint(3, (64,), generator=generator)
    options = {"batch_size": 8, "max_norm": 0.1}
    return torch.nn.Linear(4, 3), TensorDataset(x, y), torch.nn.functional.cross_entropy, options


def race_frameworks(names, monkeypatch, capsys):
    """Race frameworks for three blocks, and check that each arm is what its name says."""
    loaders = []
    make_loader = in_frameworks._make_loader

    def keep(loop, *, ours, **options):
        loaders.append(make_loader(loop, ours=ours, **options))
        return loaders[-1]

    monkeypatch.setitem(frameworks.JOBS, "tiny", JobRow(make_tiny))
    monkeypatch.setattr(frameworks, "PLAN", Plan(rounds=8, warmup=2))
    monkeypatch.setattr(in_frameworks, "_make_loader", keep)
    assert main(["frameworks", *names, "--task", "tiny"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{name} " in printed for name in names)
    are_ours = [isinstance(loader, fastamp.DataLoader) for loader in loaders]
    assert are_ours == [False, True] * len(names)
