"""A `fastamp.DataLoader` that an Accelerator has prepared: its part of the data, on its device."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset

from fastamp.data import DataLoader
from fastamp.data.order import SeededSampler


class EpochBatches(BatchSampler):
    """torch's batches, with the method by which the Hugging Face Trainer says the epoch."""

    sampler: Any

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be that of an epoch."""
        self.sampler.set_epoch(epoch)


class PreparedLoader(DataLoader[Any]):
    """A loader that tells Accelerate where it is in its pass."""

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
    def batch_sampler(self) -> Any:  # type: ignore[override]
        """This process's batches, which `skip_first_batches` reads."""
        whole, ours, sampler = vars(self)["batch_sampler"], self._fastamp, self.sampler
        shuffle = isinstance(sampler, SeededSampler)
        if whole is None or (ours.share is None and not shuffle):
            return whole
        if ours.share is not None:
            options: Any = {"shuffle": shuffle, "drop_last": self.drop_last, "seed": ours.seed or 0}
            sampler = DistributedSampler(self.dataset, ours.share.ranks, ours.share.rank, **options)
            sampler.set_epoch(ours.next.epoch)
        return EpochBatches(sampler, self.batch_size or 1, self.drop_last)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begin a pass, and note in Accelerate's record how it goes."""
        begun = super().__iter__()
        total = self._count_batches(begun.position.consumed)
        self.end_of_dataloader, self.remainder = False, -1
        if not self.drop_last:
            self.remainder = len(self.dataset) % self.total_batch_size  # type: ignore[arg-type]
        self.gradient_state._add_dataloader(self)
        try:
            for batch in begun:
                self.end_of_dataloader = begun.position.batch >= total
                yield batch
        finally:
            self.gradient_state._remove_dataloader(self)


def prepare_loader(loader: Any, accelerator: Any, *, on_device: bool) -> PreparedLoader | None:
    """Return the loader, on the Accelerator's device; None if Accelerate has to make its own.

    One process keeps any loader of a dataset with a length, several keep one of `shard=True`.
    """
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return None
    mesh, share = getattr(accelerator, "torch_device_mesh", None), loader._fastamp.share
    if mesh is not None and {"tp", "cp", "sp"}.intersection(mesh.mesh_dim_names):
        return None  # the ranks of one model, or of one sequence, share batches
    count = accelerator.num_processes
    if count > 1 and share != (accelerator.process_index, count):
        return None
    made: Any = loader
    made.__class__ = PreparedLoader
    made.gradient_state = accelerator.gradient_state
    if on_device:
        made._fastamp.device = accelerator.device
    return made  # type: ignore[no-any-return]
