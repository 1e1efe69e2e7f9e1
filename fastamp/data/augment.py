"""Random crops, flips and cutouts of images, made while the loader copies them into the batch."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fastamp.data.columns import AugmentStep, Images, StepKind
from fastamp.data.host import augment_image
from fastamp.data.leaves import plain_dtype

_MAX_STEPS = 8
_CHANNELS = (1, 3, 4)
_END = 2**31  # sizes are below it, so that a draw of 32 bits times a size fits into 63
Sizes: TypeAlias = int | Sequence[int]
Fill: TypeAlias = float | Sequence[float]


@dataclass(frozen=True)
class RandomCrop:
    """Crop at a random place of the padded image, as torchvision's RandomCrop.

    Args:
        size: pixels of the result: the side of a square, or (height, width). None is the size that
            the images have.
        padding: pixels to add first: on each side, or (left and right, top and bottom), or (left,
            top, right, bottom).
        fill: the value of the added pixels: a number, or one for each channel.

    Raises:
        ValueError: a size is below 1, a padding below 0, or there are too many numbers.

    Example:
        >>> images = torch.zeros(8, 3, 32, 32, dtype=torch.uint8)
        >>> augment = [fastamp.RandomCrop(28, padding=4)]
        >>> dataset = fastamp.ArrayDataset(images, torch.arange(8), augment=augment)
        >>> dataset[0][0].shape
        torch.Size([3, 28, 28])
    """

    size: Sizes | None = None
    padding: Sizes | None = 0
    fill: Fill = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if self.size is not None:
            _set(self, size=_read_sizes("size", self.size, 2, least=1))
        _set(self, padding=_read_sizes("padding", self.padding or 0, 4, least=0))
        _set(self, fill=_read_fill(self.fill))

    def step(self, height: int, width: int) -> AugmentStep:
        """Return the crop for images of this size."""
        size: Any = (height, width) if self.size is None else self.size
        padding: Any = self.padding
        left, top, right, bottom = padding
        padded = height + top + bottom, width + left + right
        y_bound, x_bound = padded[0] - size[0] + 1, padded[1] - size[1] + 1
        if min(y_bound, x_bound) < 1 or max(padded) >= _END:
            msg = f"size: {size} does not fit into the padded images, {padded}"
            raise ValueError(msg)
        return AugmentStep(StepKind.CROP, y_bound, x_bound, top, left, *size)


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
    """Fill a rectangle centred on a random pixel; parts outside of the image are cut off.

    It is the regularisation of DeVries and Taylor (2017).

    Args:
        size: pixels of the rectangle: the side of a square, or (height, width).
        fill: a number, or one for each channel.

    Raises:
        ValueError: a size is below 1, or there are too many numbers.

    Example:
        >>> images = torch.ones(8, 3, 32, 32)
        >>> dataset = fastamp.ArrayDataset(images, augment=[fastamp.Cutout(8)])
        >>> bool((dataset[0][0] == 0).any())
        True
    """

    size: Sizes
    fill: Fill = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        _set(self, size=_read_sizes("size", self.size, 2, least=1))
        _set(self, fill=_read_fill(self.fill))

    def step(self, height: int, width: int) -> AugmentStep:
        """Return the cutout for images of this size."""
        size: Any = self.size
        return AugmentStep(
            StepKind.CUTOUT, height, width, size[0] // 2, size[1] // 2, size[0], size[1]
        )


Augmentation: TypeAlias = RandomCrop | RandomHorizontalFlip | Cutout
Augmentations: TypeAlias = Sequence[Augmentation] | dict[Any, Sequence[Augmentation]]


def _set(frozen: object, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(frozen, name, value)


def _read_sizes(name: str, value: Any, count: int, *, least: int) -> tuple[int, ...]:
    """Return `count` integers: one or two of them repeated, or all as given."""
    parts = tuple(value) if isinstance(value, Sequence) else (value,)
    whole = all(isinstance(part, Integral) and not isinstance(part, bool) for part in parts)
    if len(parts) not in {1, 2, count} or not whole or not all(least <= p < _END for p in parts):
        counts = " or ".join(map(str, sorted({2, count})))
        msg = f"{name}: expected an integer of at least {least}, or {counts} of them, got {value!r}"
        raise ValueError(msg)
    return tuple(map(int, parts)) * (count // len(parts))


def _read_fill(value: Any) -> Fill:
    parts = tuple(value) if isinstance(value, Sequence) else (value,)
    if not parts or not all(isinstance(part, Real) for part in parts):
        msg = f"fill: expected a number, or one for each channel, got {value!r}"
        raise ValueError(msg)
    return parts if isinstance(value, Sequence) else value


class Augmented(NamedTuple):
    """The augmentations of one array of images, as the core does them."""

    augmentations: tuple[Augmentation, ...]
    channels_last: bool | None
    name: str
    """What errors call the augmentations."""

    def images(self, array: Tensor | npt.NDArray[Any]) -> Images:
        """Return how the core reads and augments the rows of an array.

        Raises:
            TypeError: the array does not hold images in plain memory on the CPU.
            ValueError: the augmentations do not fit them.
        """
        dtype = plain_dtype(array)
        if dtype is None:
            kind = getattr(array, "dtype", type(array).__name__)
            state = ", which requires grad" if getattr(array, "requires_grad", False) else ""
            msg = f"{self.name}: expected plain numbers on the CPU to augment, got {kind}{state}"
            raise TypeError(msg)
        return _plan(self, tuple(array.shape), dtype)

    def apply(self, array: Tensor | npt.NDArray[Any], index: Any, key: int) -> Any:
        """Return row `index` of the array, augmented with a sample's key."""
        images, row = self.images(array), array[operator.index(index)]
        result = augment_image(images, row, key)
        if isinstance(row, np.ndarray):
            return result.numpy().view(row.dtype).reshape(images.row_shape)
        return result.view(row.dtype).view(images.row_shape)


def read_augment(augment: Any, arrays: Any, *, channels_last: bool | None) -> dict[Any, Augmented]:
    """Return the augmentations by the key or the position of their array.

    Raises:
        TypeError: an entry is no augmentation, or its array does not hold images.
        ValueError: they do not fit the images, are too many, or there is no such array.
    """
    parts = arrays if isinstance(arrays, dict) else dict(enumerate(arrays))
    named = {f"augment[{key!r}]": key for key in augment} if isinstance(augment, dict) else {}
    if not isinstance(augment, dict):
        named, augment = {"augment": next(iter(parts))}, {next(iter(parts)): augment}
    found = {}
    for name, key in named.items():
        several = augment[key]
        if key not in parts:
            msg = f"{name}: there is no such array, only {', '.join(map(repr, parts))}"
            raise ValueError(msg)
        if not isinstance(several, list | tuple):
            msg = f"{name}: expected a list of augmentations, got {several!r}"
            raise TypeError(msg)
        for i, each in enumerate(several):
            if not isinstance(each, Augmentation):
                msg = (
                    f"{name}[{i}]: expected RandomCrop, RandomHorizontalFlip or Cutout of fastamp, "
                    f"got {each!r}"
                )
                raise TypeError(msg)
        if len(several) > _MAX_STEPS:
            msg = f"{name}: expected at most {_MAX_STEPS} augmentations, got {len(several)}"
            raise ValueError(msg)
        if several:
            found[key] = Augmented(tuple(several), channels_last, name)
            found[key].images(parts[key])
    return found


@lru_cache(maxsize=256)
def _plan(augmented: Augmented, shape: tuple[int, ...], dtype: torch.dtype) -> Images:
    if len(shape) < 3 or 0 in shape[1:]:
        msg = (
            f"{augmented.name}: expected images of shape (N, ..., height, width), as (N, channels, "
            f"height, width), got {shape}"
        )
        raise TypeError(msg)
    coloured, narrow = len(shape) > len("NHW"), shape[-1] in _CHANNELS
    if augmented.channels_last is None and coloured and narrow and shape[-1] < min(shape[-3:-1]):
        msg = f"channels_last: expected True or False for images of shape {shape[1:]}, got None"
        raise ValueError(msg)
    last = bool(augmented.channels_last) and coloured
    end = len(shape) - last  # the dimension after height and width
    lead, (height, width), tail = shape[1 : end - 2], shape[end - 2 : end], shape[end:]
    channels = (tail or lead[-1:] or (1,))[0]
    planes, pixel_nbytes = math.prod(lead), math.prod(tail) * dtype.itemsize
    steps, fills, size = [], [], (height, width)
    for i, each in enumerate(augmented.augmentations):
        try:
            steps.append(each.step(*size))
            fill = _encode(getattr(each, "fill", 0), channels, dtype)
        except ValueError as error:
            msg = f"{augmented.name}[{i}].{error}"
            raise ValueError(msg) from None
        fills.append(np.resize(fill, (planes, pixel_nbytes)))
        if isinstance(each, RandomCrop):
            size = steps[-1].height, steps[-1].width
    row_shape = (*lead, *size, *tail)
    return Images(planes, height, width, pixel_nbytes, tuple(steps), np.stack(fills), row_shape)


def _encode(fill: Fill, channels: int, dtype: torch.dtype) -> npt.NDArray[np.uint8]:
    """Return the bytes of a fill, one element for each channel."""
    values = [*fill] if isinstance(fill, Sequence) else [fill] * channels
    if len(values) != channels:
        msg = f"fill: expected a number, or one for each of {channels} channels, got {fill!r}"
        raise ValueError(msg)
    rounds = dtype.is_floating_point or dtype.is_complex
    try:
        elements = torch.tensor(values, dtype=dtype)
    except (RuntimeError, OverflowError):
        elements = None
    if elements is None or (not rounds and elements.tolist() != values):
        msg = f"fill: expected what {dtype} can hold, got {fill!r}"
        raise ValueError(msg)
    return elements.view(torch.uint8).numpy()
