"""`fastamp.ImageFolder`: a folder of images for each class, as uint8 pixels of one size."""

import operator
import os
from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fastamp.data.checks import as_integer
from fastamp.data.columns import index_error
from fastamp.data.pixels import find_pillow, find_simplejpeg, open_image, resize
from fastamp.data.sample_rng import sample_rng

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class DamagedImageError(OSError):
    """A file cannot be read as an image."""


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
    where it is installed, else Pillow, to the same pixels: see `decoder`. All of this releases the
    GIL, so that threads help.

    Args:
        path: the folder of the class folders.
        size: height and width of the images, or one number for both.
        resize: resize the shorter side to this number of pixels, and crop the center: `size=224,
            resize=256` is torchvision's `Resize(256)` and `CenterCrop(224)`; but here whole pixels
            of the file are cropped first, and then resized.
        random_crop: the least and the largest share of the image's area, as (0.08, 1.0), for a
            random part in place of the centered one: torchvision's RandomResizedCrop.
        ratio: the least and the largest width / height of a random part.
        flip: flip half of the images left to right, at random. Random numbers are those of
            `fastamp.sample_rng()`.
        damaged: "raise" an error that names the file, or "skip" a file that is damaged or gone. The
            next readable file of `samples` then takes its place, label included, so that the
            length, the order and the size of batches stay; `skipped` lists these files.
        allow_empty: allow classes without an image.

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
        resize: int | None = None,
        random_crop: tuple[float, float] | None = None,
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: bool = False,
        damaged: str = "raise",
        allow_empty: bool = False,
    ) -> None:
        self.size = _check_size(size)
        resize = as_integer("resize", resize, least=max(self.size))
        _check_range("ratio", ratio, 1e6)
        if random_crop is not None:
            _check_range("random_crop", random_crop, 1.0)
            if resize is not None:
                msg = f"resize={resize}: a random crop has a size of its own"
                raise ValueError(msg)
        if damaged not in ("raise", "skip"):
            msg = f"damaged: expected 'raise' or 'skip', got {damaged!r}"
            raise ValueError(msg)
        if flip not in (True, False):
            msg = f"flip: expected True or False, got {flip!r}"
            raise ValueError(msg)
        find_pillow()
        self.resize, self.random_crop, self.ratio, self.flip = resize, random_crop, ratio, flip
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
        if empty and not allow_empty:
            msg = f"Found no valid file for the classes {', '.join(empty)}. "
            msg += f"Supported extensions are: {', '.join(EXTENSIONS)}"
            raise FileNotFoundError(msg)
        # In shared memory, where worker processes mark what they skip.
        skips: Any = torch.zeros(len(self.samples), dtype=torch.bool, device="cpu")
        self._skips = skips.share_memory_() if damaged == "skip" else None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.read(index)

    def read(self, index: int, out: Tensor | None = None) -> tuple[Tensor, int]:
        """Return a sample, with the image written into `out` if it is given."""
        length, first = len(self.samples), operator.index(index)
        if not -length <= first < length:
            raise index_error(first, length)
        for place in range(first, first + length):
            path, label = self.samples[place % length]
            try:
                return self._read_file(path, out), label
            except (DamagedImageError, FileNotFoundError):
                if self._skips is None:
                    raise
                self._skips[place % length] = True
        msg = f"{self.root}: no image in it can be read"
        raise OSError(msg)

    def __repr__(self) -> str:
        count = f"{len(self.samples):,} images of {len(self.classes):,} classes"
        height, width = self.size
        return f"ImageFolder({self.root!r}: {count}, {height} x {width}, by {self.decoder})"

    @property
    def decoder(self) -> str:
        """What decodes JPEGs here: simplejpeg or Pillow. Pillow decodes all other files."""
        return "Pillow" if find_simplejpeg() is None else "simplejpeg"

    @property
    def skipped(self) -> list[str]:
        """The files that were skipped so far, each once, also by torch's worker processes."""
        rows = [] if self._skips is None else self._skips.nonzero().flatten().tolist()
        return [self.samples[row][0] for row in rows]

    def _read_file(self, path: str, out: Tensor | None) -> Tensor:
        with open(path, "rb") as file:  # noqa: PTH123 - Path.open takes twice as long
            data = file.read()
        rng = sample_rng().python if self.flip or self.random_crop else None
        try:
            image = open_image(data)
            if self.random_crop is None or rng is None:
                box = image.center(*self.size, self.resize)
            else:
                box = image.draw(self.random_crop, self.ratio, rng)
            part = image.cut(box, *self.size)
        except MemoryError:
            raise
        except Exception as error:  # Pillow raises errors of many types
            msg = f"{path}: cannot be read as an image: {error}"
            raise DamagedImageError(msg) from error
        if out is None:
            out = torch.empty(3, *self.size, dtype=torch.uint8, device="cpu")
        resize(part, out)
        if self.flip and rng is not None and rng.random() < 0.5:
            out.copy_(out.flip(2))
        return out


def _find_images(root: str, classes: list[str]) -> Iterator[tuple[str, int]]:
    """Yield path and class of all images, in torchvision's order."""
    for label, name in enumerate(classes):
        for folder, _, files in sorted(os.walk(os.path.join(root, name), followlinks=True)):  # noqa: PTH118
            for file in sorted(files):
                if file.lower().endswith(EXTENSIONS):
                    yield os.path.join(folder, file), label  # noqa: PTH118


def _check_size(size: Any) -> tuple[int, int]:
    is_pair = isinstance(size, Sequence) and not isinstance(size, str | bytes)
    pair = tuple(size) if is_pair else (size, size)
    if len(pair) != 2:
        msg = f"size: expected a number, or height and width, got {size!r}"
        raise ValueError(msg)
    height, width = (as_integer("size", value, least=1, optional=False) for value in pair)
    return height, width


def _check_range(name: str, value: Any, most: float) -> None:
    """Raise an error unless it is a pair of numbers above 0, the smaller one first."""
    pair = tuple(value) if isinstance(value, Sequence) else ()
    numbers = all(isinstance(each, Real) for each in pair)
    if len(pair) != 2 or not numbers or not 0 < pair[0] <= pair[1] <= most:
        msg = f"{name}: expected the least and the largest of a range above 0, got {value!r}"
        raise ValueError(msg)
