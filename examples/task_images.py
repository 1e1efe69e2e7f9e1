"""A folder of photographs as a task: `python -m fastamp.bench examples/task_images.py`.

fastamp's arm reads it by ImageFolder, torch's arm item by item by Pillow, as most programs do.
"""

import atexit
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

import fastamp

PHOTOS = 256
WIDTH, HEIGHT = 500, 375  # of a photograph
SIZE, CLASSES = 224, 10


class PillowFolder(Dataset):
    """The usual dataset: Pillow, with the sizes of torchvision's Resize and CenterCrop."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        image = Image.open(path).convert("RGB")
        width, height = (int(SIZE * side / min(image.size)) for side in image.size)
        image = image.resize((width, height), resample=Image.Resampling.BILINEAR)
        left, top = round((width - SIZE) / 2), round((height - SIZE) / 2)
        image = image.crop((left, top, left + SIZE, top + SIZE))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous(), label


class Photos(fastamp.ImageFolder):
    """A folder of photographs; torch's loader reads `by_torch` in its place."""

    def __init__(self, folder):
        super().__init__(folder, SIZE)
        self.by_torch = PillowFolder(self.samples)


def write_photos(folder, count, seed):
    """Write JPEGs of some 45 KB: a few scenes with structures of all sizes, moved, with grain."""
    rng = np.random.default_rng(seed)
    scenes = np.full((min(8, count), HEIGHT, WIDTH, 3), 128, np.float32)
    for scene in range(len(scenes)):
        for cell, strength in ((160, 60), (60, 40), (20, 25), (6, 16), (2, 10)):
            shape = (HEIGHT // cell + 2, WIDTH // cell + 2)
            noise = rng.random((*shape, 1)) + rng.random((*shape, 3)) * 0.2 - 0.6
            layer = Image.fromarray(np.uint8(noise * 127 + 128))
            layer = layer.resize((WIDTH, HEIGHT), resample=Image.Resampling.BICUBIC)
            scenes[scene] += (np.asarray(layer, np.float32) - 128) * (strength / 40)
    grain = rng.normal(0, 3, (HEIGHT, WIDTH, 1))
    for number in range(count):
        moved = np.roll(scenes[number % len(scenes)], rng.integers(WIDTH, size=2), (0, 1))
        path = folder / f"class {number % CLASSES}" / f"{number:05}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.uint8((moved + grain).clip(0, 255))).save(path, quality=87)


class Net(nn.Sequential):
    """Five convolutions over bytes, each but the first of which halves the image."""

    def __init__(self):
        layers = [nn.Conv2d(3, 16, 7, stride=4, padding=3), nn.ReLU()]
        for before, after in pairwise((16, 32, 64, 64, 64)):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES))

    def forward(self, pixels):
        return super().forward(pixels.float() / 64 - 2)


def make(device, seed):
    folder = Path(tempfile.mkdtemp(prefix="fastamp photos "))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_photos(folder, PHOTOS, seed)
    options = {"batch_size": 8, "max_norm": 1.0}
    return Net(), Photos(folder), nn.functional.cross_entropy, options
