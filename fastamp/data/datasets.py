"""Datasets of the rows of arrays, in memory or in mapped files."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset

from fastamp.data.arrays import Columns, columns_of
from fastamp.data.augment import Augmentation, augment_images, check_augmentations
from fastamp.data.sample_rng import Keys, sample_rng


class ArrayDataset(Dataset[Any]):
    """Rows of tensors, NumPy arrays or memmaps: a TensorDataset for all of these.

    `ArrayDataset(x, y)` has the samples `(x[i], y[i])`, and the batches of a TensorDataset.
    `ArrayDataset({"x": x, "y": y})` has the samples `{"x": x[i], "y": y[i]}`, and dicts as batches.
    The arrays are shared, not copied. Arrays on a device are gathered there.

    Args:
        arrays: with the same first dimension, of any dtype, also nested in dicts, lists and tuples.
            `ArrayDataset((x, y))` is `ArrayDataset(x, y)`.
        augment: a list of `fastamp.RandomCrop` and `fastamp.RandomHorizontalFlip`, which change the
            first array's images, of shape (..., height, width), in this order, on the batch's
            device. They draw by the sample's place in the epoch, as `fastamp.sample_rng`.

    Attributes:
        arrays: what was passed, a tuple or a dict; it may be replaced between two passes.

    Raises:
        TypeError: an array is no tensor or NumPy array with a first dimension, an augmentation is
            none of these, or the first array does not hold images in plain memory.
        ValueError: there is no array, or they differ in length; or the augmentations do not fit.

    Example:
        >>> dataset = fastamp.ArrayDataset({"x": np.zeros((10, 3)), "y": np.arange(10)})
        >>> batch = next(iter(fastamp.DataLoader(dataset, batch_size=4)))
        >>> batch["x"].shape, batch["y"]
        (torch.Size([4, 3]), tensor([0, 1, 2, 3]))
    """

    def __init__(self, *arrays: Any, augment: Sequence[Augmentation] = ()) -> None:
        one: Any = arrays[0] if len(arrays) == 1 else arrays
        self.arrays: Any = tuple(one) if type(one) in (tuple, list) else arrays
        if type(one) is dict:
            self.arrays = {**one}
        count_rows(self.arrays, "arrays")
        self.augment = check_augmentations(augment, self._first())

    def _first(self) -> Any:
        return pytree.tree_leaves(self.arrays)[0]

    def __len__(self) -> int:
        return len(self._first())

    def __getitem__(self, index: int) -> Any:
        arrays, spec = pytree.tree_flatten(self.arrays)
        rows = [array[index] for array in arrays]
        if self.augment:
            operator.index(index)  # which refuses slices
            image = rows[0] if isinstance(rows[0], Tensor) else torch.from_numpy(np.array(rows[0]))
            key = np.array([sample_rng().take_key()], np.uint64)
            (made,) = augment_images(self.augment, image[None], key)
            rows[0] = made if image is rows[0] else made.numpy()
        return pytree.tree_unflatten(rows, spec)

    def columns(self) -> Columns | str:
        """Return the arrays for a loader to gather, or why it has to read items."""
        count_rows(self.arrays, "arrays")  # which may have been replaced
        found = columns_of(self.arrays)
        if isinstance(found, str):
            return "the ArrayDataset holds more than plain arrays in one place"
        if check_augmentations(self.augment, self._first()):
            found.then = self._augment
        return found

    def _augment(self, parts: list[Any], keys: Keys) -> list[Any]:
        return [augment_images(self.augment, parts[0], keys), *parts[1:]]


def by_name(dataset: Any) -> Any:
    """Return a dict of arrays, with strings as keys, as an ArrayDataset; any other as it is."""
    is_named = type(dataset) is dict and all(type(key) is str for key in dataset)
    leaves = pytree.tree_leaves(dataset) if is_named else []
    if not leaves or not all(map(_has_rows, leaves)):
        return dataset
    count_rows(dataset, "dataset")  # raises an error with the caller's name of it
    return ArrayDataset(dataset)


def count_rows(tree: Any, name: str) -> int:
    """Return the length of all arrays in a container, or raise an error that names them."""
    lengths: dict[str, int] = {}
    for path, array in pytree.tree_flatten_with_path(tree)[0]:
        place = name + pytree.keystr(path)
        if not _has_rows(array):
            msg = f"{place}: expected a tensor or NumPy array with a first dimension, "
            raise TypeError(msg + f"got {type(array).__name__}")
        lengths[place] = len(array)
        first, length = next(iter(lengths.items()))
        if len(array) != length:
            msg = f"{place}: has {len(array)} rows, and {first} has {length}"
            raise ValueError(msg)
    if not lengths:
        msg = f"{name}: expected at least one tensor or NumPy array"
        raise ValueError(msg)
    return length


def _has_rows(array: object) -> bool:
    return isinstance(array, torch.Tensor | np.ndarray) and array.ndim > 0
