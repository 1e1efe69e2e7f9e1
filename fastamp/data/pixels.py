"""The pixels of an image file: decoded at the resolution that is needed, cropped and resized."""

import importlib
import math
import random
from collections.abc import Callable
from functools import cache, partial
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_SCALES = (8, 4, 2, 1)  # that JPEG decoders divide by
_TRIES = 10  # of a random crop that does not fit, as torchvision's


class Box(NamedTuple):
    """A part of an image, in pixels."""

    left: int
    top: int
    width: int
    height: int

    def reduced(self, scale: int) -> "Box":
        """Return the part of an image decoded at 1 / scale, with each edge at its nearest pixel."""
        left, top, width, height = self
        edges = (left, top, left + width, top + height)
        left, top, right, bottom = ((edge + scale // 2) // scale for edge in edges)
        return Box(left, top, right - left, bottom - top)


class ImageFile(NamedTuple):
    """An image whose size is known and whose pixels are not decoded yet."""

    width: int
    height: int
    decode: Callable[[int], npt.NDArray[np.uint8]]
    """Returns pixels of shape (height, width, 3); a JPEG's are divided by a scale, rounded up."""

    def center(self, height: int, width: int, resize: int | None) -> Box:
        """Return the centered part: the largest of this aspect ratio, or what a `resize` leaves."""
        unit = min(self.width / width, self.height / height)
        if resize is not None:
            unit = min(self.width, self.height) / resize
        width = min(self.width, max(1, round(width * unit)))
        height = min(self.height, max(1, round(height * unit)))
        return Box((self.width - width) // 2, (self.height - height) // 2, width, height)

    def draw(
        self, share: tuple[float, float], ratio: tuple[float, float], rng: random.Random
    ) -> Box:
        """Return a random part, drawn as by torchvision's RandomResizedCrop."""
        logs = math.log(ratio[0]), math.log(ratio[1])
        for _ in range(_TRIES):
            area = self.width * self.height * rng.uniform(*share)
            shape = math.exp(rng.uniform(*logs))
            width, height = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
            if 0 < width <= self.width and 0 < height <= self.height:
                left, top = rng.randint(0, self.width - width), rng.randint(0, self.height - height)
                return Box(left, top, width, height)
        width = min(self.width, round(self.height * ratio[1]))
        height = min(self.height, round(self.width / ratio[0]))
        return Box((self.width - width) // 2, (self.height - height) // 2, width, height)

    def cut(self, box: Box, height: int, width: int) -> Tensor:
        """Return the pixels of a part, to be resized to this height and width, channels last.

        A JPEG is decoded at the lowest resolution that need not be enlarged.
        """
        fits = (s for s in _SCALES if box.width // s >= width and box.height // s >= height)
        scale = next(fits, 1)
        pixels = self.decode(scale)
        left, top, width, height = box.reduced(scale) if len(pixels) < self.height else box
        return torch.from_numpy(pixels[top : top + height, left : left + width])


def resize(part: Tensor, row: Tensor) -> None:
    """Write uint8 pixels of (height, width, 3) into a tensor of (3, height, width)."""
    if part.shape[:2] == row.shape[1:]:
        row.copy_(part.permute(2, 0, 1))
        return
    torch.ops.aten._upsample_bilinear2d_aa.out(  # interpolate() has no out=
        part.permute(2, 0, 1)[None], row.shape[1:], False, None, None, out=row[None]
    )


def open_image(data: bytes) -> ImageFile:
    """Read the size of an image."""
    found = _open_jpeg(data) if data[:2] == b"\xff\xd8" and find_simplejpeg() else None
    if found is not None:
        return found
    image = find_pillow().open(BytesIO(data))
    return ImageFile(image.width, image.height, partial(_decode_by_pillow, image))


def _open_jpeg(data: bytes) -> ImageFile | None:
    """Read the size of a JPEG that simplejpeg decodes; return None for any other file."""
    try:
        height, width, space, _ = find_simplejpeg().decode_jpeg_header(data)
    except ValueError:
        return None
    most = find_pillow().MAX_IMAGE_PIXELS  # above it Pillow warns, or refuses
    if space not in {"YCbCr", "Gray", "RGB"} or (most is not None and width * height > most):
        return None
    return ImageFile(width, height, partial(_decode_by_simplejpeg, data, width, height))


def _decode_by_simplejpeg(
    data: bytes, width: int, height: int, scale: int
) -> npt.NDArray[np.uint8]:
    least = {"min_width": -(-width // scale), "min_height": -(-height // scale)}
    try:
        pixels: npt.NDArray[np.uint8] = find_simplejpeg().decode_jpeg(data, **least)
    except ValueError:  # Pillow decides what is damaged, with or without simplejpeg
        return _decode_by_pillow(find_pillow().open(BytesIO(data)), scale)
    return pixels


def _decode_by_pillow(image: Any, scale: int) -> npt.NDArray[np.uint8]:
    if scale > 1:
        image.draft("RGB", (image.width // scale, image.height // scale))
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


@cache
def find_pillow() -> Any:
    """Return PIL.Image, or raise an ImportError that says how to install it."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        msg = f"Pillow cannot be imported ({error}): pip install 'fastamp[images]'"
        raise ImportError(msg) from error


@cache
def find_simplejpeg() -> Any:
    """Return simplejpeg where it is installed, else None."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None
