"""A tiny run with all that a checkpoint has to keep, for tests and the processes they kill."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch

import fastamp

CURVES = ("train_loss", "val_loss", "grad_norm", "loss_scale", "lr")


def make_data(n=96):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 8, generator=generator)
    return x, (x.sum(dim=1) > 0).long()


def make_model():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = [torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)]
        return torch.nn.Sequential(*layers)


def loud(output, target):
    """A loss whose gradients overflow until the loss scale has come down."""
    return 1000 * torch.nn.functional.cross_entropy(output, target)


def run(folder=None, data=None, model=None, **fields):
    """Train with a live scaler that overflows at first, dropout, accumulation and a schedule."""
    settings = {"max_steps": 40, "batch_size": 8, "accumulate": 2, "warmup_steps": 5, "lr": 0.01}
    settings |= {"precision": "16-mixed", "checkpoint_every": 3, "checkpoint_dir": folder}
    settings |= {} if "loss_fn" in fields else {"loss_fn": loud}
    config = fastamp.TrainConfig(**(settings | fields))
    model = make_model() if model is None else model
    data = make_data() if data is None else data
    return model, fastamp.fine_tune(model, data, make_data(20), config)


def outcome(model, result):
    """Return all that two runs must have in common to the bit."""
    weights = [tensor.numpy().tobytes() for tensor in model.state_dict().values()]
    curves = [part.tobytes() for name in CURVES for part in getattr(result, name)]
    return [*weights, *curves, result.steps, result.skipped_steps]


def train_to_the_end(folder, report, fields):
    """Run in a process of its own, and write down what came of it."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    np.save(report, np.array(outcome(*run(folder, **fields)), dtype=object), allow_pickle=True)
    Path(report).rename(Path(report).with_suffix(".done"))
