"""Random crops and flips of small images with torch's operators: one by one, and in batches.

fastamp's loader is raced against them; `check_augmented` checks the images of all.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

import fastamp

PADDING = 4
PLACES = 2 * PADDING + 1  # of a crop, in each direction
CHECKED = 24  # images


def make_augmentations() -> list[Any]:
    """Return fastamp's augmentations."""
    return [fastamp.RandomCrop(padding=PADDING), fastamp.RandomHorizontalFlip()]


class Samples(Dataset[tuple[Tensor, Tensor]]):
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
        image = pad(image, [PADDING] * 4)[:, y : y + size, x : x + size]
        if drawn[2] % 2:
            image = image.flip(2)
        return image, self.labels[index]


def augment_batch(images: Tensor) -> Tensor:
    """Return a batch of square images augmented, without a loop over them."""
    count, channels, size, _ = images.shape
    drawn = torch.randint(2**31, (3, count, 1))
    pixels = torch.arange(size)
    rows = drawn[0] % PLACES + pixels
    columns = drawn[1] % PLACES + torch.where(drawn[2] % 2 > 0, pixels.flip(0), pixels)
    padded = pad(images, [PADDING] * 4).view(count, channels, -1)
    places = (rows[:, :, None] * (size + 2 * PADDING) + columns[:, None, :]).view(count, 1, -1)
    return padded.gather(2, places.expand(-1, channels, -1)).view_as(images)


def check_augmented(batches: Iterator[Any], images: Tensor) -> None:
    """Check the first images of a pass, whose labels are their indices.

    Raises:
        AssertionError: an image differs from every possible crop and flip.
    """
    size, batch = images.shape[-1], next(batches, None)
    if batch is None:
        msg = "no batch"
        raise AssertionError(msg)
    for found, label in zip(*(part[:CHECKED].cpu() for part in batch), strict=True):
        windows = pad(images[label], [PADDING] * 4).unfold(1, size, 1).unfold(2, size, 1)
        crops = windows.permute(1, 2, 0, 3, 4).flatten(0, 1)
        if not (torch.cat([crops, crops.flip(3)]) == found).flatten(1).all(1).any():
            msg = f"image {label}: no crop and flip of it"
            raise AssertionError(msg)
