"""Jobs of small networks on rows of numbers: `mlp`, `tabular` and `rl`."""

import importlib
import importlib.util
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

ROWS, HELD_OUT = 60_000, 2000
MAX_NORM = 1.0
EPISODES, HORIZON, DISCOUNT = 1024, 100, 0.97  # of the agent's memory


def measure_accuracy(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[float]:
    """Return the share of right predictions in each of 20 parts."""
    device = next(model.parameters()).device
    parts = zip(inputs.chunk(20), targets.chunk(20), strict=True)
    shares = [(model(x.to(device)).argmax(-1) == y.to(device)).float().mean() for x, y in parts]
    return torch.stack(shares).tolist()


def find_options(inputs: Tensor, targets: Tensor, batch_size: int) -> dict[str, Any]:
    """Return the options of a classifier that is evaluated on these samples."""
    evaluate = partial(measure_accuracy, inputs=inputs, targets=targets)
    return {"evaluate": evaluate, "batch_size": batch_size, "max_norm": MAX_NORM}


def _make_layers(*widths: int) -> nn.Sequential:
    layers = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def make_mlp(_device: str, seed: int) -> tuple[Any, ...]:
    """60,000 digits of 28x28, moved and with noise; 784-256-10, batches of 256.

    The digits are scikit-learn's, handwritten; without it, patterns drawn at random.
    """
    rng = torch.Generator().manual_seed(seed)
    glyphs, labels = _load_glyphs(rng)
    train = _draw_digits(glyphs[:-200], labels[:-200], ROWS, rng)
    held_out = _draw_digits(glyphs[-200:], labels[-200:], HELD_OUT, rng)
    data, options = TensorDataset(*train), find_options(*held_out, 256)
    return _make_layers(784, 256, 10), data, functional.cross_entropy, options


def _load_glyphs(rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images of 8x8 from 0 to 1 and what they show."""
    if importlib.util.find_spec("sklearn") is not None:
        found = importlib.import_module("sklearn.datasets").load_digits()
        return torch.from_numpy(found.images).float() / 16, torch.from_numpy(found.target).long()
    labels = torch.arange(2000) % 10
    patterns = torch.rand(10, 8, 8, generator=rng)
    return (patterns[labels] + 0.3 * torch.randn(2000, 8, 8, generator=rng)).clip(0, 1), labels


def _draw_digits(
    glyphs: Tensor, labels: Tensor, count: int, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return glyphs three times as large, each at some place of its image, with noise."""
    large = glyphs.repeat_interleave(3, 1).repeat_interleave(3, 2)
    drawn = torch.randint(len(large), (count,), generator=rng)
    places = torch.randint(25, (count,), generator=rng)
    images = 0.1 * torch.randn(count, 28, 28, generator=rng)
    for place in range(25):
        top, left = divmod(place, 5)
        here = (places == place).nonzero().flatten()
        images[here, top : top + 24, left : left + 24] += large[drawn[here]]
    return images.flatten(1), labels[drawn]


def make_tabular(_device: str, seed: int) -> tuple[Any, ...]:
    """60,000 rows of 100 numbers, which a network labels; 100-128-128-10, batches of 128."""
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randn(ROWS + HELD_OUT, 100, generator=rng)
    first, second = (torch.randn(n, m, generator=rng) for n, m in ((100, 32), (32, 10)))
    labels = ((rows @ first).relu() @ second).argmax(1)
    data, options = TensorDataset(rows[:ROWS], labels[:ROWS]), (rows[ROWS:], labels[ROWS:], 128)
    model = _make_layers(100, 128, 128, 10)
    return model, data, functional.cross_entropy, find_options(*options)


class _Values(nn.Module):
    """The value of an action in a state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _make_layers(4, 64, 64, 2)

    def forward(self, state: Tensor, action: Tensor) -> Tensor:
        values: Tensor = self.layers(state).gather(1, action)
        return values


def make_rl(_device: str, seed: int) -> tuple[Any, ...]:
    """An agent's memory of a cart with a pole: values of actions; 4-64-64-2, batches of 64."""
    data = TensorDataset(*_remember(np.random.default_rng(seed)))
    return _Values(), data, functional.smooth_l1_loss, {"batch_size": 64, "max_norm": MAX_NORM}


def _remember(rng: np.random.Generator) -> list[Tensor]:
    """Return states, the action taken in each, and its discounted return."""
    state = rng.uniform(-0.05, 0.05, (4, EPISODES))
    standing = np.ones(EPISODES, bool)
    states, actions, alive = [], [], []
    for _ in range(HORIZON):
        action = rng.integers(2, size=EPISODES)
        states.append(state)
        actions.append(action)
        state = _push(state, np.where(action > 0, 10.0, -10.0))
        standing = standing & (abs(state[0]) < 2.4) & (abs(state[2]) < 0.21)
        alive.append(standing)
    returns = np.zeros((HORIZON + 1, EPISODES))
    for step in reversed(range(HORIZON)):
        returns[step] = alive[step] * (1 + DISCOUNT * returns[step + 1])
    seen = np.concatenate([np.ones((1, EPISODES), bool), np.stack(alive)[:-1]])
    rows = np.stack(states, axis=1)[:, seen].T.astype(np.float32)
    columns = rows, np.stack(actions)[seen, None], returns[:-1].astype(np.float32)[seen, None]
    return [torch.from_numpy(np.ascontiguousarray(column)) for column in columns]


def _push(state: Any, force: Any) -> Any:
    """Return the state 0.02 s later: Barto, Sutton and Anderson (1983), as in Gym's CartPole."""
    place, speed, angle, turn = state
    sine, cosine = np.sin(angle), np.cos(angle)
    push = (force + 0.05 * turn**2 * sine) / 1.1
    bend = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    pull = push - 0.05 * bend * cosine / 1.1
    change = np.stack([speed, pull, turn, bend])
    return np.stack([place, speed, angle, turn]) + 0.02 * change
