"""Batches of any kind of data, with a position to resume at."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from fastamp.data import ArrayDataset, DataLoader
from fastamp.data.datasets import count_rows
from fastamp.data.order import find_samplers
from fastamp.data.structure import map_tensors
from fastamp.train import ranks
from fastamp.train.config import TrainConfig


class Batches:
    """Batches on a device, each with the number of its samples."""

    def __init__(self, name: str, data: Any, config: TrainConfig, *, shuffle: bool = False) -> None:
        self._name, device = name, config.chosen_device
        self.loader: Any = _make_loader(name, data, config, shuffle=shuffle)
        if not hasattr(self.loader, "__iter__"):
            msg = f"{name}: expected a Dataset, tensors, a DataLoader or an iterable of batches"
            raise TypeError(msg + f", got {type(data).__name__}")
        self._is_moved = self.loader is not data  # ours, which moves them to the device
        # On the CPU a batch may be read at once.
        self._move = partial(Tensor.to, device=device, non_blocking=device.type != "cpu")
        # With a state it resumes within a pass. The Checkpointer refuses ours without a position.
        self.has_state = isinstance(self.loader, DataLoader)
        with suppress(AttributeError, TypeError):
            self.has_state = self.loader.state_dict() is not None
        self.is_resumed = False  # a pass, of which no batch may be left

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        """Start a pass, or continue the one of a loaded state."""
        n_batches = 0
        for n_batches, batch in enumerate(self.loader, 1):  # noqa: B007 - read after the loop
            yield batch if self._is_moved else map_tensors(self._move, batch), count_samples(batch)
        if not (n_batches or self.is_resumed):
            msg = f"{self._name}: no sample in this pass; an iterator can be read only once"
            raise ValueError(msg)
        self.is_resumed = False

    @property
    def n_batches(self) -> int | None:
        """Batches in a pass; None if the loader has no length."""
        with suppress(TypeError):
            return len(self.loader)
        return None

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, or else its samplers, and the dataset which epoch begins or resumes."""
        has_own = hasattr(self.loader, "set_epoch")
        informed = [self.loader] if has_own else find_samplers(self.loader)
        for each in (*informed, getattr(self.loader, "dataset", None)):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)


def count_samples(batch: Any) -> int:
    """Return how many samples a batch has: the length of its first tensor, or else list."""
    columns: Any = batch
    if not isinstance(batch, (list, tuple)):
        columns = [*batch.values()] if isinstance(batch, Mapping) else [batch]
    for column in columns:
        if isinstance(column, Tensor):
            return column.shape[0] if column.ndim else 1
    lists = [column for column in columns if isinstance(column, (list, tuple))]
    tensors = [leaf for leaf in tree_leaves(columns) if isinstance(leaf, Tensor) and leaf.ndim]
    return len((lists or tensors or [[None]])[0])


def _make_loader(name: str, data: Any, config: TrainConfig, *, shuffle: bool) -> Any:
    if isinstance(data, (tuple, dict)):
        count_rows(data, name)  # raises an error with this name
        data = ArrayDataset(*data) if isinstance(data, tuple) else ArrayDataset(data)
    is_dataset = hasattr(data, "__getitem__")  # as torch's Datasets
    with suppress(TypeError):
        if len(data) == 0:
            msg = f"{name}: the {type(data).__name__} has no {'sample' if is_dataset else 'batch'}"
            raise ValueError(msg)
    if not is_dataset:
        return data
    options: dict[str, Any] = {"num_workers": config.num_workers, "device": config.chosen_device}
    if not isinstance(data, IterableDataset):
        options |= {"shuffle": shuffle, "shard": ranks.has_group()}
    return DataLoader(data, config.batch_size, seed=config.seed, **options)
