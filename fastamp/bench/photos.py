"""A folder of photographs, and the usual dataset of one, which reads it with Pillow."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fastamp.metrics.sinks import require

WIDTH, HEIGHT = 500, 375
SIZE, CLASSES = 224, 10


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
