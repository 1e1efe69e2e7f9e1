"""Jobs of images: `cnn` with crops and flips, `groups` with a rate for each tensor, `images`."""

import atexit
import shutil
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import fastamp
from fastamp.bench import crops, photos
from fastamp.bench.jobs.networks import HELD_OUT, MAX_NORM, find_options

COUNT = 50_000  # images, as in CIFAR-10
PATCHED = 10_000  # images of `groups`
PHOTOS = 256
DECAY = 0.98  # of the learning rate, from a tensor to the one before it


class _Pictures(fastamp.ArrayDataset):
    """Cropped and flipped images; torch's loader reads `by_torch` in their place."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        super().__init__(images, labels, augment=crops.make_augmentations())
        self.by_torch = crops.Samples(images, labels)


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


class _ViT(nn.Module):
    """ViT-tiny for 3x32x32, in patches of 8x8."""

    def __init__(self, layers: int = 12, width: int = 192, heads: int = 3) -> None:
        super().__init__()
        self.patches = nn.Sequential(_FromPixels(), nn.Conv2d(3, width, 8, stride=8))
        self.place = nn.Parameter(0.02 * torch.randn(16, width))
        made = partial(nn.TransformerEncoderLayer, width, heads, 4 * width, dropout=0.0)
        options: dict[str, Any] = {"activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.Sequential(*(made(**options) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        tokens = self.patches(pixels).flatten(2).mT + self.place
        logits: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return logits


def make_groups(_device: str, seed: int) -> tuple[Any, ...]:
    """ViT-tiny with a group and a learning rate for each tensor; batches of 16."""
    images, labels = _draw_pictures(PATCHED + HELD_OUT, seed)
    data = TensorDataset(images[:PATCHED], labels[:PATCHED])
    options = find_options(images[PATCHED:], labels[PATCHED:], 16) | {"optimizer": _decay_rates}
    return _ViT(), data, functional.cross_entropy, options


def _decay_rates(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [*model.parameters()]
    rates = [1e-3 * DECAY**place for place in reversed(range(len(parameters)))]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(parameters, rates, strict=True)]
    return torch.optim.AdamW(groups)
