"""Jobs of images: `cnn` with crops and flips, and `images`, a folder of photographs."""

import atexit
import importlib
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import fastamp
from fastamp.bench.jobs.networks import HELD_OUT, MAX_NORM, find_options
from fastamp.metrics.sinks import require

COUNT = 50_000  # images, as in CIFAR-10
PHOTOS = 256
PADDING = 4
PLACES = 2 * PADDING + 1  # of a crop, in each direction
WIDTH, HEIGHT = 500, 375  # of a photograph
SIZE, CLASSES = 224, 10


class _Samples(Dataset[tuple[Tensor, Tensor]]):
    """Images that are augmented one by one."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        size = image.shape[-1]
        drawn = torch.randint(2**31, (3,)).tolist()
        y, x = drawn[0] % PLACES, drawn[1] % PLACES
        image = functional.pad(image, [PADDING] * 4)[:, y : y + size, x : x + size]
        if drawn[2] % 2:
            image = image.flip(2)
        return image, self.labels[index]


class _Pictures(fastamp.ArrayDataset):
    """Cropped and flipped images; torch's loader reads `by_torch` in their place."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        steps: list[Any] = [fastamp.RandomCrop(padding=PADDING), fastamp.RandomHorizontalFlip()]
        super().__init__(images, labels, augment=steps)
        self.by_torch = _Samples(images, labels)


class _Photos(fastamp.ImageFolder):
    """A folder of photographs; torch's loader reads `by_torch` in its place."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, SIZE)
        self.by_torch = PillowFolder(self.samples)


class PillowFolder(Dataset[tuple[Tensor, int]]):
    """The usual dataset: Pillow, with the sizes of torchvision's Resize and CenterCrop."""

    def __init__(self, samples: list[tuple[str, int]]) -> None:
        self.samples = samples
        self.open = importlib.import_module("PIL.Image").open

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        image = self.open(path).convert("RGB")
        width, height = find_size(*image.size)
        image = image.resize((width, height), resample=2)  # bilinear
        left, top = round((width - SIZE) / 2), round((height - SIZE) / 2)
        image = image.crop((left, top, left + SIZE, top + SIZE))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous(), label


def why_none() -> str:
    """Return why there can be no photographs here; "" if there can."""
    try:
        require("PIL.Image", "images")
    except ImportError as error:
        return f"cannot run: {error}"
    return ""


def find_size(width: int, height: int) -> tuple[int, int]:
    """Return the size whose shorter side is SIZE."""
    short = min(width, height)
    return int(SIZE * width / short), int(SIZE * height / short)


def write_photos(folder: Path, count: int, seed: int) -> None:
    """Write JPEGs of about 45 KB: parts of a few scenes, with edges, texture and grain."""
    image = importlib.import_module("PIL.Image")
    rng = np.random.default_rng(seed)
    scenes = []
    for _ in range(min(8, count)):
        scene = np.full((2 * HEIGHT, 2 * WIDTH, 3), 128, np.float32)
        for cell, strength in ((160, 60), (60, 40), (20, 25), (6, 16), (2, 10)):
            shape = (2 * HEIGHT // cell + 2, 2 * WIDTH // cell + 2)
            noise = rng.random((*shape, 1)) + rng.random((*shape, 3)) * 0.2 - 0.6
            layer = image.fromarray(np.uint8(noise * 127 + 128))
            layer = layer.resize((2 * WIDTH, 2 * HEIGHT), resample=3)  # bicubic
            scene += (np.asarray(layer, np.float32) - 128) * (strength / 40)
        scenes.append(scene)
    grain = rng.normal(0, 3, (2 * HEIGHT, 2 * WIDTH, 1)).astype(np.float32)
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]

    def part(whole: Any) -> Any:
        top, left = rng.integers(HEIGHT), rng.integers(WIDTH)
        return whole[top : top + HEIGHT, left : left + WIDTH]

    for number in range(count):
        pixels = part(scenes[rng.integers(len(scenes))]).copy()
        for _ in range(4):
            x, y, radius = rng.integers(WIDTH), rng.integers(HEIGHT), rng.integers(15, 120)
            pixels[(columns - x) ** 2 + (rows - y) ** 2 < radius**2] += rng.normal(0, 35, 3)
        pixels += part(grain)
        path = folder / f"class {number % CLASSES}" / f"{number:05}.jpg"
        path.parent.mkdir(exist_ok=True)
        quality = int(rng.integers(85, 91))
        image.fromarray(np.uint8(pixels.clip(0, 255))).save(path, quality=quality)


class _FromPixels(nn.Module):
    """Turns bytes into numbers around 0."""

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels.float() / 64 - 2


def _make_convolutions(first: nn.Module, *widths: int) -> nn.Sequential:
    """Return convolutions, each but the first of which halves the image."""
    layers = [
        part
        for a, b in pairwise(widths)
        for part in (nn.Conv2d(a, b, 3, stride=2, padding=1), nn.ReLU())
    ]
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
    return nn.Sequential(_FromPixels(), first, nn.ReLU(), *layers, *pool)


def _draw_pictures(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images of 3x32x32 uint8: the pattern of a class, moved, in noise; and the classes."""
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.randint(256, (10, 3, 8, 8), generator=rng).float()
    patterns = functional.interpolate(coarse, scale_factor=4, mode="bilinear").byte()
    images = torch.randint(256, (count, 3, 32, 32), dtype=torch.uint8, generator=rng)
    labels = torch.randint(10, (count,), generator=rng)
    for start in range(0, count, 1000):  # in parts, to save memory
        part = images[start : start + 1000]
        part.div_(2, rounding_mode="floor").add_(patterns[labels[start : start + 1000]] // 2)
    return images, labels


def make_cnn(_device: str, seed: int) -> tuple[Any, ...]:
    """50,000 images of 3x32x32, cropped and flipped; four convolutions, batches of 128."""
    images, labels = _draw_pictures(COUNT + HELD_OUT, seed)
    data = _Pictures(images[:COUNT], labels[:COUNT])
    model = _make_convolutions(nn.Conv2d(3, 16, 3, padding=1), 16, 32, 64, 64)
    options = find_options(images[COUNT:], labels[COUNT:], 128)
    return model, data, functional.cross_entropy, options


def make_images(_device: str, seed: int) -> tuple[Any, ...]:
    """A folder of 256 JPEGs of 500x375, to 3x224x224; five convolutions, batches of 8."""
    folder = tempfile.mkdtemp(prefix="fastamp photos ")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_photos(Path(folder), PHOTOS, seed)
    model = _make_convolutions(nn.Conv2d(3, 16, 7, stride=4, padding=3), 16, 32, 64, 64, 64)
    options = {"batch_size": 8, "max_norm": MAX_NORM}
    return model, _Photos(folder), functional.cross_entropy, options
