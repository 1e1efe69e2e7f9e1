"""Random crops and flips of a batch of images, by torch's operators on the batch's device."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fastamp.data.arrays import plain_dtype
from fastamp.data.checks import as_integer, as_size
from fastamp.data.sample_rng import Keys, mix

_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By their bytes: pixels are moved, whatever they are, and 0 has the same bits in all dtypes."""


@dataclass(frozen=True)
class RandomCrop:
    """Crop at a random place of the padded image, as torchvision's RandomCrop.

    Args:
        size: pixels of the result: the side of a square, or (height, width). None is the size that
            the images have.
        padding: pixels of 0 to add first, on each side.

    Raises:
        ValueError: a size is below 1, or `padding` below 0.

    Example:
        >>> images = torch.zeros(8, 3, 32, 32, dtype=torch.uint8)
        >>> augment = [fastamp.RandomCrop(28, padding=4)]
        >>> dataset = fastamp.ArrayDataset(images, torch.arange(8), augment=augment)
        >>> dataset[0][0].shape
        torch.Size([3, 28, 28])
    """

    size: int | Sequence[int] | None = None
    padding: int = 0

    def __post_init__(self) -> None:
        as_integer("padding", self.padding, least=0, optional=False)
        if self.size is not None:
            object.__setattr__(self, "size", as_size(self.size))

    def apply(self, images: Tensor, y: Tensor, x: Tensor) -> Tensor:
        """Crop images of (batch, planes, height, width) at the places that 32 bits each draw."""
        padded = pad(images, [self.padding] * 4).contiguous()
        count, planes, rows, columns = padded.shape
        height, width = size = as_size(self.size or images.shape[2:])
        if height > rows or width > columns:
            msg = f"size: {size} does not fit into the padded images, {(rows, columns)}"
            raise ValueError(msg)
        y, x = y * (rows - height + 1) >> 32, x * (columns - width + 1) >> 32
        # Each crop is a window that begins at some pixel of the batch: one row of these.
        span = ((planes - 1) * rows + height - 1) * columns + width
        shape = (max(padded.numel() - span + 1, 0), planes, height, width)
        windows = padded.as_strided(shape, (1, rows * columns, columns, 1))
        begins = (torch.arange(count, device="cpu") * (planes * rows) + y) * columns + x
        return windows.index_select(0, begins.to(images.device, non_blocking=True))


@dataclass(frozen=True)
class RandomHorizontalFlip:
    """Flip left to right with probability `p`, as torchvision's RandomHorizontalFlip.

    Raises:
        ValueError: `p` is not between 0 and 1.

    Example:
        >>> images = torch.tensor([[[1, 2], [3, 4]]], dtype=torch.uint8)
        >>> dataset = fastamp.ArrayDataset(images, augment=[fastamp.RandomHorizontalFlip(p=1.0)])
        >>> dataset[0][0].tolist()
        [[2, 1], [4, 3]]
    """

    p: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            msg = f"p: expected a number from 0 to 1, got {self.p!r}"
            raise ValueError(msg)

    def apply(self, images: Tensor, y: Tensor, _x: Tensor) -> Tensor:
        """Flip those images of (batch, planes, height, width) that the 32 bits `y` draw."""
        rows = torch.nonzero(y < round(self.p * 2**32))[:, 0]
        rows = rows.to(images.device, non_blocking=True)
        return images.index_copy(0, rows, images.index_select(0, rows).flip(3))


Augmentation: TypeAlias = RandomCrop | RandomHorizontalFlip


def check_augmentations(augment: Any, array: Any) -> tuple[Augmentation, ...]:
    """Return the augmentations of an array as a tuple, or raise an error."""
    is_list = isinstance(augment, list | tuple)
    if not is_list or not all(isinstance(each, Augmentation) for each in augment):
        msg = "augment: expected a list of RandomCrop or RandomHorizontalFlip of fastamp, "
        raise TypeError(msg + f"got {augment!r}")
    if not augment:
        return ()
    shape = tuple(array.shape)
    if plain_dtype(array, on_host=False) is None or len(shape) < 3 or 0 in shape[1:]:
        msg = "augment: expected plain numbers of shape (N, height, width) or (N, channels, "
        msg += "height, width), without gradient, "
        raise TypeError(msg + f"got {array.dtype} of shape {shape}")
    if len(shape) > 3 and shape[-1] in (1, 3, 4) and shape[-1] < min(shape[-3:-1]):
        msg = f"augment: expected images of shape (N, channels, height, width), got {shape}: "
        raise ValueError(msg + "pass images.permute(0, 3, 1, 2).contiguous()")
    made = tuple(augment)
    augment_images(made, torch.empty(0, *shape[1:], device="cpu"), np.empty(0, np.uint64))
    return made


def augment_images(augmentations: tuple[Augmentation, ...], images: Tensor, keys: Keys) -> Tensor:
    """Return augmented images; the keys seed the draws of each."""
    count, *lead, height, width = images.shape
    made = images.view(_NUMBERS[images.itemsize]).reshape(count, prod(lead), height, width)
    for i, each in enumerate(augmentations):
        drawn = ((mix(keys + (2 * i + n)) >> 32).astype(np.int64) for n in (1, 2))
        made = each.apply(made, *map(torch.from_numpy, drawn))
    return made.view(images.dtype).reshape(count, *lead, *made.shape[2:])
