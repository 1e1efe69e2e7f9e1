"""The built-in tasks: one function each, with the contract of users' tasks."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fastamp.bench.gpt import MAX_NORM, make_gpt, make_small_gpt

ROWS, HELD_OUT = 60_000, 2000
STATES = 20_000  # of the agent's memory
NOISE = 3.0  # beside patterns from 0 to 1


def measure_accuracy(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[float]:
    """Return the share of right predictions in each of 20 parts."""
    device = next(model.parameters()).device
    parts = zip(inputs.chunk(20), targets.chunk(20), strict=True)
    shares = [(model(x.to(device)).argmax(-1) == y.to(device)).float().mean() for x, y in parts]
    return torch.stack(shares).tolist()


def make_mlp(_device: str, seed: int) -> tuple[Any, ...]:
    """60,000 images of 28x28, patterns of ten classes in noise; 784-256-10, batches of 256."""
    rng = torch.Generator().manual_seed(seed)
    patterns = torch.rand(10, 784, generator=rng)
    labels = torch.randint(10, (ROWS + HELD_OUT,), generator=rng)
    images = torch.randn(len(labels), 784, generator=rng).mul_(NOISE).add_(patterns[labels])
    evaluate = partial(measure_accuracy, inputs=images[ROWS:], targets=labels[ROWS:])
    options = {"evaluate": evaluate, "batch_size": 256, "max_norm": MAX_NORM}
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    data = TensorDataset(images[:ROWS], labels[:ROWS])
    return model, data, functional.cross_entropy, options


class _Values(nn.Module):
    """The value of an action in a state."""

    def __init__(self) -> None:
        super().__init__()
        pairs = pairwise((4, 64, 64, 2))
        layers = [part for pair in pairs for part in (nn.Linear(*pair), nn.ReLU())]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, state: Tensor, action: Tensor) -> Tensor:
        values: Tensor = self.layers(state).gather(1, action)
        return values


def make_rl(_device: str, seed: int) -> tuple[Any, ...]:
    """An agent's memory of 20,000 states, actions and returns; 4-64-64-2, batches of 64."""
    rng = torch.Generator().manual_seed(seed)
    states = torch.randn(STATES, 4, generator=rng)
    actions = torch.randint(2, (STATES, 1), generator=rng)
    good = (states @ torch.randn(4, 2, generator=rng)).gather(1, actions)
    data = TensorDataset(states, actions, good.sigmoid())
    return _Values(), data, functional.smooth_l1_loss, {"batch_size": 64, "max_norm": MAX_NORM}


MAIN = "gpt"
JOBS: dict[str, Callable[[str, int], Any]] = {
    MAIN: make_gpt,
    "small-gpt": make_small_gpt,
    "mlp": make_mlp,
    "rl": make_rl,
}
