"""`fastamp.ImageFolder`: a folder of images for each class, as uint8 pixels of one size."""

import importlib
import math
import os
import random
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from fastamp.data.checks import as_size
from fastamp.data.sample_rng import sample_rng

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images in a folder for each class, as torchvision's ImageFolder: `path/dog/xxx.png`.

    `dataset[i]` is `(image, label)`: a uint8 RGB tensor of shape (3, height, width), and the number
    of the class. As in torchvision, the classes are the sorted names of the folders, images lie in
    them at any depth, links are followed, and the EXIF orientation is ignored. An image is cropped
    to the largest centered part with the aspect ratio of `size`, and resized by torch's antialiased
    bilinear filter. A JPEG is decoded at no higher resolution than is needed, by simplejpeg where
    it is installed. All of this releases the GIL, so that threads help.

    Args:
        path: the folder of the class folders.
        size: height and width of the images, or one number for both.
        random_crop: the least and the largest share of the image's area, as (0.08, 1.0), for a
            random part in place of the centered one: torchvision's RandomResizedCrop.
        flip: flip half of the images left to right. Both draw from `fastamp.sample_rng()`.

    Attributes:
        classes, class_to_idx, samples, imgs, targets: as torchvision's.

    Raises:
        FileNotFoundError: there is no such folder, no class in it, or no image in a class.
        OSError: when an image is read: the file, which is named, is damaged or gone.
        ImportError: Pillow is not installed.
        ValueError: an option is out of range.

    Example:
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> Path("pets/dog").mkdir(parents=True)
        >>> Image.new("RGB", (64, 48)).save("pets/dog/0.png")
        >>> image, label = fastamp.ImageFolder("pets", size=32)[0]
        >>> image.shape, label
        (torch.Size([3, 32, 32]), 0)
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
        pair = random_crop if isinstance(random_crop, list | tuple) else ()
        if random_crop is not None and not (len(pair) == 2 and 0 < pair[0] <= pair[1] <= 1):
            msg = f"random_crop: expected (least, largest) share of the area, got {random_crop!r}"
            raise ValueError(msg)
        if flip not in (True, False):
            msg = f"flip: expected True or False, got {flip!r}"
            raise ValueError(msg)
        if find_module("PIL.Image") is None:
            msg = "Pillow is not installed: pip install 'fastamp[images]'"
            raise ImportError(msg)
        self.random_crop, self.flip = random_crop, flip
        self.root = os.path.expanduser(os.fspath(path))  # noqa: PTH111 - paths as torchvision's
        with os.scandir(self.root) as entries:
            self.classes = sorted(entry.name for entry in entries if entry.is_dir())
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        self.samples = self.imgs = [
            (os.path.join(folder, file), label)  # noqa: PTH118
            for name, label in self.class_to_idx.items()
            for folder, _, files in sorted(os.walk(f"{self.root}/{name}", followlinks=True))
            for file in sorted(files)
            if file.lower().endswith(EXTENSIONS)
        ]
        self.targets = [label for _, label in self.samples]
        empty = self.class_to_idx.keys() - {self.classes[label] for label in self.targets}
        if empty or not self.classes:
            names = ", ".join(sorted(empty)) or "that are its folders"
            msg = f"{self.root}: found no valid file for the classes {names}; "
            raise FileNotFoundError(msg + f"supported extensions are {', '.join(EXTENSIONS)}")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        height, width = self.size
        with open(path, "rb") as file:  # noqa: PTH123 - Path.open takes twice as long
            data = file.read()
        rng = sample_rng().python if self.flip or self.random_crop else None
        try:
            image = find_module("PIL.Image").open(BytesIO(data))
            if self.random_crop is None or rng is None:
                unit = min(image.width / width, image.height / height)
                box = _center(image, max(1, round(width * unit)), max(1, round(height * unit)))
            else:
                box = draw_crop(image, self.random_crop, rng)
            pixels = _decode(image, data, box, self.size)
        except Exception as error:  # Pillow raises errors of many types
            msg = f"{path}: cannot be read as an image: {error}"
            raise OSError(msg) from error
        if pixels.shape[1:] != (height, width):
            pixels = interpolate(pixels[None], (height, width), mode="bilinear", antialias=True)[0]
        if self.flip and rng is not None and rng.random() < 0.5:
            pixels = pixels.flip(2)
        return pixels.contiguous(), label


def _center(image: Any, width: int, height: int) -> tuple[int, ...]:
    """Return left, top, right and bottom of a centered part, no larger than the image."""
    width, height = min(image.width, width), min(image.height, height)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return left, top, left + width, top + height


def draw_crop(image: Any, share: tuple[float, float], rng: random.Random) -> tuple[int, ...]:
    """Return a random part, drawn as by torchvision's RandomResizedCrop."""
    least, most = 3 / 4, 4 / 3  # of width / height
    for _ in range(10):
        area = image.width * image.height * rng.uniform(*share)
        shape = math.exp(rng.uniform(math.log(least), math.log(most)))
        width, height = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < width <= image.width and 0 < height <= image.height:
            left, top = rng.randint(0, image.width - width), rng.randint(0, image.height - height)
            return left, top, left + width, top + height
    return _center(image, round(image.height * most), round(image.width / least))


def _decode(image: Any, data: bytes, box: tuple[int, ...], size: tuple[int, int]) -> Tensor:
    """Return the pixels of a part, of shape (3, height, width), to be resized to this size.

    A JPEG is decoded at the lowest resolution that need not be enlarged, and each edge of the part
    is at the nearest pixel there.
    """
    left, top, right, bottom = box
    most = min((bottom - top) // size[0], (right - left) // size[1])
    scale = next((scale for scale in (8, 4, 2) if scale <= most), 1)
    width, height = image.size
    simplejpeg, pixels = find_module("simplejpeg"), None
    if simplejpeg is not None and image.format == "JPEG" and image.mode in ("RGB", "L"):
        least = {"min_width": -(-width // scale), "min_height": -(-height // scale)}
        with suppress(ValueError):  # Pillow decides what is damaged, with or without simplejpeg
            pixels = simplejpeg.decode_jpeg(data, **least)
    if pixels is None:
        if scale > 1:
            image.draft("RGB", (width // scale, height // scale))
        pixels = np.array(image if image.mode == "RGB" else image.convert("RGB"))
    if len(pixels) < height:
        left, top, right, bottom = ((edge + scale // 2) // scale for edge in box)
    return torch.from_numpy(pixels[top:bottom, left:right]).permute(2, 0, 1)


@cache
def find_module(name: str) -> Any:
    """Return an optional module where it is installed, else None."""
    with suppress(ImportError):
        return importlib.import_module(name)
    return None
