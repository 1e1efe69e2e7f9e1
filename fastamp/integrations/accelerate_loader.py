"""A `fastamp.DataLoader` that an Accelerator has prepared: its part of the data, on its device."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from fastamp.data import DataLoader
from fastamp.data.order import RankBatches, Share

# The arguments that a loader of a part of the data has from the whole one.
KEPT = "num_workers collate_fn pin_memory drop_last timeout worker_init_fn multiprocessing_context"
KEPT += " persistent_workers pin_memory_device in_order"


class PreparedLoader(DataLoader[Any]):
    """A loader that tells Accelerate where it is in its pass.

    The last batch is known by its number.
    """

    _is_accelerate_prepared = True
    use_stateful_dataloader = True
    """Accelerate's `save_state` and `load_state` keep the position."""
    gradient_state: Any
    """Accelerate's record of the loaders in use."""
    end_of_dataloader = False
    remainder = -1

    @property
    def total_batch_size(self) -> int:
        """Samples in one batch of each process, over all processes."""
        share = self._fastamp.share
        return int(self.batch_size or 1) * (1 if share is None else share.ranks)

    @property
    def total_dataset_length(self) -> int:
        """Samples of all processes."""
        return len(self.dataset)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begin a pass, and note in Accelerate's record how it goes."""
        begun = super().__iter__()
        total = self._count_batches(begun.position.consumed)
        self.end_of_dataloader, self.remainder = False, -1
        if not self.drop_last:
            self.remainder = self.total_dataset_length % self.total_batch_size
        self.gradient_state._add_dataloader(self)
        try:
            for batch in begun:
                self.end_of_dataloader = begun.position.batch >= total
                yield batch
        finally:
            self.gradient_state._remove_dataloader(self)


def prepare_loader(loader: Any, accelerator: Any, *, on_device: bool) -> PreparedLoader | None:
    """Return a loader of this process's part of the data; None if Accelerate has to make it.

    One process keeps the loader as it is; a seeded one is that of `shard=True` with one rank, which
    has the same order. Over several it is that of `shard=True`, if fastamp made its sampler and the
    Accelerator wants batches of one size on all ranks.
    """
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return None
    count, rank = accelerator.num_processes, accelerator.process_index
    mesh = getattr(accelerator, "torch_device_mesh", None)
    if mesh is not None and {"tp", "cp", "sp"}.intersection(mesh.mesh_dim_names):
        return None  # the ranks of one model, or of one sequence, share batches
    made: Any = loader
    # The order of a shard with a seed is known to `skip_first_batches`.
    if loader._fastamp.share is None and (count > 1 or loader._fastamp.seed is not None):
        made = _make_shard(loader, accelerator, count, rank) or loader
    if count > 1 and made._fastamp.share != (rank, count):
        return None
    made.__class__ = PreparedLoader
    made.gradient_state = accelerator.gradient_state
    if on_device:
        made._fastamp.device = accelerator.device
    return made  # type: ignore[no-any-return]


def _make_shard(loader: Any, accelerator: Any, count: int, rank: int) -> Any:
    """Return a loader with the same arguments and `shard=True`; None if it would differ."""
    config, size, own = accelerator.dataloader_config, loader.batch_size, loader._fastamp
    sampler: Any = loader.sampler
    is_plain = type(sampler) is SequentialSampler or (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(loader.dataset)
        and sampler.generator in (None, loader.generator if own.seed is not None else None)
    )
    if (
        type(loader.batch_sampler) is not BatchSampler
        or loader.batch_sampler.sampler is not sampler
        or not is_plain
        or getattr(sampler, "data_source", None) is not loader.dataset
        or (config.split_batches and size % count)
        or config.dispatch_batches
        or not (config.even_batches or loader.drop_last)
    ):
        return None
    seed = own.seed
    if seed is None:
        told = config.data_seed
        drawn = [torch.initial_seed() % 2**63 if told is None else told]
        dist.broadcast_object_list(drawn, 0)
        seed = drawn[0]
    options = {name: getattr(loader, name) for name in KEPT.split()}
    made: DataLoader[Any] = DataLoader(
        loader.dataset,
        size // count if config.split_batches else size,
        shuffle=isinstance(sampler, RandomSampler),
        prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
        seed=seed,
        rank=rank,
        world_size=count,
        device=own.device,
        max_bytes=own.max_bytes,
        worker=own.worker,
        **options,
    )
    # The Trainer and `skip_first_batches` read it; torch lets nobody replace it by its name.
    vars(made)["batch_sampler"] = RankBatches(made.batch_sampler, Share(rank, count))
    return made
