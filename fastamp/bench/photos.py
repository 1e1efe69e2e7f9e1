"""The race over a folder of photographs: Pillow in processes and in threads, and ImageFolder.

A visit is a pass over all of them, the start of its processes or threads included.
"""

import argparse
import atexit
import importlib
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from timeit import timeit
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import fastamp
from fastamp.bench.environment import count_cores
from fastamp.bench.record import PLAIN, Case
from fastamp.metrics.sinks import require

Batches: TypeAlias = Iterable[Any]  # starts again for each pass

COUNT, WIDTH, HEIGHT = 2000, 500, 375
SIZE, BATCH_SIZE, CLASSES = 224, 64, 10
WORKERS = (0, 1, 2, 4)  # of torch's loader
CHECKED = 3  # batches of each arm
TOLERANCE = 4.0  # of the mean difference: crops and filters differ by half a pixel


class TorchLoader(DataLoader[Any]):
    """torch's loader, without its warning of more workers than cores."""

    def check_worker_number_rationality(self) -> None:
        """Skip the warning."""


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


def make_loaders(seed: int) -> dict[str, Batches]:
    """Write photographs and return their loaders, after a check: torch's best one comes first."""
    folder = tempfile.mkdtemp(prefix="fastamp photos ")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_photos(Path(folder), COUNT, seed)
    ours = fastamp.ImageFolder(folder, SIZE)
    pillow = PillowFolder(ours.samples)
    loaders: dict[str, Batches] = {
        f"torch, {n} workers": TorchLoader(pillow, BATCH_SIZE, num_workers=n) for n in WORKERS
    }
    best = min(loaders, key=lambda name: timeit(lambda: deque(loaders[name], 0), number=1))
    found = {best: loaders[best]}
    for name, dataset in {PLAIN: pillow, "fastamp": ours}.items():
        options: dict[str, Any] = {"num_workers": count_cores(), "worker": "thread"}
        found[name] = fastamp.DataLoader(dataset, BATCH_SIZE, **options)
        check(found[name], found[best])
    return found


def make_case(args: argparse.Namespace) -> Case:
    """A folder of 2,000 JPEGs of 500x375 to 3x224x224 on the CPU, batches of 64.

    Torch reads them with Pillow, in as many processes as are fastest. Plain reads them with
    Pillow in fastamp's threads. Fastamp is ImageFolder in threads.
    """
    loaders = make_loaders(args.seed)
    return Case(
        arms={name: partial(deque[Any], batches, 0) for name, batches in loaders.items()},
        amounts={"images/s": COUNT},
    )


def check(batches: Batches, expected: Batches) -> None:
    """Compare the first batches of two passes.

    Raises:
        AssertionError: they differ by more than the crops and filters do, or are too few.
    """
    for found, wanted in zip(*(islice(b, CHECKED) for b in (batches, expected)), strict=True):
        torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0)
        apart = (found[0].float() - wanted[0].float()).abs().mean().item()
        if apart > TOLERANCE:
            msg = f"the images differ by {apart:.1f} of 255 in the mean"
            raise AssertionError(msg)
