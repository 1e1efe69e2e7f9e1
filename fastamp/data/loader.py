"""`fastamp.DataLoader`: torch's, with gathered batches, exact resume and statistics."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, IterDataPipe, Sampler, SequentialSampler

from fastamp._ops import untraced
from fastamp.data.checks import as_integer
from fastamp.data.datasets import by_name
from fastamp.data.making import Options, begin_pass, describe, find_batches, find_source
from fastamp.data.order import SeededSampler, Share, find_samplers, find_share
from fastamp.data.passes import LoaderPass, LoaderStats
from fastamp.data.position import Position, decode, encode, has_state

T_co = TypeVar("T_co", covariant=True)


class DataLoader(TorchDataLoader[T_co]):
    """Load batches as torch.utils.data.DataLoader does: same arguments, same batches, less time.

    Datasets in memory or in a mapped file are gathered, without workers and without any Python for
    each item: TensorDataset, `fastamp.ArrayDataset`, `fastamp.TokenDataset`, a `fastamp.Source`, a
    tensor, a NumPy array or memmap, a dict of these (which is an ArrayDataset), a Hugging Face
    dataset (format "torch", "numpy" or none) of numbers and lists of one length, and a Subset of
    any. Every other dataset, and any with a `collate_fn` of the user's, is read item by item: in
    the loop's thread, in torch's worker processes, or in threads. `str(loader)` says how, and why.

    A batch that the user keeps is never overwritten. A batch is gathered when the loop asks for it,
    so what the loop writes into the dataset is in the next one; on the way to CUDA in the one after
    it, or in part.

    Args:
        dataset: this and all arguments up to `in_order` are torch.utils.data.DataLoader's.
        device: the device of the batches' tensors, in any nesting of dicts, lists, tuples and
            dataclasses, and of objects with a method `to`. For CUDA a thread gathers the next batch
            and begins its copy; other batches are copied when they are asked for. Tensors that are
            on the device already are gathered there.
        seed: shuffles epoch n with the seed `seed + n`, not by `generator`. The order is torch's.
        shard: load this rank's part of the dataset: that of DistributedSampler with this `shuffle`,
            `drop_last` and `seed` (or 0). The ranks are torch.distributed's, or one where it is not
            initialized. `len(loader)` is of this rank; `sampler` and `batch_sampler` yield the
            order of the whole dataset.
        rank: used with `world_size` in place of torch.distributed's; both imply `shard`.
        world_size: the number of ranks, and of parts.
        worker: what `num_workers` counts. None and "process": processes, as torch has them.
            "thread": threads of this process, each with a shallow copy of the dataset. Random
            numbers are repeatable there if they come from `fastamp.sample_rng()`. A `__getitem__`
            that computes in Python needs processes.
        max_bytes: the most memory that the loader itself keeps: buffers of large batches for the
            next ones, and columns of a Hugging Face dataset. None is 1 GiB.

    Raises:
        ValueError: as torch's; `max_bytes` is not positive; the arrays of a dict differ in length;
            a sharded loader has a sampler of the user's; only one of `rank` and `world_size` is
            given, or `rank` is too large; threads have an iterable dataset, or are given `timeout`,
            `persistent_workers`, `multiprocessing_context` or `in_order=False`.
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
    ) -> None:
        max_bytes = as_integer("max_bytes", max_bytes, least=1) or 1 << 30
        seed = as_integer("seed", seed, least=0)
        of_processes = {
            "multiprocessing_context": multiprocessing_context is not None,
            "in_order": not in_order,
            "timeout": timeout != 0,
            "persistent_workers": persistent_workers,
            "iterable dataset": isinstance(dataset, IterableDataset),
        }
        given = [*filter(of_processes.get, of_processes)]
        if worker not in (None, "process", "thread"):
            msg = f"worker: expected None, 'process' or 'thread', got {worker!r}"
            raise ValueError(msg)
        if worker == "thread" and given:
            msg = f"{given[0]}: expected worker='process' with it, got worker='thread'"
            raise ValueError(msg)
        dataset, share = by_name(dataset), None
        if shard or rank is not None or world_size is not None:
            if type(sampler) is SequentialSampler:  # Lightning's, to overfit
                sampler, shuffle = None, False
            inner: Any = getattr(batch_sampler, "sampler", None)
            if type(inner) in (SequentialSampler, SeededSampler):  # Lightning's, to predict
                batches: Any = batch_sampler
                batch_size, drop_last = batches.batch_size, batches.drop_last
                shuffle, batch_sampler = isinstance(inner, SeededSampler), None
            if sampler is not None or batch_sampler is not None:
                name = "sampler" if batch_sampler is None else "batch_sampler"
                msg = f"{name}: expected None for a sharded loader, which makes its own"
                raise ValueError(msg)
            if isinstance(dataset, IterableDataset):
                name = type(dataset).__name__
                msg = f"dataset: {name} is iterable: it has no indices to share out among ranks"
                raise TypeError(msg)
            share, seed = find_share(rank, world_size), seed or 0
        is_seeded = shuffle and seed is not None and sampler is None and batch_sampler is None
        if is_seeded and not isinstance(dataset, IterableDataset):  # which torch refuses
            sampler, shuffle = SeededSampler(dataset, seed or 0), None
        on = None if device is None else torch.device(device)
        self._fastamp = Options(on, seed, share, worker, max_bytes)
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
        if isinstance(self.sampler, SeededSampler):
            self._fastamp.next.epoch = self.sampler.epoch

    @untraced
    def __iter__(self) -> LoaderPass:  # type: ignore[override]  # torch's class cannot be made
        """Begin a pass: at the start of an epoch, or where a loaded state stopped."""
        return self._get_iterator()

    def _get_iterator(self) -> LoaderPass:  # type: ignore[override]
        """Begin a pass. Subclasses override it to wrap the pass, as those of torch's loader."""
        return begin_pass(self, self._fastamp.device)

    def _begin_on(self, device: torch.device | None) -> LoaderPass | None:
        """Begin a pass for `prefetch`; None if a subclass begins passes in its own way."""
        own = type(self)
        if own.__iter__ is not DataLoader.__iter__ or own._get_iterator is not _GET_ITERATOR:
            return None
        return begin_pass(self, self._fastamp.device if device is None else device)

    def __len__(self) -> int:
        return self._count_batches(0)

    def _count_batches(self, consumed: int) -> int:
        """Return the batches of an epoch, on this rank, after so many samples of all ranks."""
        share = self._fastamp.share
        if share is None:
            return super().__len__()
        count = share.size(len(self.dataset), consumed, drop_last=self.drop_last)  # type: ignore[arg-type]
        size = self.batch_size or 1
        return count // size if self.drop_last else -(-count // size)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, for `seed`, and for samplers that have `set_epoch`.

        A loaded state of this epoch stays in force. Without a call each pass is the next epoch.

        Raises:
            ValueError: `epoch` is not an integer of at least 0.
        """
        own = self._fastamp
        epoch = as_integer("epoch", epoch, least=0, optional=False)
        position = own.next if own.next.epoch == epoch else Position(epoch)
        own.begin_at(replace(position, told_epoch=epoch), self.sampler)
        for sampler in find_samplers(self):
            tell = getattr(sampler, "set_epoch", None)
            if tell is not None:
                tell(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader as a small dict; may be called at any time.

        A loader that loads it resumes after the last batch delivered. A state taken inside the loop
        is in the middle of the epoch. Once the pass's iterator is gone, also by `break` or by an
        error in the loop's body, the epoch has ended, and a state taken then begins the next one.
        (`next(iter(loader))` is such a pass.) With neither `seed` nor `generator`, later epochs
        draw from torch's default generator, whose state the program has to keep.

        That of a sharded loader may be loaded by any number of ranks, with any batch size, if each
        rank has had as many batches as this one. A dataset with `state_dict` and `load_state_dict`
        is asked now. Other iterable datasets, and samplers, are read again up to the position.

        Raises:
            TypeError: workers read an iterable dataset, or one with a state; the dataset is a pipe
                of torch's; a sampler has a `state_dict`; or `in_order` is False with workers.
            RuntimeError: the dataset has a state, and the pass was interrupted or failed.
        """
        check_state(self)
        own = self._fastamp
        begun = None if own.begun is None else own.begun()
        in_pass = begun is not None and not begun.ended
        position = replace(begun.position if begun is not None and in_pass else own.next)
        if has_state(self.dataset) and (in_pass or position.dataset_state is None):
            if begun is not None and begun.broken:
                msg = "the pass was interrupted or failed: the dataset's position is unknown"
                raise RuntimeError(msg)
            position.dataset_state = self.dataset.state_dict()  # type: ignore[attr-defined]
        source = find_source(self)
        if position.generator is None and source is not None:
            position.generator = source.get_state()
        if position.sample_seed is None and self.persistent_workers and own.seed is None:
            position.sample_seed = own.base_seed  # no pass draws another
        if own.share is not None:
            at_once = (self.batch_size or 1) * own.share.ranks
            had = position.consumed + position.batch * at_once
            position.batch, position.consumed = 0, min(had, len(self.dataset))  # type: ignore[arg-type]
        return {**identity_of(self), **encode(position)}

    def load_state_dict(self, state: Any) -> None:
        """Let the next pass resume where `state_dict` was called.

        The number of workers may differ.

        Raises:
            ValueError: the state is damaged, another version's, or of a loader with another
                sampler, batch size, `drop_last`, length of the dataset, seed or source of
                randomness. Nothing is changed then.
            TypeError: see `state_dict`.
        """
        check_state(self)
        own = self._fastamp
        position = decode(state, identity_of(self))
        if position.told_epoch is not None:
            self.set_epoch(position.told_epoch)
        source = find_source(self)
        if position.sample_seed is None and position.generator is not None:  # between two passes
            if source is not None:
                source.set_state(position.generator)
            position.generator = None
        own.begin_at(position, self.sampler)
        own.inner = own.base_seed = None  # workers have moved on

    def stats(self) -> LoaderStats:
        """Return counts and times since the loader was made; `str` of them is the verdict."""
        return replace(self._fastamp.stats, path=describe(self))

    def __str__(self) -> str:
        """Say how batches are made, and why not faster: `stats().path`."""
        return f"fastamp.DataLoader: {describe(self)}"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out statistics, memory and workers, which a copy begins anew."""
        own = self._fastamp
        clone = Options(own.device, own.seed, own.share, own.worker, own.max_bytes)
        clone.next = replace(own.next)
        return {**vars(self), "_fastamp": clone}

    def check_worker_number_rationality(self) -> None:
        """Warn as torch does of more processes than cores, but not of threads, which may wait."""
        if self._fastamp.worker != "thread":
            super().check_worker_number_rationality()


_GET_ITERATOR = DataLoader._get_iterator


def find_share_of(loader: Any) -> Share | None:
    """Return the rank's share that a loader loads; None of a loader that is not sharded."""
    return loader._fastamp.share if isinstance(loader, DataLoader) else None


def check_state(loader: DataLoader[Any]) -> None:
    """Raise an error for a loader whose position cannot be known."""
    dataset, count, use = loader.dataset, loader.num_workers, "torchdata's StatefulDataLoader"
    sampler = next(filter(has_state, find_samplers(loader)), None)
    if isinstance(dataset, IterDataPipe):
        msg = "dataset: the position of a pipe of torch's is unknown: use an IterableDataset"
    elif count and (isinstance(dataset, IterableDataset) or has_state(dataset)):
        msg = f"num_workers: {type(dataset).__name__} has a position of its own in each of {count} "
        msg += f"workers, which is unknown here: use num_workers=0, or {use}"
    elif sampler is not None:
        msg = f"sampler: {type(sampler).__name__} has a state of its own, ahead of the loop's: "
        msg += f"use a sampler without one, or {use}"
    elif count and not loader.in_order:
        msg = "in_order=False: which batches are delivered is unknown; use in_order=True"
    else:
        return
    raise TypeError(msg)


def identity_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what two loaders must have in common for one to load the other's state."""
    own, is_stream = loader._fastamp, isinstance(loader.dataset, IterableDataset)
    batches = find_batches(loader)
    source = "torch's default generator" if find_source(loader) is None else "a generator"
    has_length = not is_stream and hasattr(loader.dataset, "__len__")
    return {
        "version": 5,
        "sampler": type(getattr(batches, "sampler", batches)).__name__,
        "is_sharded": own.share is not None,
        "batch_size": None if own.share is not None else getattr(batches, "batch_size", None),
        "drop_last": getattr(batches, "drop_last", False),
        "length": len(loader.dataset) if has_length else None,  # type: ignore[arg-type]
        "seed": own.seed,
        "source of randomness": source if own.seed is None else "the seed",
    }
