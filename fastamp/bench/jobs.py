"""The built-in tasks: one function each, with the contract of users' tasks."""

import atexit
import importlib
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

import fastamp
from fastamp.bench.gpt import MAX_NORM, make_gpt, make_small_gpt
from fastamp.metrics.sinks import require

ROWS, HELD_OUT = 60_000, 2000
STATES = 20_000  # of the agent's memory
NOISE = 3.0  # beside patterns from 0 to 1
PHOTOS = 256
WIDTH, HEIGHT = 500, 375  # of a photograph
SIZE, CLASSES = 224, 10


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


class _PillowFolder(Dataset[tuple[Tensor, int]]):
    """The usual dataset: Pillow, with the sizes of torchvision's Resize and CenterCrop."""

    def __init__(self, samples: list[tuple[str, int]]) -> None:
        self.samples = samples
        self.open = importlib.import_module("PIL.Image").open

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        image = self.open(path).convert("RGB")
        width, height = (int(SIZE * side / min(image.size)) for side in image.size)
        image = image.resize((width, height), resample=2)  # bilinear
        left, top = round((width - SIZE) / 2), round((height - SIZE) / 2)
        image = image.crop((left, top, left + SIZE, top + SIZE))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous(), label


class _Photos(fastamp.ImageFolder):
    """A folder of photographs; torch's loader reads `by_torch` in its place."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, SIZE)
        self.by_torch = _PillowFolder(self.samples)


def why_none() -> str:
    """Return why there can be no photographs here; "" if there can."""
    try:
        require("PIL.Image", "images")
    except ImportError as error:
        return f"cannot run: {error}"
    return ""


def write_photos(folder: Path, count: int, seed: int) -> None:
    """Write JPEGs of some 45 KB: a few scenes with structures of all sizes, moved, with grain."""
    image = importlib.import_module("PIL.Image")
    rng = np.random.default_rng(seed)
    scenes = np.full((min(8, count), HEIGHT, WIDTH, 3), 128, np.float32)
    for place in range(len(scenes)):
        for cell, strength in ((160, 60), (60, 40), (20, 25), (6, 16), (2, 10)):
            shape = (HEIGHT // cell + 2, WIDTH // cell + 2)
            noise = rng.random((*shape, 1)) + rng.random((*shape, 3)) * 0.2 - 0.6
            layer = image.fromarray(np.uint8(noise * 127 + 128))
            layer = layer.resize((WIDTH, HEIGHT), resample=3)  # bicubic
            scenes[place] += (np.asarray(layer, np.float32) - 128) * (strength / 40)
    grain = rng.normal(0, 3, (HEIGHT, WIDTH, 1))
    for number in range(count):
        moved = np.roll(scenes[number % len(scenes)], rng.integers(WIDTH, size=2), (0, 1))
        path = folder / f"class {number % CLASSES}" / f"{number:05}.jpg"
        path.parent.mkdir(exist_ok=True)
        image.fromarray(np.uint8((moved + grain).clip(0, 255))).save(path, quality=87)


class _Net(nn.Sequential):
    """Five convolutions over bytes, each but the first of which halves the image."""

    def __init__(self) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, 16, 7, stride=4, padding=3), nn.ReLU()]
        for before, after in pairwise((16, 32, 64, 64, 64)):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    def forward(self, pixels: Tensor) -> Tensor:
        logits: Tensor = super().forward(pixels.float() / 64 - 2)  # type: ignore[no-untyped-call]
        return logits


def make_images(_device: str, seed: int) -> tuple[Any, ...]:
    """A folder of 256 JPEGs of 500x375, to 3x224x224; five convolutions, batches of 8."""
    folder = tempfile.mkdtemp(prefix="fastamp photos ")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_photos(Path(folder), PHOTOS, seed)
    options = {"batch_size": 8, "max_norm": MAX_NORM}
    return _Net(), _Photos(folder), functional.cross_entropy, options


MAIN = "gpt"
JOBS: dict[str, Callable[[str, int], Any]] = {
    MAIN: make_gpt,
    "small-gpt": make_small_gpt,
    "mlp": make_mlp,
    "images": make_images,
    "rl": make_rl,
}


def describe(name: str) -> str:
    """Return what a built-in task trains, in a line."""
    return " ".join(str(JOBS[name].__doc__).split())
