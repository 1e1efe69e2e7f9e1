"""Datasets of the rows of arrays, in memory or in mapped files."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map
from torch.utils.data import Dataset

from fastamp.data.augment import Augmentation, Images, check_augmentations, plan_images
from fastamp.data.columns import augment_image, plain_dtype
from fastamp.data.sample_rng import sample_rng


class ArrayDataset(Dataset[Any]):
    """Rows of tensors, NumPy arrays or memmaps: a TensorDataset for all of these.

    `ArrayDataset(x, y)` has the samples `(x[i], y[i])`, and the batches of a TensorDataset.
    `ArrayDataset({"x": x, "y": y})` has the samples `{"x": x[i], "y": y[i]}`, and dicts as batches.
    The arrays may be nested in dicts, lists and tuples. They are shared, not copied.

    Args:
        arrays: with the same first dimension, of any dtype.
        augment: a list of augmentations of the first array, made in its order while an image is
            copied: at most 8 of `fastamp.RandomCrop`, `fastamp.RandomHorizontalFlip` and
            `fastamp.Cutout`. Its images have the shape (channels, height, width), with any number
            of dimensions in front, or none for (height, width).

    The random draws depend on the loader's `seed`, the epoch and the sample's place in it, as in
    `fastamp.sample_rng`: not on the batch, the workers or the ranks.

    Raises:
        TypeError: an array is no tensor or NumPy array with a first dimension, an augmentation is
            none of these, or the array to augment does not hold images in plain memory on the CPU.
        ValueError: there is no array, or they differ in length; or the augmentations do not fit.

    Example:
        >>> dataset = fastamp.ArrayDataset({"x": np.zeros((10, 3)), "y": np.arange(10)})
        >>> batch = next(iter(fastamp.DataLoader(dataset, batch_size=4)))
        >>> batch["x"].shape, batch["y"]
        (torch.Size([4, 3]), tensor([0, 1, 2, 3]))
    """

    def __init__(self, *arrays: Any, augment: Sequence[Augmentation] = ()) -> None:
        alone = len(arrays) == 1 and type(arrays[0]) is dict
        self.arrays: Any = {**arrays[0]} if alone else arrays
        self._length = count_rows(self.arrays, "arrays")
        self._augment = check_augmentations(augment)
        self.images()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        in_dict = isinstance(self.arrays, dict)
        parts = self.arrays.items() if in_dict else enumerate(self.arrays)
        sample = {
            name: part[index] if _has_rows(part) else tree_map(lambda array: array[index], part)
            for name, part in parts
        }
        if self._augment:
            operator.index(index)  # which refuses slices
            name, row = next(iter(sample.items()))
            sample[name] = augment_image(self._plan(), row, sample_rng().take_key())
        return sample if in_dict else tuple(sample.values())

    def images(self) -> list[Images | None]:
        """Return how each array is augmented, or None, one by one also for those in containers."""
        found: list[Images | None] = [None] * len(tree_leaves(self.arrays))
        if self._augment:
            found[0] = self._plan()
        return found

    def _plan(self) -> Images:
        """Return how the first array is augmented."""
        array = next(iter(self.arrays.values() if isinstance(self.arrays, dict) else self.arrays))
        dtype = plain_dtype(array)
        if dtype is None:
            kind = getattr(array, "dtype", type(array).__name__)
            state = ", which requires grad" if getattr(array, "requires_grad", False) else ""
            msg = f"augment: expected plain numbers on the CPU to augment, got {kind}{state}"
            raise TypeError(msg)
        return plan_images(self._augment, tuple(array.shape), dtype.itemsize)


def by_name(dataset: Any) -> Any:
    """Return a dict of arrays, with strings as keys, as an ArrayDataset; any other as it is."""
    if type(dataset) is not dict or not all(type(key) is str for key in dataset):
        return dataset
    leaves = tree_leaves(dataset)
    if not leaves or not all(map(_has_rows, leaves)):
        return dataset
    count_rows(dataset, "dataset")  # raises an error with the caller's name of it
    return ArrayDataset(dataset)


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
