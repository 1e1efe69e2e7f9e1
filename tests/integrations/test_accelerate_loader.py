"""A loader that Accelerate prepares: what it gives, on one process and on two."""

from __future__ import annotations

import itertools
import pickle
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support import ranks
from support.loading import Squares, assert_same, check
from support.streams import Stream
from torch.utils.data import TensorDataset

import fastamp
from fastamp.integrations.accelerate_loader import prepare_loader

accelerate = pytest.importorskip("accelerate")
cases = pytest.importorskip("support.accelerate_cases")
N, BATCH = 64, 4
ROWS = TensorDataset(torch.arange(N))


@pytest.fixture(autouse=True)
def _fresh_state():
    """Forget the Accelerators of other tests, whose state is shared."""
    yield
    cases.forget()


def prepared(*loaders, **options):
    """Return an Accelerator, and loaders that it has prepared."""
    accelerator = cases.make(**options)
    return accelerator, *(accelerator.prepare(loader) for loader in loaders)


def samples(loader):
    return [row for (batch,) in loader for row in batch.tolist()]


@pytest.mark.parametrize("options", [{}, {"shuffle": True, "seed": 3}], ids=["in order", "seed"])
def test_one_process_keeps_the_loader(options):
    expected = fastamp.DataLoader(ROWS, BATCH, **options)
    loader = fastamp.DataLoader(ROWS, BATCH, **options)
    accelerator, loader = prepared(loader)
    assert isinstance(loader, fastamp.DataLoader)
    assert_same([list(loader), list(loader)], [list(expected), list(expected)])
    assert loader.stats().path == expected.stats().path
    assert loader.stats().batches == 2 * N // BATCH
    assert loader._fastamp.device == accelerator.device
    assert accelerator.prepare(loader) is loader
    assert accelerator._dataloaders == [loader]


def test_device_placement_can_be_left_to_the_user():
    accelerator = cases.make()
    (loader,) = [fastamp.DataLoader(ROWS, BATCH)]
    accelerator.prepare(loader, device_placement=[False])
    assert loader._fastamp.device is None


def test_accelerates_skip_first_batches_knows_the_order_of_a_seed():
    _, loader = prepared(
        fastamp.DataLoader(TensorDataset(torch.arange(63)), 4, shuffle=True, seed=3)
    )
    loader.set_epoch(2)
    expected = samples(loader)
    loader.set_epoch(2)
    assert samples(accelerate.skip_first_batches(loader, 13)) == expected[13 * 4 :]


@pytest.mark.parametrize("dataset", [ROWS, Squares(N)])
def test_a_prepared_loader_resumes_after_the_last_batch_delivered(dataset):
    def make():
        return prepared(fastamp.DataLoader(dataset, BATCH, shuffle=True, seed=1))[1]

    loader = make()
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    resumed = make()
    resumed.load_state_dict(state)
    assert_same(list(resumed), list(iterator))
    assert_same(list(resumed), list(loader))


def test_save_state_holds_the_position(tmp_path):
    accelerator, loader = prepared(fastamp.DataLoader(ROWS, BATCH))
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    accelerator.save_state(tmp_path)
    loader.set_epoch(4)
    accelerator.load_state(tmp_path)
    assert samples(loader) == list(range(3 * BATCH, N))


@pytest.mark.parametrize("dataset", [TensorDataset(torch.arange(10)), Stream(range(10))])
def test_accumulation_ends_with_the_loader(dataset):
    accelerator, loader, model = prepared(
        fastamp.DataLoader(dataset, BATCH), torch.nn.Linear(1, 1), accumulate=2
    )
    for _ in range(2):
        synced = []
        for _ in loader:
            with accelerator.accumulate(model):
                synced.append(accelerator.sync_gradients)
        assert synced == [False, True, True]
    assert not accelerator.gradient_state.in_dataloader


def test_loaders_inside_each_other_are_told_apart_and_may_be_left():
    accelerator, outer, inner = prepared(
        fastamp.DataLoader(torch.arange(9), BATCH), fastamp.DataLoader(torch.arange(6), BATCH)
    )
    state, seen = accelerator.gradient_state, []
    for _ in outer:
        assert state.active_dataloader is outer
        seen.append((state.end_of_dataloader, state.remainder))
        for _ in inner:
            assert state.active_dataloader is inner
            seen.append((state.end_of_dataloader, state.remainder))
    evaluation = [(False, 2), (True, 2)]
    assert seen == [(False, 1), *evaluation, (False, 1), *evaluation, (True, 1), *evaluation]
    for _ in outer:
        break
    assert not state.in_dataloader


def test_an_error_comes_in_its_place():
    _, loader = prepared(fastamp.DataLoader(Squares(12, bad=5), BATCH))
    iterator = iter(loader)
    assert next(iterator)["y"].tolist() == [0, 1, 4, 9]
    with pytest.raises(FileNotFoundError, match="item 5 is broken"):
        next(iterator)


def test_accelerate_is_not_imported_before_the_program_does():
    check(
        "import sys, fastamp.integrations.accelerate; fastamp.DataLoader([1]); "
        "assert 'accelerate' not in sys.modules"
    )


@pytest.fixture(scope="module")
def two():
    with ranks.start(2) as started:
        yield started


@pytest.mark.parametrize(("shard", "path"), [(True, "gathered"), (False, False)])
def test_two_processes_see_every_sample_once_and_accumulate_to_the_end(two, shard, path):
    answers = two.run(2, cases.train, shard)
    for parts in zip(*(epochs for epochs, _ in answers), strict=True):
        assert sorted(row for seen, _ in parts for row in seen) == list(range(64))
        assert all(synced == [False, False, True] * 2 + [False, True] for _, synced in parts)
    first, second = answers[0][0]
    assert first != second  # epochs differ
    assert [answer[1] for answer in answers] == [path] * 2


def test_accelerates_own_loader_has_the_order_of_the_seed(two):
    answers = two.run(2, cases.train, False)
    whole = fastamp.DataLoader(ROWS, BATCH, shuffle=True, seed=5)
    for parts in zip(*(epochs for epochs, _ in answers), strict=True):
        batches = [seen[i : i + BATCH] for i in range(0, N // 2, BATCH) for seen, _ in parts]
        assert [*itertools.chain(*batches)] == samples(whole)


def test_a_state_is_that_of_all_processes(two):
    seed = 5
    whole = [seen for seen, _ in two.run(2, cases.resume, None, 8, seed)]
    begun = two.run(2, cases.resume, None, 3, seed)
    rest = two.run(2, cases.resume, begun[0][1], 5, seed)
    assert [seen + more for (seen, _), (more, _) in zip(begun, rest, strict=True)] == whole


@pytest.mark.parametrize(
    ("name", "length"),
    [("in order", 27), ("in order", 3), ("drop_last", 27), ("shuffled by the program", 26)],
)
def test_two_processes_share_one_order_as_distributed_sampler_does(two, name, length):
    sharded = partial(fastamp.DataLoader, shard=True)
    answers = two.run(2, cases.watch, sharded, name, length, {})
    for rank, found in enumerate(answers):
        assert found[0] == cases.expected_sizes(name, length)
        batches = [batch for batch, *_ in found[1:]]
        first = batches[: len(batches) // 2]
        if "shuffled" not in name:
            assert [*itertools.chain(*first)] == cases.expected_rows(name, length, rank)
        assert [end for *_, end, _, _ in found[1:]] == ([False] * (len(first) - 1) + [True]) * 2
    gathered = [each[-1] for each in answers[0][1:]]
    if "drop" not in name:
        half = gathered[: len(gathered) // 2]
        assert sorted(itertools.chain(*half)) == list(range(length))


ACCELERATES = [
    ("in order", {"even_batches": False}),
    ("in order", {}),
    ("a generator", {}),
    ("a sampler", {"split_batches": True}),
    ("a sampler that is told the epoch", {}),
    ("a batch sampler", {}),
    ("indices of whole batches", {}),
    ("a stream", {"dispatch_batches": False}),
    ("a stream", {}),
]


@pytest.mark.parametrize(("name", "options"), ACCELERATES)
def test_an_unsharded_loader_is_accelerates_own_over_two_processes(two, name, options):
    length = 26 if "split_batches" in options else 27
    for ours, theirs in two.run(2, cases.both, name, length, options):
        assert ours == theirs


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("drop_last", [False, True])
def test_skip_first_batches_reads_each_process_its_own_part(rank, drop_last):
    one = cases.make()
    own = SimpleNamespace(
        num_processes=2,
        process_index=rank,
        dataloader_config=one.dataloader_config,
        gradient_state=one.gradient_state,
    )
    options = {"seed": 3, "drop_last": drop_last, "rank": rank, "world_size": 2}
    made = fastamp.DataLoader(TensorDataset(torch.arange(43)), 4, shuffle=True, **options)
    loader = prepare_loader(made, own, on_device=False)
    loader.set_epoch(2)
    expected = samples(loader)
    loader.set_epoch(2)
    skipped = accelerate.skip_first_batches(loader, 3)
    assert samples(skipped) == expected[3 * 4 :]
    assert len(loader.batch_sampler) == len(loader)


def test_ranks_that_share_a_model_get_accelerates_own_loader():
    mesh = SimpleNamespace(mesh_dim_names=("dp", "tp"))
    own = SimpleNamespace(num_processes=4, process_index=1, torch_device_mesh=mesh)
    loader = fastamp.DataLoader(ROWS, BATCH, rank=1, world_size=4)
    assert prepare_loader(loader, own, on_device=True) is None
