"""Datasets of the rows of arrays, in memory or in mapped files."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map
from torch.utils.data import Dataset

from fastamp.data.augment import Augmentations, read_augment
from fastamp.data.columns import Images
from fastamp.data.sample_rng import sample_rng


class ArrayDataset(Dataset[Any]):
    """Rows of tensors, NumPy arrays or memmaps: a TensorDataset for all of these.

    `ArrayDataset(x, y)` has the samples `(x[i], y[i])`, and the batches of a TensorDataset.
    `ArrayDataset({"x": x, "y": y})` has the samples `{"x": x[i], "y": y[i]}`, and dicts as batches.
    The arrays may be nested in dicts, lists and tuples. They are shared, not copied.

    Args:
        arrays: with the same first dimension, of any dtype.
        augment: a list of augmentations, made in its order while an image is copied: at most 8 of
            `fastamp.RandomCrop`, `fastamp.RandomHorizontalFlip` and `fastamp.Cutout`. A list is for
            the first array; a dict has a list for each array to augment, by its key or position.
        channels_last: True if images to augment have the shape (height, width, channels), False
            for (channels, height, width). Images without channels have (height, width). It must be
            given where the last dimension is the smallest and 1, 3 or 4.

    The random draws depend on the loader's `seed`, the epoch and the sample's place in it, as in
    `fastamp.sample_rng`: not on the batch, the workers or the ranks. Arrays of one sample with the
    same augmentations are augmented alike, such as images and their masks.

    Raises:
        TypeError: an array is no tensor or NumPy array with a first dimension, an augmentation is
            none of these, or an array to augment does not hold images in plain memory on the CPU.
        ValueError: there is no array, or they differ in length; or the augmentations do not fit.

    Example:
        >>> dataset = fastamp.ArrayDataset({"x": np.zeros((10, 3)), "y": np.arange(10)})
        >>> batch = next(iter(fastamp.DataLoader(dataset, batch_size=4)))
        >>> batch["x"].shape, batch["y"]
        (torch.Size([4, 3]), tensor([0, 1, 2, 3]))
    """

    def __init__(
        self, *arrays: Any, augment: Augmentations | None = None, channels_last: bool | None = None
    ) -> None:
        alone = len(arrays) == 1 and type(arrays[0]) is dict
        self.arrays: Any = {**arrays[0]} if alone else arrays
        self._length = count_rows(self.arrays, "arrays")
        self._augmented = read_augment(augment or [], self.arrays, channels_last=channels_last)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        key = sample_rng().take_key() if self._augmented else 0
        sample = {}
        for name, part in self._parts():
            if name in self._augmented:
                sample[name] = self._augmented[name].apply(part, index, key)
            elif _has_rows(part):
                sample[name] = part[index]
            else:
                sample[name] = tree_map(lambda array: array[index], part)
        return sample if isinstance(self.arrays, dict) else tuple(sample.values())

    def _parts(self) -> Iterable[tuple[Any, Any]]:
        return self.arrays.items() if isinstance(self.arrays, dict) else enumerate(self.arrays)

    def images(self) -> list[Images | None]:
        """Return how each array is augmented, or None, one by one also for those in containers."""
        found: list[Images | None] = []
        for name, part in self._parts():
            augmented = self._augmented.get(name)
            count = len(tree_leaves(part))
            found += [None] * count if augmented is None else [augmented.images(part)]
        return found


def is_arrays(tree: object) -> bool:
    """Say whether a container holds arrays only, and at least one."""
    leaves = tree_leaves(tree)
    return bool(leaves) and all(map(_has_rows, leaves))


def count_rows(tree: Any, name: str) -> int:
    """Return the length of all arrays in a container, or raise an error that names them."""
    arrays = {name + keystr(path): array for path, array in tree_flatten_with_path(tree)[0]}
    if not arrays:
        msg = f"{name}: expected at least one tensor or NumPy array"
        raise ValueError(msg)
    for path, array in arrays.items():
        if not _has_rows(array):
            kind = f"{type(array).__name__} of shape {tuple(getattr(array, 'shape', ()))}"
            kind = kind if hasattr(array, "shape") else type(array).__name__
            msg = f"{path}: expected a tensor or NumPy array with a first dimension, got {kind}"
            raise TypeError(msg)
    first, length = next((path, len(array)) for path, array in arrays.items())
    for path, array in arrays.items():
        if len(array) != length:
            msg = f"{path}: has {len(array)} rows, and {first} has {length}"
            raise ValueError(msg)
    return length


def _has_rows(array: object) -> bool:
    return isinstance(array, torch.Tensor | np.ndarray) and array.ndim > 0
