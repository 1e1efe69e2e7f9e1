"""`fastamp.DataLoader`: torch's, with native gathering, exact resume and statistics."""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, Sampler, SequentialSampler

from fastamp._ops import untraced
from fastamp.data.checks import as_integer, check_device, check_generator, check_worker
from fastamp.data.collate import BatchCollator
from fastamp.data.columns import Column, find_core
from fastamp.data.copied import CopiedBatches
from fastamp.data.datasets import by_name
from fastamp.data.gather import GatherSource
from fastamp.data.items import (
    CallerBatches,
    Items,
)
from fastamp.data.passes import LoaderPass
from fastamp.data.plan import Plan, find_generator, find_samplers
from fastamp.data.position import VERSION, Position, decode, encode, find_save
from fastamp.data.resident import move
from fastamp.data.sample_rng import draw_seed
from fastamp.data.shard import ShardSampler, check_shardable, find_ranks
from fastamp.data.shuffle import FeistelSampler, is_long
from fastamp.data.slots import DEFAULT_MAX_BYTES, Slots, can_pin
from fastamp.data.sources import (
    Columns,
    count_scattered,
    find_device,
    find_make,
    is_default,
    read_columns,
    why_not,
)
from fastamp.data.stats import LoaderStats
from fastamp.data.threads import Maker, ThreadBatches
from fastamp.data.torch_loader import OPTIONS, TorchLoader, stateful_loader
from fastamp.data.workers import Team, WorkerInfo

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class DataLoader(TorchDataLoader[T_co]):
    """Load batches as torch.utils.data.DataLoader does: same arguments, same batches, less time.

    Datasets in memory or in a mapped file are gathered by threads of the compiled core, ahead of
    the consumer: TensorDataset, `fastamp.ArrayDataset`, `fastamp.TokenDataset`, a
    `fastamp.Source` with columns, a tensor, a NumPy array or memmap, a dict of these (which is an
    ArrayDataset), a Hugging Face dataset (format "torch", "numpy" or none) of integers, floats and
    lists of one length, and a Subset of any. Their batches are those of `default_collate`, and no
    worker processes are started. Every other dataset, and every dataset with a `collate_fn` or a
    `worker_init_fn` of the user's, is read item by item: in the loop's thread, in torch's worker
    processes, or in threads if `worker` says so, with `fastamp.BatchCollator` where no `collate_fn`
    is given. The user's own code runs where torch runs it.

    A batch that the user keeps is never overwritten.

    If a tensor of the dataset is resized, shared or given other memory during a pass, the rest of
    the pass is read item by item, as in torch; NumPy refuses to resize an array during a pass. A
    mapped file that is cut short raises a BufferError, where the core gathers it. Three things go
    unnoticed: a file that another process changes in place, or cuts short within the page that is
    read; what is written into a NumPy array, or through `tensor.data`, after a batch was begun; and
    memory that is freed and used again while a batch is copied from it. With
    `device=`, what the loop writes into a dataset that is gathered may be missing from the next two
    batches, whose copies have begun.

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
            repeatable. `fastamp.get_worker_info()` and `worker_init_fn` work in threads. An
            iterable dataset, and a `__getitem__` that computes in Python, need processes.
        resident: keep the dataset, which must be one that is gathered, on the device: the first
            pass moves all of it. Batches are gathered there, so only row numbers are copied, and
            nothing waits for them. Batches and states are the same as without it. Later writes into
            the dataset are not seen. Tensors that are on the device already are gathered there
            anyway. Images cannot be augmented there.
        max_bytes: the most memory that the loader itself holds: batches gathered ahead, and slots
            for large ones. None is 1 GiB, or one batch if that is larger. Workers, of both kinds,
            make as many batches ahead as `prefetch_factor` says.

    Raises:
        ValueError: as torch's; `max_bytes` is not positive, or, when a pass begins, less than one
            batch; `resident` without a device, or, when a pass begins, with a dataset that is not
            gathered, or does not fit there; the arrays of a dict differ in length; a sharded loader
            has a sampler of the user's; only one of `rank` and `world_size` is given, or `rank` is
            too large.
        TypeError: a sharded loader, or one of threads, has an iterable dataset.
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
        dataset = by_name(dataset)
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
        self.seed = seed
        self.max_bytes = max_bytes
        self._shard = sampler if isinstance(sampler, ShardSampler) else None
        self._next = Position(epoch=0)  # where the next pass begins
        self._last: Position | None = None  # of the pass that began last
        self._told_epoch: int | None = None
        self._forget_workers()

    def _forget_workers(self) -> None:
        """Begin anew with all that lives longer than a pass."""
        self._base_seed: int | None = None  # of workers, once a pass has begun
        self._moved: list[Column] | None = None  # to the device, if `resident`
        self._slots: Slots | None = None
        self._stats, self._path = LoaderStats(), ""
        self._inner: TorchLoader | None = None  # whose workers persist
        self._team: Team | None = None  # whose threads persist
        self._times: Tensor | None = None  # seconds of each worker process, shared with it

    @untraced
    def __iter__(self) -> LoaderPass:  # type: ignore[override]  # torch's class cannot be made
        """Begin a pass: at the start of an epoch, or where a loaded state stopped."""
        return self._get_iterator()

    def _get_iterator(self) -> LoaderPass:  # type: ignore[override]
        """Begin a pass. Subclasses override it to wrap the pass, as those of torch's loader."""
        if self.timeout and not self.num_workers:
            msg = f"timeout: expected 0 without workers, got {self.timeout}"
            raise AssertionError(msg)  # as torch's
        if self.num_workers and not self.prefetch_factor:
            msg = f"prefetch_factor must be greater than 0, got {self.prefetch_factor}"
            raise AssertionError(msg)  # as torch's
        shard, columns = self._shard, self._find_columns()
        if shard is not None and shard.epoch != self._next.epoch:  # by the sampler's own set_epoch
            self.set_epoch(shard.epoch)
        begins_at, last, inner = self._next, self._last, self._inner
        position = replace(begins_at)
        self._begin_at(Position(epoch=position.epoch + 1))
        self._last = position
        if self.generator is not None and self.seed is not None and shard is None:
            self.generator.manual_seed(self.seed + position.epoch)
        try:
            return self._begin(position, columns)
        except BaseException:  # the next call begins at the same place
            self._begin_at(begins_at)
            self._last, self._inner = last, inner
            raise

    @property
    def _keeps_generator(self) -> bool:
        """Whether the order of later epochs depends on the state of the loader's generator."""
        return self.generator is not None and self.seed is None and self._shard is None

    def _find_columns(self) -> Columns | None:
        """Return the dataset's columns if they are gathered; note how batches are made."""
        reason = why_not(self.collate_fn, self.worker_init_fn)
        reason = reason if self._auto_collation else "the loader makes no batches"
        columns, count = None, self.num_workers
        if not reason:
            limit = self.max_bytes or DEFAULT_MAX_BYTES
            wanted = "cpu" if self.pin_memory else self.device
            columns, reason = read_columns(self.dataset, wanted, limit)
        if columns is None:
            kind = "thread" if self._in_threads else "worker"
            workers = f", in {count} {kind}{'s' * (count > 1)}" if count else ""
            self._path = f"item by item{workers}: {reason}"
            if self._find_make() is not None:
                self._path = f"batch by batch{workers}: {type(self.dataset).__name__}.make"
            if self.resident:
                msg = (
                    f"resident=True: expected a dataset that is gathered, this is read {self._path}"
                )
                raise ValueError(msg)
            return None
        own = find_device(columns.columns)
        if own.type != "cpu" or self.resident:
            self._path = f"gathered on {own if self.device is None else self.device}"
        else:
            copied = count_scattered(columns)
            rows = f", from a copy in row order of {copied:,} bytes, made for each pass"
            self._path = "gathered by " + ("the compiled core" if find_core() else "Python")
            self._path += rows * (copied > 0)
        device = torch.device("cpu" if self.device is None else self.device)
        if not self.resident or device.type == "cpu" or own.type != "cpu":
            return columns
        if self._moved is None:
            self._moved = move(columns.columns, device)
        return columns._replace(columns=self._moved)

    def _begin(self, position: Position, columns: Columns | None) -> LoaderPass:
        """Begin a pass at a position."""
        device = None if self.device is None else torch.device(self.device)
        to_device = device is not None and device.type != "cpu"
        if self._slots is None or self._slots.owner_pid != os.getpid():
            pinned = self.pin_memory or (device is not None and device.type == "cuda")
            limit = self.max_bytes or DEFAULT_MAX_BYTES
            self._slots = Slots(pinned=pinned and can_pin(), max_bytes=limit)
        samplers = find_samplers(self)
        generator = find_generator(samplers)
        seed = self.seed if generator is not None and generator is self.generator else None
        sampler = self.batch_sampler if self._auto_collation else self.sampler
        plan = Plan(sampler, generator, seed, position, not self._auto_collation)
        batches: Iterator[Any]
        if columns is not None:
            batches = self._gather(columns, plan, self._slots)
            to_device = to_device and find_device(columns.columns).type == "cpu"
        elif self._in_threads:
            batches = self._in_thread_workers(plan, self._slots)
        elif self.num_workers or self._has_state:
            batches, plan = self._through_torch(plan, self._slots)
        else:
            batches = self._in_this_thread(plan, self._slots)
        position.begun = True
        position.persists = self.persistent_workers and self.num_workers > 0
        if device is not None and to_device:
            makes_fresh = columns is not None or type(self.collate_fn) is BatchCollator
            batches = CopiedBatches(batches, device, keeps=not makes_fresh)
        return LoaderPass(batches, position, self._stats, self.__len__, plan.states)

    def _lease_from(self, slots: Slots) -> None:
        if type(self.collate_fn) is BatchCollator:
            self.collate_fn.lease_from(slots)

    def _begin_plan(self, plan: Plan, begin: Callable[[], Iterator[T]]) -> Iterator[T]:
        """Begin a sampler and draw the seed of workers, in the order of torch's iterators."""
        again = self.persistent_workers and self.num_workers > 0 and self._base_seed is not None
        batches = begin()
        if again:  # they keep their seed
            self._note_seed(plan.position, self._base_seed or 0, self.generator)
            return batches
        source = self._seed_source(plan.position)
        self._note_seed(plan.position, draw_seed(source), source)
        if self.num_workers:  # torch's begin their sampler once more
            return begin()
        return batches

    def _seed_source(self, position: Position) -> torch.Generator:
        """Return what the seed of workers is drawn from."""
        source = torch.default_generator if self.generator is None else self.generator
        if not position.begun:
            return source
        # The program's own draws go on as if this pass had not been begun once more.
        apart = torch.Generator()
        apart.set_state(source.get_state())
        return apart

    def _note_seed(
        self, position: Position, base_seed: int, source: torch.Generator | None
    ) -> None:
        """Note what a resumed pass needs: the samples' seed, and the state after it was drawn.

        Samples have the loader's seed, or the one that torch's iterators draw.
        """
        self._base_seed = base_seed
        if self._keeps_generator and source is not None and not position.begun:
            position.generator = source.get_state()
        if position.sample_seed is None:
            seed = self.seed if self._shard is None else self._shard.seed
            position.sample_seed = base_seed if seed is None else seed

    def _gather(self, columns: Columns, plan: Plan, slots: Slots) -> GatherSource:
        """Return the batches that the core gathers."""
        batches = self._begin_plan(plan, plan.begin_rows)
        if self.num_workers:  # torch's draw before the consumer asks
            batches = chain([*islice(batches, 1)], batches)
        return GatherSource(
            columns,
            batches,
            slots,
            self._stats,
            Items(self.dataset, self.collate_fn, None, single=False),
            plan.order,
            is_computed=plan.is_computed,
            num_full=math.inf if self.num_workers else plan.num_full,
            max_bytes=self.max_bytes,
        )

    def _in_this_thread(self, plan: Plan, slots: Slots) -> CallerBatches:
        """Return batches that are made item by item, when they are asked for."""
        self._lease_from(slots)
        batches = self._begin_plan(plan, plan.begin)
        items = self._items(Items)
        return CallerBatches(
            batches, plan.order, items, self._stats, pins=self.pin_memory and can_pin()
        )

    def _items(self, kind: type[Items]) -> Items:
        return kind(
            self.dataset,
            self.collate_fn,
            self._find_make(),
            single=not self._auto_collation,
            worker_init_fn=self.worker_init_fn,
            times=self._times,
        )

    def _find_make(self) -> Callable[[Tensor, Tensor], Any] | None:
        return find_make(self.dataset, self.collate_fn) if self._auto_collation else None

    def _in_thread_workers(self, plan: Plan, slots: Slots) -> ThreadBatches:
        """Return batches that threads make."""
        self._lease_from(slots)
        count = self.num_workers
        batches = self._begin_plan(plan, plan.begin)
        maker = Maker(
            self.dataset,
            self.collate_fn,
            plan.order,
            make=self._find_make(),
            single=not self._auto_collation,
            pins=self.pin_memory and can_pin(),
            slots=slots if is_default(self.collate_fn) else None,
        )
        team = self._team
        if team is None or not (team.is_here and self.persistent_workers):
            seed = self._base_seed or 0
            infos = [WorkerInfo(i, count, seed + i, self.dataset) for i in range(count)]
            team = Team(infos, self.worker_init_fn)
        self._team = team if self.persistent_workers else None
        return ThreadBatches(
            batches,
            team,
            maker,
            self._stats,
            self.timeout,
            ahead=(self.prefetch_factor or 2) * count,
            in_order=self.in_order,
        )

    def _through_torch(self, plan: Plan, slots: Slots) -> tuple[Iterator[Any], Plan]:
        """Return the batches of torch's iterator over processes or a stream, and their plan."""
        position, count = plan.position, self.num_workers
        if not count:
            self._lease_from(slots)
        source = self._seed_source(position)
        apart = torch.Generator()
        apart.set_state(source.get_state())
        if self._base_seed is None or not (self.persistent_workers and count):
            self._base_seed = draw_seed(apart)  # torch's iterator draws the same one
        self._note_seed(position, self._base_seed, apart)
        if self._times is None:
            self._times = torch.zeros(max(count, 1), 2, dtype=torch.float64, device="cpu")
            if count:
                self._times.share_memory_()  # type: ignore[no-untyped-call]
        if self._inner is None or not self.persistent_workers:
            items = None if self._is_stream else self._items
            options = {name: getattr(self, name) for name in OPTIONS}
            self._inner = TorchLoader(self.dataset, items, plan, options)
        length = self._IterableDataset_len_called
        return self._inner.begin(position, source, length, self._stats), self._inner.plan

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

        A sampler with `state_dict` and `load_state_dict` is asked after each of its batches, and
        its state is in the loader's. A dataset with these methods is saved and loaded by torchdata
        (the extra `state`), as by its StatefulDataLoader. An iterable dataset without them is read
        again up to the position.

        Raises:
            ImportError: the dataset has a state, and torchdata is not installed.
            TypeError: threads read a dataset with a state; its `state_dict` needs arguments; or
                `in_order` is False with workers.
            RuntimeError: the dataset has a state, and Ctrl-C interrupted reading it.
        """
        self._check_state()
        position = (self._last or self._next).now()
        generator, own = self.generator, find_generator(find_samplers(self))
        shard = self._shard
        if self._keeps_generator and generator is not None and position.generator is None:
            position.generator = generator.get_state()
        if position.rng is None and own is not None and own is not generator:
            position.rng = own.get_state()
        if shard is not None:
            at_once = (self.batch_size or 1) * shard.num_replicas
            had = position.consumed + position.batch * at_once
            position.batch, position.consumed = 0, min(had, len(self.dataset))  # type: ignore[arg-type]
        state = {"version": VERSION, **self._identity(), "told_epoch": self._told_epoch}
        return {**state, **encode(position)}

    def _check_state(self) -> None:
        """Raise an error for a loader whose position cannot be known."""
        name = type(self.dataset).__name__
        if self._is_stream and hasattr(self.dataset, "state_dict") and not find_save(self.dataset):
            msg = (
                f"dataset: the state_dict of {name} takes arguments, so its position is unknown; "
                "save and load the dataset's own state beside the loader"
            )
            raise TypeError(msg)
        if self._has_state and self._in_threads:
            msg = (
                f"worker='thread': {name} has a state_dict, and threads read ahead of it; use "
                "worker='process' to save and load its position"
            )
            raise TypeError(msg)
        if find_save(self.dataset) and stateful_loader() is None:
            msg = (
                f"dataset: torchdata saves and loads the state of {name}, and it cannot be "
                "imported: pip install 'fastamp[state]'"
            )
            raise ImportError(msg)
        if self.num_workers > 0 and not self.in_order:
            msg = "in_order=False: which batches are delivered is unknown; use in_order=True"
            raise TypeError(msg)

    def _identity(self) -> dict[str, Any]:
        """Return what two loaders must have in common for one to load the other's state."""
        batches: Any = self.batch_sampler if self._auto_collation else self.sampler
        shard, size, seed = self._shard, getattr(batches, "batch_size", None), self.seed
        drawn = find_generator(find_samplers(self))
        source = "torch's default generator" if drawn is None else "a generator"
        if shard is not None:
            size, seed, source = None, shard.seed, "the seed" if shard.shuffle else "nothing"
            if shard.shuffle and is_long(self.dataset):
                source = "the seed, by a Feistel network"
        return {
            "sampler": type(getattr(batches, "sampler", batches)).__name__,
            "batch_size": size,
            "drop_last": getattr(batches, "drop_last", False),
            "length": None if self._is_stream else len(self.dataset),  # type: ignore[arg-type]
            "seed": seed,
            "source of randomness": source,
            "num_workers": self.num_workers if self._has_state else None,
        }

    def load_state_dict(self, state: Any) -> None:
        """Let the next pass resume where `state_dict` was called.

        The number of workers may differ, unless the dataset is iterable or has a state: then each
        worker has a copy of its own.

        Raises:
            ValueError: the state is another version's, or of a loader with another sampler, batch
                size, `drop_last`, length of the dataset, seed, source of randomness or number of
                workers; or one of its keys is missing, or has another kind of value. Nothing is
                changed then.
            ImportError, TypeError: see `state_dict`.
        """
        self._check_state()
        position, told_epoch = decode(state, self._identity())
        if told_epoch is not None:
            self.set_epoch(told_epoch)
        if position.generator is not None and self.generator is not None:
            self.generator.set_state(position.generator)
        self._begin_at(position)
        self._last = self._inner = self._team = self._base_seed = None  # workers have moved on

    def stats(self) -> LoaderStats:
        """Return counts and times since the loader was made; `str` of them is the verdict."""
        stats = replace(self._stats, path=self._how())
        if self._times is not None:
            getitem_s, collate_s = self._times.sum(0).tolist()
            stats.getitem_s += getitem_s
            stats.collate_s += collate_s
        return stats

    def _how(self) -> str:
        """Return how batches are made, as of the last pass."""
        if not self._path:
            self._find_columns()
        return self._path

    def __str__(self) -> str:
        """Say how batches are made, and why not faster: `stats().path`."""
        return f"fastamp.DataLoader: {self._how()}"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the statistics and slots, which a copy begins anew, and the workers."""
        clone = object.__new__(type(self))
        vars(clone).update(vars(self), _last=self._last and self._last.now())
        clone._forget_workers()
        return vars(clone)

    @property
    def _in_threads(self) -> bool:
        """Whether the workers are threads."""
        return self.num_workers > 0 and self.worker == "thread"

    @property
    def _is_stream(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    @property
    def _has_state(self) -> bool:
        """Whether the dataset has a position or a state of its own."""
        return self._is_stream or find_save(self.dataset) is not None

    def check_worker_number_rationality(self) -> None:
        """Warn as torch does of more processes than cores, but not of threads, which may wait."""
        if not self._in_threads:
            super().check_worker_number_rationality()
