"""Random crops, flips and holes of small images with torch's operators: one by one, and in batches.

fastamp's gather is raced against them; `check_augmented` checks the images of all.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset

import fastamp

PADDING, HOLE = 4, 8
PLACES = 2 * PADDING + 1  # of a crop, in each direction
CHECKED = 24  # images


def make_augmentations() -> list[Any]:
    """Return fastamp's augmentations."""
    crop, flip = fastamp.RandomCrop(padding=PADDING), fastamp.RandomHorizontalFlip()
    return [crop, flip, fastamp.Cutout(HOLE)]


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Images that are augmented one by one."""

    def __init__(self, images: Tensor, labels: Tensor, *, hole: int = HOLE) -> None:
        self.images, self.labels, self.hole = images, labels, hole

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        size = image.shape[-1]
        drawn = torch.randint(2**31, (5,)).tolist()
        y, x, top, left = drawn[0] % PLACES, drawn[1] % PLACES, drawn[2] % size, drawn[3] % size
        image = pad(image, [PADDING] * 4)[:, y : y + size, x : x + size]
        if drawn[4] % 2:
            image = image.flip(2)
        if self.hole:
            top, left = top - self.hole // 2, left - self.hole // 2
            image[:, max(top, 0) : top + self.hole, max(left, 0) : left + self.hole] = 0
        return image, self.labels[index]


def augment_batch(images: Tensor) -> Tensor:
    """Return a batch of square images augmented, without a loop over them."""
    count, channels, size, _ = images.shape
    drawn = torch.randint(2**31, (5, count, 1))
    pixels = torch.arange(size)
    rows = drawn[0] % PLACES + pixels
    columns = drawn[1] % PLACES + torch.where(drawn[4] % 2 > 0, pixels.flip(0), pixels)
    padded = pad(images, [PADDING] * 4).view(count, channels, -1)
    places = (rows[:, :, None] * (size + 2 * PADDING) + columns[:, None, :]).view(count, 1, -1)
    result = padded.gather(2, places.expand(-1, channels, -1)).view_as(images)
    from_top, from_left = (pixels - drawn[i] % size + HOLE // 2 for i in (2, 3))
    in_rows, in_columns = ((at >= 0) & (at < HOLE) for at in (from_top, from_left))
    return result.masked_fill_((in_rows[:, :, None] & in_columns[:, None, :])[:, None], 0)


def check_augmented(batches: Iterator[Any], images: Tensor) -> None:
    """Check the first images of a pass, whose labels are their indices.

    Raises:
        AssertionError: an image differs from every possible crop and flip by more than one hole.
    """
    size, batch = images.shape[-1], next(batches, None)
    if batch is None:
        msg = "no batch"
        raise AssertionError(msg)
    for found, label in zip(*(part[:CHECKED].cpu() for part in batch), strict=True):
        windows = pad(images[label], [PADDING] * 4).unfold(1, size, 1).unfold(2, size, 1)
        crops = windows.permute(1, 2, 0, 3, 4).flatten(0, 1)
        differs = (torch.cat([crops, crops.flip(3)]) != found).any(1)
        nearest = differs[differs.flatten(1).sum(1).argmin()].nonzero()
        spans = nearest.amax(0) - nearest.amin(0) if len(nearest) else torch.zeros(2)
        hole = found[:, nearest[:, 0], nearest[:, 1]]
        if spans.max() >= HOLE or hole.any():
            msg = f"image {label}: no crop and flip of it with one hole"
            raise AssertionError(msg)
