"""Jobs of images: `cnn` with crops and flips, and `images`, a folder of photographs."""

import atexit
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import fastamp
from fastamp.bench import photos
from fastamp.bench.jobs.networks import HELD_OUT, MAX_NORM, find_options

COUNT = 50_000  # images, as in CIFAR-10
PHOTOS = 256
PADDING = 4
PLACES = 2 * PADDING + 1  # of a crop, in each direction


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
        super().__init__(folder, photos.SIZE)
        self.by_torch = photos.PillowFolder(self.samples)


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
    photos.write_photos(Path(folder), PHOTOS, seed)
    model = _make_convolutions(nn.Conv2d(3, 16, 7, stride=4, padding=3), 16, 32, 64, 64, 64)
    options = {"batch_size": 8, "max_norm": MAX_NORM}
    return model, _Photos(folder), functional.cross_entropy, options
