"""Random crops, flips and cutouts of images, made while the loader copies them into the batch.

The core makes them in csrc/data/augment.h; `paint_image` makes the same ones without it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastamp.data.checks import as_integer, as_size
from fastamp.data.sample_rng import mix

_MAX_STEPS = 8
_CHANNELS = (1, 3, 4)
_END = 2**31  # sizes are below it, so that a draw of 32 bits times a size fits into 63
_NUMBERS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}  # of these bytes, whatever they are
Size: TypeAlias = int | Sequence[int]


class StepKind(IntEnum):
    """The augmentations of images."""

    CROP = 0
    FLIP = 1
    CUTOUT = 2


class AugmentStep(NamedTuple):
    """One augmentation, in pixels. It draws two numbers, y and x, below its bounds.

    The upper left corner of a crop or a hole lies at (y - top, x - left).
    """

    kind: StepKind
    y_bound: int
    """Of a flip: its probability times 2^32."""
    x_bound: int = 1
    top: int = 0
    left: int = 0
    height: int = 0
    """Of the crop or the hole."""
    width: int = 0


class Images(NamedTuple):
    """How to augment the rows of a column that are images: planes of pixels."""

    planes: int
    height: int
    width: int
    pixel_nbytes: int
    steps: tuple[AugmentStep, ...]
    """At most 8."""
    row_shape: tuple[int, ...]
    """Of the augmented images."""


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

    size: Size | None = None
    padding: int = 0

    def __post_init__(self) -> None:
        as_integer("padding", self.padding, least=0, optional=False)
        if self.size is not None:
            object.__setattr__(self, "size", as_size(self.size))

    def step(self, height: int, width: int) -> AugmentStep:
        """Return the crop for images of this size."""
        size: Any = (height, width) if self.size is None else self.size
        padded = height + 2 * self.padding, width + 2 * self.padding
        y_bound, x_bound = padded[0] - size[0] + 1, padded[1] - size[1] + 1
        if min(y_bound, x_bound) < 1 or max(padded) >= _END:
            msg = f"size: {size} does not fit into the padded images, {padded}"
            raise ValueError(msg)
        return AugmentStep(StepKind.CROP, y_bound, x_bound, self.padding, self.padding, *size)


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
        p: Any = self.p
        if not isinstance(p, Real) or not 0 <= float(p) <= 1:
            msg = f"p: expected a number from 0 to 1, got {p!r}"
            raise ValueError(msg)

    def step(self, height: int, width: int) -> AugmentStep:
        """Return the flip, the same for images of any size."""
        del height, width
        return AugmentStep(StepKind.FLIP, round(self.p * 2**32))


@dataclass(frozen=True)
class Cutout:
    """Set a rectangle centred on a random pixel to 0; parts outside of the image are cut off.

    It is the regularisation of DeVries and Taylor (2017).

    Args:
        size: pixels of the rectangle: the side of a square, or (height, width).

    Raises:
        ValueError: a size is below 1.

    Example:
        >>> images = torch.ones(8, 3, 32, 32)
        >>> dataset = fastamp.ArrayDataset(images, augment=[fastamp.Cutout(8)])
        >>> bool((dataset[0][0] == 0).any())
        True
    """

    size: Size

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", as_size(self.size))

    def step(self, height: int, width: int) -> AugmentStep:
        """Return the cutout for images of this size."""
        size: Any = self.size
        return AugmentStep(StepKind.CUTOUT, height, width, size[0] // 2, size[1] // 2, *size)


Augmentation: TypeAlias = RandomCrop | RandomHorizontalFlip | Cutout


def check_augmentations(augment: Any) -> tuple[Augmentation, ...]:
    """Return augmentations as a tuple, or raise an error that names the one that is none."""
    if not isinstance(augment, list | tuple):
        msg = f"augment: expected a list of augmentations, got {augment!r}"
        raise TypeError(msg)
    for i, each in enumerate(augment):
        if not isinstance(each, Augmentation):
            kinds = "RandomCrop, RandomHorizontalFlip or Cutout of fastamp"
            msg = f"augment[{i}]: expected {kinds}, got {each!r}"
            raise TypeError(msg)
    if len(augment) > _MAX_STEPS:
        msg = f"augment: expected at most {_MAX_STEPS} augmentations, got {len(augment)}"
        raise ValueError(msg)
    return tuple(augment)


@lru_cache(maxsize=256)
def plan_images(
    augmentations: tuple[Augmentation, ...], shape: tuple[int, ...], itemsize: int
) -> Images:
    """Return how to augment the rows of an array of images: (N, ..., height, width).

    Raises:
        TypeError: the rows are no images.
        ValueError: they have their channels last, or an augmentation does not fit them.
    """
    if len(shape) < 3 or 0 in shape[1:]:
        msg = "augment: expected images of shape (N, height, width) or (N, channels, height, width)"
        msg += f", got {shape}"
        raise TypeError(msg)
    if len(shape) > 3 and shape[-1] in _CHANNELS and shape[-1] < min(shape[-3:-1]):
        msg = f"augment: expected images of shape (N, channels, height, width), got {shape}: "
        msg += "pass images.permute(0, 3, 1, 2).contiguous(), or with NumPy "
        raise ValueError(msg + "np.ascontiguousarray(images.transpose(0, 3, 1, 2))")
    *lead, height, width = shape[1:]
    planes, steps, size = math.prod(lead), [], (height, width)
    for i, each in enumerate(augmentations):
        try:
            steps.append(each.step(*size))
        except ValueError as error:
            msg = f"augment[{i}].{error}"
            raise ValueError(msg) from None
        if isinstance(each, RandomCrop):
            size = steps[-1].height, steps[-1].width
    return Images(planes, height, width, itemsize, tuple(steps), (*lead, *size))


def paint_image(images: Images, row: Tensor | npt.NDArray[np.generic], key: int) -> Tensor:
    """Return the bytes of the augmented image, in new memory; `key` seeds its random numbers."""
    if isinstance(row, torch.Tensor):
        row = row.contiguous().view(-1).view(torch.uint8).numpy()
    pixels = np.ascontiguousarray(row).reshape(-1).view(_NUMBERS[images.pixel_nbytes])
    planes: Any = pixels.reshape(images.planes, images.height, images.width)
    for s, step in enumerate(images.steps):
        y, x = mix(key + 2 * s + 1) >> 32, mix(key + 2 * s + 2) >> 32
        if step.kind is StepKind.FLIP:
            planes = planes[:, :, ::-1] if y < step.y_bound else planes
            continue
        y, x = y * step.y_bound >> 32, x * step.x_bound >> 32
        if step.kind is StepKind.CROP:
            padding = (0, 0), (step.top, step.top), (step.left, step.left)
            planes = np.pad(planes, padding)[:, y : y + step.height, x : x + step.width]
        else:
            planes, top, left = planes.copy(), y - step.top, x - step.left
            rows = slice(max(top, 0), max(top + step.height, 0))
            planes[:, rows, max(left, 0) : max(left + step.width, 0)] = 0
    return torch.from_numpy(np.array(planes, order="C").view(np.uint8).reshape(-1))
