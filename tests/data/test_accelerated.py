"""A loader that Accelerate prepares: what it gives, on one process and on two."""

from __future__ import annotations

import copy
import itertools
import pickle
import weakref

import pytest
import torch
from support import ranks
from support.loading import Squares, assert_same, check
from support.streams import Stream
from torch.utils.data import BatchSampler, TensorDataset
from torch.utils.data import DataLoader as TorchDataLoader

import fastamp
from fastamp.data.shard import RankBatches, ShardSampler

accelerate = pytest.importorskip("accelerate")
accelerate_cases = pytest.importorskip("support.accelerate_cases")
N, BATCH = 64, 4
ROWS = TensorDataset(torch.arange(N))


@pytest.fixture(autouse=True)
def _fresh_state():
    """Forget the Accelerators of other tests, whose state is shared."""
    yield
    forget()


def forget():
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def make_accelerator(**options):
    """Return an Accelerator: `accumulate` steps, and options of DataLoaderConfiguration."""
    steps = options.pop("accumulate", 1)
    config = accelerate.utils.DataLoaderConfiguration(**options)
    return accelerate.Accelerator(
        cpu=True, dataloader_config=config, gradient_accumulation_steps=steps
    )


def samples(loader):
    return [row for (batch,) in loader for row in batch.tolist()]


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "seed": 3}], ids=["in order", "seed"])
@pytest.mark.parametrize("how", ["prepare", "prepare_data_loader"])
def test_the_loader_stays_what_it_is(how, options):
    expected = fastamp.DataLoader(ROWS, BATCH, **options)
    loader = fastamp.DataLoader(ROWS, BATCH, **options)
    accelerator = make_accelerator()
    assert getattr(accelerator, how)(loader) is loader
    assert type(loader) is fastamp.DataLoader
    assert_same([list(loader), list(loader)], [list(expected), list(expected)])
    assert loader.stats().path == expected.stats().path
    assert loader.stats().batches == 2 * N // BATCH
    assert loader.device == accelerator.device


def test_a_loader_without_a_seed_draws_what_it_draws_without_accelerate():
    orders = []
    for prepare in (lambda loader: loader, make_accelerator().prepare):
        torch.manual_seed(5)
        loader = prepare(fastamp.DataLoader(ROWS, BATCH, shuffle=True))
        orders.append([samples(loader), samples(loader)])
    assert orders[0] == orders[1]


@pytest.mark.parametrize("data_seed", [None, 9])
def test_accelerates_seedable_order_is_kept(data_seed):
    found = []
    for loader_class in (fastamp.DataLoader, TorchDataLoader):
        torch.manual_seed(0)
        accelerator = make_accelerator(use_seedable_sampler=True, data_seed=data_seed)
        loader = accelerator.prepare(loader_class(ROWS, BATCH, shuffle=True))
        found.append([samples(loader), samples(loader)])
        forget()
    assert found[0] == found[1]


def test_a_prepared_loader_resumes_after_the_last_batch_delivered():
    def make():
        loader = fastamp.DataLoader(ROWS, BATCH, shuffle=True, seed=1)
        return make_accelerator().prepare(loader)

    loader = make()
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    resumed = make()
    resumed.load_state_dict(state)
    assert_same(list(resumed), list(iterator))
    assert_same(list(resumed), list(loader))


def test_it_is_prepared_once_and_again_after_free_memory():
    accelerator = make_accelerator()
    loader = fastamp.DataLoader(ROWS, BATCH)
    assert accelerator.prepare(loader, loader) == (loader, loader)
    assert accelerator.prepare(loader) is loader
    assert accelerator._dataloaders == [loader]
    accelerator.free_memory()
    assert accelerator.prepare(loader) is loader
    assert accelerator._dataloaders == [loader]
    assert samples(loader) == list(range(N))


@pytest.mark.parametrize("dataset", [TensorDataset(torch.arange(10)), Stream(range(10))])
def test_accumulation_ends_with_the_loader(dataset):
    accelerator = make_accelerator(accumulate=2)
    model = torch.nn.Linear(1, 1)
    loader, model = accelerator.prepare(fastamp.DataLoader(dataset, BATCH), model)
    for _ in range(2):
        synced = []
        for _ in loader:
            with accelerator.accumulate(model):
                synced.append(accelerator.sync_gradients)
        assert synced == [False, True, True]
    assert not accelerator.gradient_state.in_dataloader


def test_loaders_inside_each_other_are_told_apart():
    state = make_accelerator().gradient_state
    accelerator = make_accelerator()
    outer, inner = accelerator.prepare(
        fastamp.DataLoader(torch.arange(9), BATCH), fastamp.DataLoader(torch.arange(6), BATCH)
    )
    seen = []
    for _ in outer:
        assert state.active_dataloader is outer
        seen.append((state.end_of_dataloader, state.remainder))
        for _ in inner:
            assert state.active_dataloader is inner
            seen.append((state.end_of_dataloader, state.remainder))
        assert state.active_dataloader is outer
    evaluation = [(False, 2), (True, 2)]
    assert seen == [(False, 1), *evaluation, (False, 1), *evaluation, (True, 1), *evaluation]
    assert not state.in_dataloader


def test_a_loop_that_is_left_leaves_accelerates_state():
    accelerator = make_accelerator()
    outer, inner = accelerator.prepare(
        fastamp.DataLoader(ROWS, BATCH), fastamp.DataLoader(ROWS, BATCH)
    )
    for _ in outer:
        for _ in inner:
            break
        assert accelerator.gradient_state.active_dataloader is outer
        break
    assert not accelerator.gradient_state.in_dataloader
    first = iter(outer)
    next(first)
    second = iter(outer)
    next(second)
    del first  # whose end is not the end of the other
    assert accelerator.gradient_state.active_dataloader is outer
    del second
    assert not accelerator.gradient_state.in_dataloader


def test_an_error_comes_in_its_place():
    accelerator = make_accelerator()
    loader = accelerator.prepare(fastamp.DataLoader(Squares(12, bad=5), BATCH))
    iterator = iter(loader)
    assert next(iterator)["y"].tolist() == [0, 1, 4, 9]
    with pytest.raises(FileNotFoundError, match="item 5 is broken"):
        next(iterator)
    assert next(iterator)["y"].tolist() == [64, 81, 100, 121]
    assert accelerator.gradient_state.end_of_dataloader
    assert next(iterator, None) is next(iterator, None) is None


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "seed": 3}], ids=["in order", "seed"])
def test_accelerates_skip_first_batches_serves_it(options):
    accelerator = make_accelerator()
    loader = accelerator.prepare(fastamp.DataLoader(TensorDataset(torch.arange(63)), 4, **options))
    loader.set_epoch(2)
    expected = samples(loader)
    loader.set_epoch(2)
    found, ends = [], []
    for (batch,) in accelerate.skip_first_batches(loader, 13):
        found += batch.tolist()
        ends.append(accelerator.gradient_state.end_of_dataloader)
    assert (found, ends) == (expected[13 * 4 :], [False, False, True])


def test_save_state_holds_the_position_where_it_was_asked_for(tmp_path):
    accelerator = make_accelerator()
    loader = accelerator.prepare(fastamp.DataLoader(ROWS, BATCH))
    loader._served.use_stateful_dataloader = True  # as with torchdata, which it needs
    for _, _ in zip(range(3), loader, strict=False):
        pass
    accelerator.save_state(tmp_path)
    accelerator.free_memory()
    loader.set_epoch(4)
    assert accelerator.prepare(loader) is loader
    accelerator.load_state(tmp_path)
    assert samples(loader) == list(range(3 * BATCH, N))


class Told(Stream):
    """Remembers the epochs that it is told."""

    def __init__(self):
        super().__init__(range(3))
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


def test_datasets_are_told_the_epoch_as_by_accelerates_own_loader():
    loader = make_accelerator().prepare(fastamp.DataLoader(Told(), 2))
    assert_same([list(loader), list(loader)], [[torch.tensor([0, 1]), torch.tensor([2])]] * 2)
    assert loader.dataset.epochs == [0, 1]


def test_a_prepared_loader_is_freed_when_it_is_dropped():
    accelerator = make_accelerator()
    loader = accelerator.prepare(fastamp.DataLoader(ROWS, BATCH))
    list(loader)
    accelerator.free_memory()
    gone = weakref.ref(loader)
    del loader
    assert gone() is None


def test_copies_of_a_prepared_loader_are_prepared():
    loader = make_accelerator().prepare(fastamp.DataLoader(ROWS, BATCH, shuffle=True, seed=1))
    expected = samples(pickle.loads(pickle.dumps(loader)))
    assert samples(copy.deepcopy(loader)) == samples(loader) == expected


def test_device_placement_can_be_left_to_the_user():
    loader = fastamp.DataLoader(ROWS, BATCH)
    make_accelerator().prepare(loader, device_placement=[False])
    assert loader.device is None


def test_another_version_of_accelerate_is_an_error_not_a_silent_wrap(monkeypatch):
    accelerator = make_accelerator()
    del accelerator.dataloader_config
    with pytest.raises(RuntimeError, match="version of Accelerate is not known"):
        accelerate.Accelerator.prepare_data_loader(accelerator, fastamp.DataLoader(ROWS))


def test_an_unknown_attribute_is_refused_as_ever():
    with pytest.raises(AttributeError, match="'DataLoader' object has no attribute 'remainder'"):
        fastamp.DataLoader(ROWS).remainder  # noqa: B018
    with pytest.raises(AttributeError, match="'DataLoader' object has no attribute 'nothing'"):
        make_accelerator().prepare(fastamp.DataLoader(ROWS)).nothing  # noqa: B018


def test_accelerate_is_not_imported_before_the_program_does():
    check("import sys, fastamp; fastamp.DataLoader([1]); assert 'accelerate' not in sys.modules")


@pytest.fixture(scope="module")
def two():
    with ranks.start(2) as started:
        yield started


@pytest.mark.parametrize("shard", [False, True])
def test_two_processes_see_every_sample_once_and_accumulate_to_the_end(two, shard):
    answers = two.run(2, accelerate_cases.train, shard)
    for parts in zip(*(epochs for epochs, _, _ in answers), strict=True):
        assert sorted(row for seen, _ in parts for row in seen) == list(range(64))
        assert all(synced == [False, False, True] * 2 + [False, True] for _, synced in parts)
    first, second = answers[0][0]
    assert first != second  # epochs differ
    core = "the compiled core" if "cpu" in fastamp.backends() else "Python"
    assert {answer[1:] for answer in answers} == {(16, f"gathered by {core}")}


OPTIONS = {
    "plain": {},
    "split": {"split_batches": True},
    "uneven": {"even_batches": False},
    "seedable": {"use_seedable_sampler": True, "data_seed": 4},
    "seedable without a seed": {"use_seedable_sampler": True},
}
STOCK = [
    ("in order", "plain", 27),
    ("in order", "plain", 3),
    ("in order", "split", 27),
    ("in order", "uneven", 27),
    ("drop_last", "plain", 27),
    ("shuffled by the program", "plain", 27),
    ("shuffled by the program", "split", 26),
    ("shuffled by the program", "seedable", 27),
    ("shuffled by the program", "seedable without a seed", 27),
    ("a generator", "plain", 27),
    ("a sampler", "split", 26),
    ("a sampler that is told the epoch", "plain", 27),
    ("a batch sampler", "plain", 29),
    ("indices of whole batches", "plain", 29),
    ("a stream", "dispatch", 27),
    ("a stream", "plain", 27),  # by Accelerate's own loader
]


@pytest.mark.parametrize(("name", "option", "length"), STOCK)
def test_two_processes_get_what_accelerate_makes_of_torchs_loader(two, name, option, length):
    options = OPTIONS.get(option, {"dispatch_batches": False})
    for ours, theirs in two.run(2, accelerate_cases.both, name, length, options):
        assert ours == theirs


@pytest.mark.parametrize("seed", [5, None])
def test_a_state_is_that_of_all_processes(two, seed):
    whole = [seen for seen, _ in two.run(2, accelerate_cases.resume, None, 8, seed)]
    begun = two.run(2, accelerate_cases.resume, None, 3, seed)
    rest = two.run(2, accelerate_cases.resume, begun[0][1], 5, seed)
    assert [seen + more for (seen, _), (more, _) in zip(begun, rest, strict=True)] == whole


def test_what_cannot_be_done_is_refused_by_name_before_anything_is_touched(two):
    expected = [
        "dispatch_batches=True: expected False for fastamp.DataLoader",
        "split_batches=True: expected a batch_size divisible by 2, got 5",
        "the loader is sharded already, as rank 0 of 3; the Accelerator's is",
        "batch_size=None: expected batches to share out",
    ]
    for said in two.run(2, accelerate_cases.refuse):
        assert len(said) == len(expected)
        assert all(text.startswith(start) for text, start in zip(said, expected, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_any_number_of_ranks_shares_out_batches_as_accelerate_does(count, split, even, drop_last):
    sampler_shard = accelerate.data_loader.BatchSamplerShard
    size = 2 * count if split else 2
    for length, rank in itertools.product([0, 1, 7, 20, 31], range(count)):
        batches = BatchSampler(range(length), size, drop_last)
        theirs = sampler_shard(batches, count, rank, split, even)
        shard = ShardSampler(range(length), count, rank, shuffle=False, drop_last=drop_last)
        shard.block, shard.even = 2, even
        ours = RankBatches(shard, 2, drop_last)
        if length or not split:  # where theirs raises NameError
            assert list(ours) == list(theirs)
            assert len(ours) == len(list(ours))
        assert ours.even_batches == even
        ours.even_batches = False
        assert shard.even is False
