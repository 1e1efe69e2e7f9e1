"""`fastamp.ImageFolder`: a folder of images for each class, as uint8 pixels of one size.

Images are decoded at the resolution that is needed, cropped, and only then resized.
"""

import importlib
import math
import operator
import os
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from io import BytesIO
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from fastamp.data.arrays import index_error
from fastamp.data.checks import as_size
from fastamp.data.sample_rng import sample_rng

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_SCALES = (8, 4, 2, 1)  # that JPEG decoders divide by
# The least and largest width / height of a random crop, and its tries, as torchvision's.
_RATIO = (3 / 4, 4 / 3)
_TRIES = 10


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images in a folder for each class, as torchvision's ImageFolder: `path/dog/xxx.png`.

    `dataset[i]` is `(image, label)`: a uint8 tensor of shape (3, height, width), red, green and
    blue, and the number of the class. Batches are uint8 of (batch, 3, height, width) and int64.

    The classes are the sorted names of the folders, hidden ones too; images lie in them at any
    depth, and links are followed. Images are converted to RGB as by Pillow's `convert("RGB")`, and
    their EXIF orientation is ignored, as by torchvision.

    An image is cropped to the largest centered part with the aspect ratio of `size`, in whole
    pixels, and resized to `size` with torch's antialiased bilinear filter, which differs from
    Pillow's by at most 1. A JPEG that is at least twice as large is decoded at a half, a quarter or
    an eighth of its resolution, the lowest that is enough for `size`. simplejpeg decodes JPEGs
    where it is installed, else Pillow, to the same pixels. All of this releases the GIL, so that
    threads help.

    Args:
        path: the folder of the class folders.
        size: height and width of the images, or one number for both.
        random_crop: the least and the largest share of the image's area, as (0.08, 1.0), for a
            random part in place of the centered one: torchvision's RandomResizedCrop.
        flip: flip half of the images left to right, at random. Random numbers are those of
            `fastamp.sample_rng()`.

    Attributes:
        classes: the names of the classes.
        class_to_idx: the number of each class.
        samples: path and number of the class of each image; `imgs` is the same list.
        targets: the number of the class of each image.

    Raises:
        FileNotFoundError: there is no such folder, no class in it, or no image in a class.
        OSError: when an image is read: the file is damaged (its path is in the message), or gone.
        ImportError: Pillow is not installed.
        ValueError: an option is out of range.

    Example:
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> for name in ("cat", "dog"):
        ...     Path("pets", name).mkdir(parents=True)
        ...     Image.new("RGB", (64, 48)).save(f"pets/{name}/0.png")
        >>> dataset = fastamp.ImageFolder("pets", size=32)
        >>> dataset.classes
        ['cat', 'dog']
        >>> image, label = dataset[1]
        >>> image.shape, label
        (torch.Size([3, 32, 32]), 1)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        size: int | Sequence[int],
        *,
        random_crop: tuple[float, float] | None = None,
        flip: bool = False,
    ) -> None:
        self.size = as_size(size)
        _check_share(random_crop)
        if flip not in (True, False):
            msg = f"flip: expected True or False, got {flip!r}"
            raise ValueError(msg)
        _find_pillow()
        self.random_crop, self.flip = random_crop, flip
        self.root = os.path.expanduser(os.fspath(path))  # noqa: PTH111 - paths as torchvision's
        with os.scandir(self.root) as entries:
            self.classes = sorted(entry.name for entry in entries if entry.is_dir())
        if not self.classes:
            msg = f"Couldn't find any class folder in {self.root}."
            raise FileNotFoundError(msg)
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        self.samples = list(_find_images(self.root, self.classes))
        self.imgs = self.samples
        self.targets = [label for _, label in self.samples]
        empty = sorted(set(self.classes) - {self.classes[label] for label in set(self.targets)})
        if empty:
            msg = f"Found no valid file for the classes {', '.join(empty)}. "
            msg += f"Supported extensions are: {', '.join(EXTENSIONS)}"
            raise FileNotFoundError(msg)

    def __len__(self) -> int:
        return len(self.samples)

    def __repr__(self) -> str:
        count = f"{len(self.samples):,} images of {len(self.classes):,} classes"
        height, width = self.size
        decoder = "simplejpeg" if find_simplejpeg() else "Pillow"
        return f"ImageFolder({self.root!r}: {count}, {height} x {width}, by {decoder})"

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        length, row = len(self.samples), operator.index(index)
        if not -length <= row < length:
            raise index_error(row, length)
        path, label = self.samples[row]
        height, width = self.size
        with open(path, "rb") as file:  # noqa: PTH123 - Path.open takes twice as long
            data = file.read()
        rng = sample_rng().python if self.flip or self.random_crop else None
        try:
            image = open_image(data)
            if self.random_crop is None or rng is None:
                unit = min(image.width / width, image.height / height)
                box = image.center(max(1, round(width * unit)), max(1, round(height * unit)))
            else:
                box = image.draw(self.random_crop, rng)
            part = image.cut(box, height, width)
        except MemoryError:
            raise
        except Exception as error:  # Pillow raises errors of many types
            msg = f"{path}: cannot be read as an image: {error}"
            raise OSError(msg) from error
        pixels = _resize(part, height, width)
        if self.flip and rng is not None and rng.random() < 0.5:
            pixels = pixels.flip(2)
        return pixels, label


def _find_images(root: str, classes: list[str]) -> Iterator[tuple[str, int]]:
    """Yield path and class of all images, in torchvision's order."""
    for label, name in enumerate(classes):
        for folder, _, files in sorted(os.walk(os.path.join(root, name), followlinks=True)):  # noqa: PTH118
            for file in sorted(files):
                if file.lower().endswith(EXTENSIONS):
                    yield os.path.join(folder, file), label  # noqa: PTH118


def _check_share(share: Any) -> None:
    pair = tuple(share) if isinstance(share, Sequence) else ()
    numbers = len(pair) == 2 and all(isinstance(each, Real) for each in pair)
    if share is not None and not (numbers and 0 < pair[0] <= pair[1] <= 1):
        msg = f"random_crop: expected the least and the largest share of the area, got {share!r}"
        raise ValueError(msg)


class ImageFile(NamedTuple):
    """An image whose size is known and whose pixels are not decoded yet."""

    width: int
    height: int
    decode: Callable[[int], npt.NDArray[np.uint8]]
    """Returns pixels of shape (height, width, 3); a JPEG's are divided by a scale, rounded up."""

    def center(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Return left, top, right and bottom of a centered part, no larger than the image."""
        width, height = min(self.width, width), min(self.height, height)
        left, top = (self.width - width) // 2, (self.height - height) // 2
        return left, top, left + width, top + height

    def draw(self, share: tuple[float, float], rng: random.Random) -> tuple[int, int, int, int]:
        """Return a random part, drawn as by torchvision's RandomResizedCrop."""
        least, most = _RATIO
        for _ in range(_TRIES):
            area = self.width * self.height * rng.uniform(*share)
            shape = math.exp(rng.uniform(math.log(least), math.log(most)))
            width, height = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
            if 0 < width <= self.width and 0 < height <= self.height:
                left, top = rng.randint(0, self.width - width), rng.randint(0, self.height - height)
                return left, top, left + width, top + height
        return self.center(round(self.height * most), round(self.width / least))

    def cut(self, box: tuple[int, int, int, int], height: int, width: int) -> Tensor:
        """Return the pixels of a part, to be resized to this height and width, channels last.

        A JPEG is decoded at the lowest resolution that need not be enlarged, and each edge of the
        part is at the nearest pixel there.
        """
        left, top, right, bottom = box
        most = min((right - left) // width, (bottom - top) // height)
        scale = next(s for s in _SCALES if s <= max(most, 1))
        pixels = self.decode(scale)
        if len(pixels) < self.height:
            left, top, right, bottom = ((edge + scale // 2) // scale for edge in box)
        return torch.from_numpy(pixels[top:bottom, left:right])


def _resize(part: Tensor, height: int, width: int) -> Tensor:
    """Return uint8 pixels of (height, width, 3) as a tensor of (3, height, width)."""
    pixels = part.permute(2, 0, 1)
    if pixels.shape[1:] != (height, width):
        pixels = interpolate(pixels[None], (height, width), mode="bilinear", antialias=True)[0]
    return pixels.contiguous()


def open_image(data: bytes) -> ImageFile:
    """Read the size of an image."""
    found = _open_jpeg(data) if data[:2] == b"\xff\xd8" and find_simplejpeg() else None
    if found is not None:
        return found
    image = _find_pillow().open(BytesIO(data))
    return ImageFile(image.width, image.height, partial(_decode_by_pillow, image))


def _open_jpeg(data: bytes) -> ImageFile | None:
    """Read the size of a JPEG that simplejpeg decodes; return None for any other file."""
    try:
        height, width, space, _ = find_simplejpeg().decode_jpeg_header(data)
    except ValueError:
        return None
    most = _find_pillow().MAX_IMAGE_PIXELS  # above it Pillow warns, or refuses
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
        return _decode_by_pillow(_find_pillow().open(BytesIO(data)), scale)
    return pixels


def _decode_by_pillow(image: Any, scale: int) -> npt.NDArray[np.uint8]:
    if scale > 1:
        image.draft("RGB", (image.width // scale, image.height // scale))
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


@cache
def _find_pillow() -> Any:
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
