"""Who makes the batches of a pass over a loader, and out of what."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice, takewhile
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch.utils.data import BatchSampler, IterableDataset, IterDataPipe, default_collate
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from fastamp.data.arrays import Columns
from fastamp.data.collate import BatchCollator
from fastamp.data.copies import CudaCopies, copy_all
from fastamp.data.items import (
    Items,
    Made,
    StreamItems,
    WorkerItems,
    WorkerJobs,
    as_list,
    change,
    is_batch,
)
from fastamp.data.memory import Memory, can_pin
from fastamp.data.order import Plan, SeededSampler, Share, find_generator, find_samplers, seeded
from fastamp.data.passes import LoaderPass, LoaderStats
from fastamp.data.position import Position, has_state
from fastamp.data.runners import become_worker, here, in_threads, own_copy
from fastamp.data.sample_rng import Batch, Order, draw_seed, find_pass_key, generators_kept
from fastamp.data.sources import Gathered, find_columns

_DEFAULT, _TORCHS_NEXT = BatchCollator(), _BaseDataLoaderIter.__next__


@dataclass
class Options:
    """A loader's options beyond torch's, its place, and what lives longer than a pass."""

    device: torch.device | None
    seed: int | None
    share: Share | None
    worker: str | None
    max_bytes: int
    next: Position = field(default_factory=Position)
    """Where the next pass begins."""
    begun: "ref[LoaderPass] | None" = None
    """The pass that began last, while it lives."""
    stats: LoaderStats = field(default_factory=LoaderStats)
    memory: Memory | None = None
    base_seed: int | None = None
    """Of the workers, once a pass has begun."""
    inner: Any = None
    """torch's loader, whose workers persist."""

    def begin_at(self, position: Position, sampler: Any) -> None:
        """Let the next pass begin at this position."""
        self.next, self.begun = position, None
        if isinstance(sampler, SeededSampler):
            sampler.place(position.epoch)


def find_source(loader: Any) -> torch.Generator | None:
    """Return what the order of later epochs is drawn from; None for torch's default generator."""
    generator: torch.Generator | None = loader.generator if loader._fastamp.seed is None else None
    return find_generator(find_samplers(loader)) or generator


def find_batches(loader: Any) -> Any:
    """Return what yields a loader's batches of indices, of the whole dataset, or its indices."""
    if not loader._auto_collation:
        return loader.sampler
    if loader._fastamp.share is not None or isinstance(loader.sampler, SeededSampler):
        return BatchSampler(loader.sampler, loader.batch_size, loader.drop_last)
    return loader.batch_sampler


def begin_pass(loader: Any, device: torch.device | None) -> LoaderPass:
    """Begin a pass over a fastamp.DataLoader."""
    own, sampler = loader._fastamp, loader.sampler
    if isinstance(sampler, SeededSampler) and sampler.told is not None:
        if sampler.told != own.next.epoch:
            loader.set_epoch(sampler.told)
        sampler.told = None
    position = Position(**vars(own.next))
    batches = Making(loader, position, device).begin()
    own.begin_at(Position(position.epoch + 1, told_epoch=position.told_epoch), sampler)
    begun = LoaderPass(batches, position, own.stats, loader.__len__)
    own.begun = ref(begun)
    return begun


class Making:
    """Chooses what makes the batches of a pass, and who."""

    def __init__(self, loader: Any, position: Position, device: torch.device | None) -> None:
        self.loader, self.own, self.position = loader, loader._fastamp, position
        self.device, self.single = device, not loader._auto_collation
        own = self.own
        self.source = loader.generator or torch.default_generator
        """What the seed of workers is drawn from, as torch does, if there is no `seed`."""
        if loader.generator is None and own.seed is not None and own.share is None:
            self.source = seeded(own.seed + position.epoch)
        self.generator: torch.Generator | None = None
        """Draws that seed once more, in torch's own iterator."""
        seed = own.seed
        if seed is None and isinstance(loader.sampler, SeededSampler):
            seed = loader.sampler.seed  # the loader was made anew of another one's attributes
        self.plan = Plan(find_batches(loader), self.single, seed, own.share, find_source(loader))
        pinned = (loader.pin_memory or (device is not None and device.type == "cuda")) and can_pin()
        if own.memory is None or own.memory.pinned != pinned:
            own.memory = Memory(pinned=pinned, max_bytes=own.max_bytes)

    def begin(self) -> Iterator[Made]:
        """Return the batches, on their device."""
        loader, device, columns = self.loader, self.device, find_way(self.loader)
        dataset, state = loader.dataset, self.position.dataset_state
        is_stream = isinstance(dataset, IterableDataset)
        if state is not None and not is_stream:
            dataset.load_state_dict(state)
        if isinstance(columns, Columns):
            items = Items(dataset, loader.collate_fn, single=False)
            gathered = Gathered(columns, self.own.memory, items, self.own.max_bytes)
            if device is not None and device.type == gathered.device.type:
                device = None if device.index in (None, gathered.device.index) else device
            elif device is not None and device.type == "cuda":
                return self._ahead(gathered, device)
            batches = here(gathered.make, self._jobs())
        elif is_stream and not (loader.num_workers or isinstance(dataset, IterDataPipe)):
            batches = self._read_stream()
        elif loader.num_workers and self.own.worker == "thread":
            batches = self._in_threads()
        elif loader.num_workers or is_stream or is_replaced():
            batches = self._by_torch()
        else:
            batches = here(self._items(dataset).make, self._jobs())
        if device is None or device.type == "cpu":
            return batches
        return copy_all(batches, device)

    def _ahead(self, gathered: Gathered, device: torch.device) -> Iterator[Made]:
        """Return gathered batches; a thread gathers the next one, and begins its copy."""
        copies = CudaCopies(device)

        def begin(_number: int) -> Callable[..., Made]:
            copies.enter_thread()
            return partial(gathered.make, start=copies.start)

        ahead = in_threads(1, "fastamp", begin, self._jobs(), ahead=1)
        return map(partial(change, copies.deliver), ahead)

    def _items(self, dataset: Any, *, in_process: bool = False) -> Items:
        collate_fn, memory = self.loader.collate_fn, self.own.memory
        if collate_fn is default_collate:
            made = BatchCollator() if in_process else _DEFAULT.with_memory(memory)
            collate_fn = made.make_default
        elif type(collate_fn) is BatchCollator and not in_process:
            collate_fn = collate_fn.with_memory(memory)
        pins = self.loader.pin_memory and can_pin() and not in_process
        return Items(dataset, collate_fn, single=self.single, pins=pins)

    def _jobs(self) -> Iterator[Any]:
        """Begin the order."""
        return self.plan.begin(self.position, self._draw_base)

    def _draw_base(self, apart: bool) -> None:  # noqa: FBT001 - one argument
        """Draw the seed of workers as torch's iterators do; workers that persist keep theirs.

        A pass that is begun again draws it apart from the program's generators.
        """
        own, position, seed = self.own, self.position, self.plan.seed
        if own.base_seed is None or not self.loader.persistent_workers:
            source = seeded(position.sample_seed or 0) if apart else self.source
            is_resumed = position.sample_seed is not None
            before: Any = None
            if is_resumed or self.generator is not None:
                before = source.get_state()
            if self.generator is not None:
                self.generator.set_state(before)
            own.base_seed = draw_seed(source)
            if seed is None and is_resumed and position.sample_seed != own.base_seed:
                # The workers persisted: theirs is an earlier pass's, and this one draws none.
                source.set_state(before)
                own.base_seed = position.sample_seed
        if position.sample_seed is None:
            position.sample_seed = own.base_seed if seed is None else seed

    def _in_threads(self) -> Iterator[Made]:
        loader, count, jobs = self.loader, self.loader.num_workers, self._jobs()
        grad, ahead = torch.is_grad_enabled(), max(1, loader.prefetch_factor * count)

        def begin(number: int) -> Callable[..., Made]:
            torch.set_grad_enabled(grad)
            seed = (self.own.base_seed or 0) + number  # as in torch's workers
            info = SimpleNamespace(id=number, num_workers=count, seed=seed, rng=None)
            info.dataset = own_copy(loader.dataset)
            with generators_kept():  # which torch's recipe for `worker_init_fn` seeds
                become_worker(info, loader.worker_init_fn)
            return self._items(info.dataset).make

        return in_threads(count, "fastamp worker", begin, jobs, ahead=ahead)

    def _by_torch(self) -> Iterator[Made]:
        """Return the batches of torch's own loader: its worker processes make them.

        It reads pipes too, and the dataset and its indices where a program has replaced what
        torch's iterators do for each batch.
        """
        loader, own, changed = self.loader, self.own, dict[str, Any]()
        is_stream = isinstance(loader.dataset, IterableDataset)
        self.generator = self.source if is_stream else torch.Generator()
        jobs = None if is_stream else self._jobs()
        if jobs is not None and is_replaced():
            rows = (as_list(rows) for rows, *_ in jobs)
            changed = {"sampler" if self.single else "batch_sampler": rows}
        elif jobs is not None:
            items = WorkerItems(self._items(loader.dataset, in_process=True), loader.worker_init_fn)
            changed = {"sampler": WorkerJobs(jobs), "batch_sampler": None, "collate_fn": Made._make}
            changed |= {"dataset": items, "worker_init_fn": items.init_worker}
        inner, own.inner = own.inner, None
        if inner is None or is_replaced():
            inner = TorchDataLoader.__new__(TorchDataLoader)
            vars(inner).update(vars(loader))  # it lets nobody set some of them
            del vars(inner)["_fastamp"]  # a circle: workers would live until it is collected
            inner._iterator, inner.pin_memory = None, own.memory.pinned  # pinned by torch's thread
            inner.collate_fn = self._items(loader.dataset).collate_fn
            is_torchs = self.generator is torch.default_generator
            inner.generator = None if is_torchs else self.generator
            vars(inner).update(changed)
        elif jobs is not None:
            inner.sampler.jobs = jobs
        else:
            inner._IterableDataset_len_called = loader._IterableDataset_len_called
        if loader.persistent_workers and not is_replaced():
            own.inner = inner
        return iter(inner) if "dataset" in changed else map(Made, iter(inner))

    def _read_stream(self) -> Iterator[Made]:
        """Read an iterable dataset from its state on, or again up to the position."""
        position, dataset = self.position, self.loader.dataset
        self._draw_base(position.sample_seed is not None)
        order = Order(find_pass_key(position.sample_seed or 0, position.epoch))
        if position.dataset_state is not None:
            dataset.load_state_dict(position.dataset_state)
        is_over = position.is_read_out and position.dataset_state is not None
        with Batch(order, 0):
            iterator: Any = iter(() if is_over else dataset)
        if position.dataset_state is not None and iterator is dataset:
            dataset.load_state_dict(position.dataset_state)  # its `__iter__` may have begun anew
        is_read_again = position.batch > 0 and not has_state(dataset)
        jobs = ((None, order, number) for number in count(0 if is_read_again else position.batch))
        items = self._items(StreamItems(self.loader, iterator, position))
        batches = takewhile(is_batch, here(items.make, jobs))
        if is_read_again:
            with generators_kept():
                deque(islice(batches, position.batch), maxlen=0)
        return batches


def is_replaced() -> bool:
    """Say whether a program has replaced what torch's iterators do for each batch."""
    return _BaseDataLoaderIter.__next__ is not _TORCHS_NEXT


def find_way(loader: Any) -> Columns | str:
    """Return the columns that a loader gathers, or why it reads its dataset item by item."""
    if is_replaced():
        return "torch's iterators are replaced"
    if loader.num_workers and loader.worker_init_fn is not None:
        return "worker_init_fn is given"
    if not loader._auto_collation:
        return "the loader makes no batches"
    collate_fn = loader.collate_fn
    if type(collate_fn) is BatchCollator and collate_fn.pad is not None:
        return "collate_fn pads"
    if type(collate_fn) is not BatchCollator and collate_fn is not default_collate:
        return "collate_fn is the user's"
    return find_columns(loader.dataset, loader._fastamp.max_bytes)


def describe(loader: Any) -> str:
    """Return how a loader makes its batches."""
    way, count = find_way(loader), loader.num_workers
    if isinstance(way, Columns):
        device = way.arrays[0].device
        return "gathered" if device.type == "cpu" else f"gathered on {device}"
    kind = "thread" if loader._fastamp.worker == "thread" else "worker"
    workers = f", in {count} {kind}{'s' * (count > 1)}" if count else ""
    return f"item by item{workers}: {way}"
