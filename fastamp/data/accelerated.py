"""Support for `accelerator.prepare(loader)` of Hugging Face's Accelerate, which keeps our loader.

Nothing here imports Accelerate before the program has.
"""

import contextlib
import functools
import importlib
import operator
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from fastamp.data.sample_rng import draw_seed
from fastamp.data.shard import RankBatches, ShardSampler
from fastamp.data.shuffle import FeistelSampler

_END = object()


class Preparable:
    """A loader that `accelerator.prepare` returns as it is, in place of rebuilding it."""

    _served: "Served | None" = None

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Whether Accelerate leaves this loader alone: it wraps every loader that says False.

        The first read sets the loader up for the Accelerator. Reading an attribute passes no
        options, so the Accelerator is taken from the local variables of the calling frame.
        """
        if self._served is None and "accelerate" in sys.modules:
            names = sys._getframe(1).f_locals
            accelerator = names.get("self")
            if isinstance(accelerator, sys.modules["accelerate"].Accelerator):
                try:
                    if _is_dispatched(self, accelerator):
                        return False
                    self._served = Served(self, accelerator, names.get("device_placement"))
                except AttributeError as error:  # Accelerate's getattr would turn it into False
                    msg = "this version of Accelerate is not known to fastamp.DataLoader"
                    raise RuntimeError(msg) from error
        return self._served is not None

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """Ignore the True that Accelerate sets on every loader it has prepared."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Once prepared, a subclass of Accelerate's own loader too, for `skip_first_batches`."""
        return type(self) if self._served is None else _face(type(self))  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the real type, not as `__class__`."""
        return object.__new__, (type(self),), self.__getstate__()

    def __getattr__(self, name: str) -> Any:
        """Return what Accelerate reads from its own loaders."""
        if name not in _READ_BY_ACCELERATE or self._served is None:
            msg = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(msg)
        return operator.attrgetter(_READ_BY_ACCELERATE[name])(self)

    @property
    def _total_length(self) -> Any:
        dataset: Any = self.dataset
        return dataset.total_length if hasattr(dataset, "total_length") else len(dataset)


_READ_BY_ACCELERATE = {
    "iteration": "_next.epoch",  # of the next pass
    "gradient_state": "_served.gradient_state",
    "end_of_dataloader": "_served.end_of_dataloader",
    "remainder": "_served.remainder",
    "total_batch_size": "_served.total_batch_size",
    "total_dataset_length": "_total_length",
    "rng_types": "_served.rng_types",
    "synchronized_generator": "_served.synchronized_generator",
    "use_stateful_dataloader": "_served.use_stateful_dataloader",
}


def _accelerates(name: str) -> Any:
    """Return a module of Accelerate, which the program has imported."""
    return importlib.import_module(f"accelerate.{name}")


def _ranks(accelerator: Any) -> tuple[int, int]:
    """Return the number of parts that the data is shared out in, and this process's part."""
    count, rank = accelerator.num_processes, accelerator.process_index
    mesh = accelerator._prepare_device_mesh() if hasattr(accelerator, "torch_device_mesh") else None
    if mesh is not None:  # the ranks of one model, or of one sequence, share a part
        sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        alike = sizes.get("tp", 1) * sizes.get("cp", 1)
        count, rank = count // alike, rank // alike
    return count, rank


def _is_dispatched(loader: Any, accelerator: Any) -> bool:
    """Say whether Accelerate, by default, lets one process read this stream for all of them."""
    undecided = accelerator.dataloader_config.dispatch_batches is None
    several = accelerator.num_processes > 1
    return several and undecided and isinstance(loader.dataset, IterableDataset)


def _own_order(loader: Any) -> tuple[bool, int | None] | None:
    """Return whether a loader shuffles, and its seed; None if the sampler is the user's."""
    if type(loader.batch_sampler) is not BatchSampler:
        return None
    sampler: Any = loader.batch_sampler.sampler
    if loader._shard is not None:
        return loader._shard.shuffle, loader._shard.seed
    ordered = SequentialSampler, RandomSampler, FeistelSampler
    if type(sampler) not in ordered or sampler.data_source is not loader.dataset:
        return None
    if type(sampler) is SequentialSampler:
        return False, None
    whole = not sampler.replacement and sampler.num_samples == len(loader.dataset)
    seeded = None if loader.seed is None else loader.generator
    own = sampler.generator is None or sampler.generator is seeded
    return (True, loader.seed) if whole and own else None


@functools.cache
def _face(kind: Any) -> type:
    return type(kind.__name__, (kind, _accelerates("data_loader").DataLoaderShard), {})


class Served:
    """The options of the Accelerator that prepared a loader, and where the loader is in its pass.

    Raises:
        ValueError: the loader cannot do what the Accelerator's options say.
    """

    end_of_dataloader = False
    remainder = -1
    _turn = 0  # counts passes

    def __init__(self, loader: Any, accelerator: Any, device_placement: Any) -> None:
        count, rank = _ranks(accelerator)
        config = accelerator.dataloader_config
        self._count, self._drop_last = count, loader.drop_last
        if count > 1 and config.dispatch_batches:
            msg = (
                "dispatch_batches=True: expected False for fastamp.DataLoader, whose processes "
                "read for themselves: DataLoaderConfiguration(dispatch_batches=False)"
            )
            raise ValueError(msg)
        size = getattr(loader._batches, "batch_size", None)
        if config.split_batches and (size is None or size % count):
            msg = f"split_batches=True: expected a batch_size divisible by {count}, got {size}"
            raise ValueError(msg)
        shard = loader._shard
        if shard is not None and (shard.num_replicas, shard.rank) != (count, rank):
            msg = (
                f"the loader is sharded already, as rank {shard.rank} of {shard.num_replicas}; the "
                f"Accelerator's is {rank} of {count}"
            )
            raise ValueError(msg)
        self.use_stateful_dataloader = getattr(config, "use_stateful_dataloader", False)
        self.synchronized_generator: torch.Generator | None = None
        self._size: Any = size // count if size and config.split_batches else size
        if isinstance(loader.dataset, IterableDataset):
            self._share_stream(loader, config, rank)
        elif not self._share_rows(loader, config, rank) and count > 1:
            self._share_batches(loader, config, rank)
        known = self.synchronized_generator is not None
        self.rng_types = [t for t in accelerator.rng_types if known or str(t) != "generator"]
        if accelerator.device_placement if device_placement is None else device_placement:
            loader.device = accelerator.device

    def _share_stream(self, loader: Any, config: Any, rank: int) -> None:
        """Let each process read the whole stream, and keep its part."""
        if self._count > 1:
            accelerate = _accelerates("data_loader")
            self.synchronized_generator = getattr(loader.dataset, "generator", None)
            sizes = loader.batch_size, loader.drop_last, self._count, rank, config.split_batches
            part = accelerate.IterableDatasetShard(loader.dataset, *sizes)
            object.__setattr__(loader, "dataset", part)  # torch allows no other way
            object.__setattr__(loader, "batch_size", self._size)

    def _share_rows(self, loader: Any, config: Any, rank: int) -> bool:
        """Share out the order if the loader makes it itself; say whether it was shared out."""
        order = _own_order(loader)
        if order is None:
            return False
        shuffle, seed = order
        if seed is None and shuffle:
            if not config.use_seedable_sampler:
                return False  # one process draws as before, several as Accelerate's loaders do
            own = torch.initial_seed() if config.data_seed is None else config.data_seed
            seed = _accelerates("utils").broadcast_object_list([own])[0]
        drop_last = loader.batch_sampler.drop_last
        shard = ShardSampler(loader.dataset, self._count, rank, shuffle, seed or 0, drop_last)
        shard.epoch = loader._next.epoch
        shard.block, shard.even = self._size, config.even_batches and self._count > 1
        loader._shard = shard
        object.__setattr__(loader, "sampler", shard)  # torch allows no other way
        object.__setattr__(loader, "batch_sampler", RankBatches(shard, self._size, drop_last))
        return True

    def _share_batches(self, loader: Any, config: Any, rank: int) -> None:
        """Share out the batches of the user's sampler, as Accelerate does."""
        accelerate = _accelerates("data_loader")
        name = "sampler" if isinstance(loader.sampler, BatchSampler) else "batch_sampler"
        batches = getattr(loader, name)
        if batches is None:
            msg = "batch_size=None: expected batches to share out among the Accelerator's processes"
            raise ValueError(msg)
        sampler = accelerate.get_sampler(loader)
        if getattr(sampler, "generator", self) is None:
            sampler.generator = torch.Generator().manual_seed(draw_seed())
        self.synchronized_generator = getattr(sampler, "generator", None)
        part = accelerate.BatchSamplerShard(
            batches, self._count, rank, config.split_batches, config.even_batches
        )
        object.__setattr__(loader, name, part)

    @property
    def total_batch_size(self) -> int:
        """Samples in one batch of each process, over all processes."""
        return int(self._size) * self._count

    @property
    def gradient_state(self) -> Any:
        """Accelerate's record of the loaders in use."""
        return _accelerates("state").GradientState()

    def synchronize(self) -> None:
        """Copy the first process's generators to all others, as the Accelerator's options say."""
        if self._count > 1:
            synchronize = _accelerates("utils").synchronize_rng_states
            synchronize(self.rng_types, self.synchronized_generator)

    def begin(self, loader: Any, consumed: int) -> int:
        """Tell Accelerate that a pass of the loader has begun; return its number."""
        self.end_of_dataloader, self.remainder = False, -1
        if not self._drop_last:
            with contextlib.suppress(TypeError):  # without a length or a batch size
                self.remainder = (len(loader.dataset) - consumed) % self.total_batch_size
        state = self.gradient_state
        state._remove_dataloader(loader)  # of an earlier pass that did not end
        state._add_dataloader(loader)
        self._turn += 1
        return self._turn

    def end(self, loader: Any, turn: int) -> None:
        """Tell Accelerate that a pass has ended, or was left, unless a later one has begun."""
        if turn == self._turn and not sys.is_finalizing():
            self.gradient_state._remove_dataloader(loader)


class ServedPass(Iterator[Any]):
    """The batches of a pass, taken one ahead, so that Accelerate knows the last one."""

    def __init__(self, loader: Any, batches: Iterator[Any], consumed: int) -> None:
        self._loader, self._batches, self._consumed = loader, batches, consumed
        self._served: Served = loader._served
        self._ahead: tuple[Any, Exception | None] = (None, None)
        self._turn, self._ended = 0, False

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if not self._turn:
            self._turn = self._served.begin(self._loader, self._consumed)
            self._ahead = self._take()
        batch, error = self._ahead
        if batch is _END:
            self.close()
            raise StopIteration
        self._ahead = self._take()
        self._served.end_of_dataloader = self._ahead[0] is _END
        if error is None:
            return batch
        try:
            raise error
        finally:
            del error  # whose traceback refers to this frame

    def _take(self) -> tuple[Any, Exception | None]:
        """Return the next batch, or the error in its place."""
        try:
            return next(self._batches, _END), None
        except Exception as error:  # noqa: BLE001 - raised where the batch would come
            return None, error

    def close(self) -> None:
        """Remove the loader from Accelerate's record, also after a `break`."""
        turn, self._turn, self._ended = self._turn, 0, True
        if turn:
            self._served.end(self._loader, turn)

    __del__ = close
