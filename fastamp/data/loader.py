"""`fastamp.DataLoader`: torch's, with native gathering, exact resume and statistics."""

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Sampler, SequentialSampler

from fastamp._ops import untraced
from fastamp.data.checks import as_integer, check_device, check_generator, check_worker
from fastamp.data.collate import BatchCollator
from fastamp.data.columns import Column
from fastamp.data.datasets import ArrayDataset, count_rows, is_arrays
from fastamp.data.gather import find_path
from fastamp.data.indices import Indices, find_samplers
from fastamp.data.passes import LoaderPass
from fastamp.data.position import Position
from fastamp.data.resume import load, save
from fastamp.data.shard import ShardSampler, check_shardable, find_ranks
from fastamp.data.shuffle import FeistelSampler, is_long
from fastamp.data.slots import Slots
from fastamp.data.sources import begin, find_columns
from fastamp.data.stats import LoaderStats

T_co = TypeVar("T_co", covariant=True)


class DataLoader(TorchDataLoader[T_co]):
    """Load batches as torch.utils.data.DataLoader does: same arguments, same batches, less time.

    Datasets in memory or in a mapped file are gathered by threads of the compiled core, ahead of
    the consumer: TensorDataset, `fastamp.ArrayDataset`, `fastamp.TokenDataset`, a tensor, a NumPy
    array or memmap, a dict of these (which is an ArrayDataset), a Hugging Face dataset (format
    "torch", "numpy" or none) of integers, floats and lists of one length, and a Subset of any.
    Their batches are those of `default_collate`, and no worker processes are started. Every other
    dataset, and every dataset with a `collate_fn` or a `worker_init_fn` of the user's, goes through
    torch's own iterators and workers, or threads if `worker` says so, with `fastamp.BatchCollator`
    where no `collate_fn` is given.

    A batch that the user keeps is never overwritten.

    If a tensor of the dataset is resized, shared or given other memory during a pass, the rest of
    the pass is read item by item, as in torch; NumPy refuses to resize an array during a pass. A
    mapped file that is cut short raises a RuntimeError (Arrow's, a BufferError). Three things
    go unnoticed: a file that another process changes in place, or cuts short while a batch is
    copied out of its last page; what is written into a NumPy array, or through `tensor.data`, after
    a batch was begun; and memory that is freed and used again while a batch is copied from it.

    Hugging Face's Accelerate keeps this loader after `fastamp.integrations.accelerate.prepare`, and
    makes its own of it otherwise.

    Args:
        dataset: this and all arguments up to `in_order` are torch.utils.data.DataLoader's.
        device: the device of the batches' tensors, in any nesting of dicts, lists, tuples and
            dataclasses. For CUDA they are gathered into pinned memory, two batches ahead of the
            loop, and copied on a side stream. Batches of all other datasets are made when they are
            asked for, by the loop's thread or by workers; their copy overlaps with the device's
            step. None leaves them on the CPU.
        seed: shuffles epoch n with the seed `seed + n`, so that it can be repeated and resumed by
            itself. The order is torch's. For more than 2^28 rows, whose order would take over 2 GB,
            it is computed instead: a Feistel network permutes the row numbers, so that nothing is
            kept and a pass resumes at once. With a `generator` the order is torch's at any length.
        shard: load this rank's part of the dataset. The parts are those of DistributedSampler with
            this `shuffle`, `drop_last` and `seed` (or 0), whatever the `generator`: padded to the
            same length with the order's first samples, or cut if `drop_last`. More than 2^28 rows
            are shuffled as with `seed`. The ranks are those of torch.distributed; if it is not
            initialized, there is one.
        rank: used with `world_size` in place of torch.distributed's; both imply `shard`.
        world_size: the number of ranks, and of parts.
        worker: what `num_workers` counts. None and "process": processes, as torch has them.
            "thread": threads of this process, which start at once and share the dataset. Each makes
            one sample after the other, of the oldest batch first, and copies large ones into their
            row of the batch; `collate_fn` runs in a thread. The number of threads changes no result
            if random numbers come from `fastamp.sample_rng()`; draws from global generators are not
            repeatable. `fastamp.get_worker_info()` and `worker_init_fn` work in threads; each gets
            a copy of an iterable dataset. Batches are made ahead as by processes, but no more than
            `max_bytes`. A `__getitem__` that computes in Python needs processes.
        resident: keep the dataset, which must be one that is gathered, on the device: the first
            pass moves all of it. Batches are gathered there, so only row numbers are copied, and
            nothing waits for them. Batches and states are the same as without it. Later writes into
            the dataset are not seen. Tensors that are on the device already are gathered there
            anyway. Images cannot be augmented there.
        max_bytes: the most memory that the loader itself holds: batches gathered ahead, and slots
            for large ones. None is 1 GiB, or one batch if that is larger. torch's workers hold as
            many batches as `prefetch_factor` says.

    Raises:
        ValueError: as torch's; `max_bytes` is not positive, or, when a pass begins, less than one
            batch; `resident` without a device, or, when a pass begins, with a dataset that is not
            gathered, or does not fit there; the arrays of a dict differ in length; a sharded loader
            has a sampler of the user's; only one of `rank` and `world_size` is given, or `rank` is
            too large.
        TypeError: a sharded loader has an iterable dataset.
        RuntimeError: `shard` is set and a launcher has set WORLD_SIZE, but torch.distributed is not
            initialized.

    Example:
        >>> dataset = torch.utils.data.TensorDataset(torch.randn(6, 2), torch.arange(6))
        >>> loader = fastamp.DataLoader(dataset, batch_size=4, shuffle=True, seed=0)
        >>> for x, y in loader:
        ...     state = loader.state_dict()  # load_state_dict resumes after this batch
        ...     print(x.shape)
        torch.Size([4, 2])
        torch.Size([2, 2])
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,  # noqa: FBT001 - torch's signature
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,  # noqa: FBT001, FBT002 - torch's signature
        drop_last: bool = False,  # noqa: FBT001, FBT002 - torch's signature
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        device: torch.device | str | int | None = None,
        seed: int | None = None,
        shard: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        max_bytes: int | None = None,
        worker: str | None = None,
        resident: bool = False,
    ) -> None:
        max_bytes = as_integer("max_bytes", max_bytes, least=1)
        seed = as_integer("seed", seed, least=0)
        rank = as_integer("rank", rank, least=0)
        world_size = as_integer("world_size", world_size, least=1)
        self.worker = check_worker(worker, dataset, multiprocessing_context)
        check_generator(generator)
        check_device(device, resident=resident)
        by_name = type(dataset) is dict and all(type(key) is str for key in dataset)
        if by_name and is_arrays(dataset):
            count_rows(dataset, "dataset")  # raises an error with this argument's name
            dataset = ArrayDataset(dataset)
        if shard or rank is not None or world_size is not None:
            if type(sampler) is SequentialSampler:  # Lightning's, to overfit
                sampler, shuffle = None, False
            # To predict, Lightning makes a loader again, around the sampler that this one made.
            if not isinstance(getattr(batch_sampler, "sampler", sampler), ShardSampler):
                check_shardable(dataset, sampler=sampler, batch_sampler=batch_sampler)
                ranks = find_ranks(rank, world_size)
                sampler = ShardSampler(dataset, *ranks, bool(shuffle), seed or 0, drop_last)
                shuffle = None
        # A sharded loader gets none: its workers' seeds are the program's, and differ by rank.
        if seed is not None and generator is None and not isinstance(sampler, ShardSampler):
            generator = torch.Generator().manual_seed(seed)  # also for the workers' seeds
            if shuffle and sampler is None and batch_sampler is None and is_long(dataset):
                sampler, shuffle = FeistelSampler(dataset, generator=generator), None
        if collate_fn is None and (batch_size is not None or batch_sampler is not None):
            collate_fn = BatchCollator()
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        self.device, self.resident = device, resident
        self._moved: list[Column] | None = None  # to the device, if `resident`
        self.seed = seed
        self.max_bytes = max_bytes
        self._shard = sampler if isinstance(sampler, ShardSampler) else None
        self._next = Position(epoch=0)  # where the next pass begins
        self._last: Position | None = None  # of the pass that began last
        self._left: Position | None = None  # of the one before it
        self._told_epoch: int | None = None
        self._began = False
        self._sample_seed: int | None = None  # of the pass that began last
        self._batch_nbytes: int | None = None  # of the largest batch that threads have made
        self._slots: Slots | None = None
        self._stats = LoaderStats()
        self._inner: tuple[TorchDataLoader[Any], Indices] | None = None  # whose workers persist

    @untraced
    def __iter__(self) -> LoaderPass:  # type: ignore[override]  # torch's class cannot be made
        """Begin a pass: at the start of an epoch, or where a loaded state stopped."""
        if self.timeout and not self.num_workers:
            msg = f"timeout: expected 0 without workers, got {self.timeout}"
            raise AssertionError(msg)  # as torch's
        shard, gatherable = self._shard, find_columns(self)
        if shard is not None and shard.epoch != self._next.epoch:  # by the sampler's own set_epoch
            self.set_epoch(shard.epoch)
        begins_at, passes = self._next, (self._last, self._left)
        position = copy(begins_at)
        self._begin_at(Position(epoch=position.epoch + 1))
        self._left, self._last = self._last, position
        if self.generator is not None:
            if self.seed is not None and shard is None:
                self.generator.manual_seed(self.seed + position.epoch)
            position.generator = self.generator.get_state()
        try:
            return begin(self, position, gatherable)
        except BaseException:  # the next call begins at the same place
            self._begin_at(begins_at)
            self._last, self._left = passes
            raise

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, for `seed`, and for samplers that have `set_epoch`.

        A loaded state of this epoch stays in force. Without a call each pass is the next epoch.

        Raises:
            ValueError: `epoch` is not an integer of at least 0.
        """
        epoch = as_integer("epoch", epoch, least=0, optional=False)
        self._begin_at(self._next if self._next.epoch == epoch else Position(epoch=epoch))
        self._last = None
        self._told_epoch = epoch
        for told in find_samplers(self):
            tell = getattr(told, "set_epoch", None)
            if tell is not None:
                tell(epoch)

    def _begin_at(self, position: Position) -> None:
        """Let the next pass begin at this position."""
        self._next = position
        if self._shard is not None:
            self._shard.set_epoch(position.epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader as a small dict; may be called at any time.

        A loader that loads it resumes after the last batch delivered; batches made ahead count as
        undelivered. After the last batch of an epoch the state is the end of that epoch; once the
        loop has ended, it is the start of the next one. With neither `seed` nor `generator`, later
        epochs draw from torch's default generator, whose state the program has to keep.

        The state of a sharded loader holds for all ranks, and any number of ranks may load it, with
        any batch size: it says how many samples of the epoch all of them have had, if each has had
        as many batches as this one.

        A dataset with `state_dict` and `load_state_dict` is saved with it, and so is its iterator
        if it is iterable. With workers that is each worker's copy, whose `state_dict` is called
        after every batch; in the middle of an epoch such a state needs the same number of workers.
        An iterable dataset without these methods is read again up to the position.

        Raises:
            TypeError: the dataset is iterable and its `state_dict` needs arguments, or it is a data
                pipe that workers read; or the loader is sharded and `in_order` is False.
            RuntimeError: the dataset is iterable, and Ctrl-C interrupted reading it.
        """
        return save(self)

    def load_state_dict(self, state: Any) -> None:
        """Let the next pass resume where `state_dict` was called.

        The number of workers may differ, unless each has a copy of its own of the dataset: an
        iterable one, or one with a `state_dict`.

        Raises:
            ValueError: the state is another version's, or of a loader with another sampler, batch
                size, `drop_last`, length of the dataset, seed or source of randomness; or one of
                its keys is missing, has another kind of value, or is of another number of workers.
                Nothing is changed then.
            TypeError: see `state_dict`.
        """
        load(self, state)

    def stats(self) -> LoaderStats:
        """Return counts and times since the loader was made; `str` of them is the verdict."""
        slot_wait_s = self._slots.wait_s if self._slots else 0.0
        return replace(self._stats, slot_wait_s=slot_wait_s, path=find_path(self)[1])

    def __str__(self) -> str:
        """Say how batches are made, and why not faster: `stats().path`."""
        return f"fastamp.DataLoader: {find_path(self)[1]}"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the statistics and slots, which a copy begins anew, and the workers."""
        last = self._last and self._last.now()
        new = {"_stats": LoaderStats(), "_slots": None, "_inner": None, "_last": last}
        return {**vars(self), **new, "_moved": None}

    @property
    def _in_threads(self) -> bool:
        """Whether the workers are threads."""
        return self.num_workers > 0 and self.worker == "thread"

    def check_worker_number_rationality(self) -> None:
        """Warn as torch does of more processes than cores, but not of threads, which may wait."""
        if not self._in_threads:
            super().check_worker_number_rationality()

    @property
    def _batches(self) -> Any:
        """The sampler of batches, or of single indices where the loader does not batch."""
        return self.sampler if self.batch_sampler is None else self.batch_sampler
