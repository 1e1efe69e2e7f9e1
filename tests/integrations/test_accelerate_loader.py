"""A loader that Accelerate prepares: what it gives, on one process and on two."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support import accelerate_cases as cases
from support import ranks
from support.accelerate_cases import accelerate, fresh_state
from support.loading import assert_same, check
from torch.utils.data import DataLoader, TensorDataset

import fastamp
from fastamp.integrations.accelerate_loader import prepare_loader

__all__ = ["fresh_state"]  # a fixture
pytestmark = pytest.mark.usefixtures("fresh_state")
N, BATCH = 64, 4
ROWS = TensorDataset(torch.arange(N))


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
    loader = fastamp.DataLoader(ROWS, BATCH)
    cases.make().prepare(loader, device_placement=[False])
    assert loader._fastamp.device is None


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
def test_two_processes_share_the_order_of_the_seed_and_accumulate_to_the_end(two, shard, path):
    answers = two.run(2, cases.train, shard)
    whole = fastamp.DataLoader(ROWS, BATCH, shuffle=True, seed=5)
    for parts in zip(*(epochs for epochs, _ in answers), strict=True):
        assert all(synced == [False, False, True] * 2 + [False, True] for _, synced in parts)
        (first, _), (second, _) = parts
        alternating = [*itertools.chain(*zip(first, second, strict=True))]
        if not shard:  # Accelerate deals out batches
            batches = [seen[i : i + BATCH] for i in range(0, N // 2, BATCH) for seen, _ in parts]
            alternating = [*itertools.chain(*batches)]
        assert alternating == samples(whole)
    assert [answer[1] for answer in answers] == [path] * 2


def test_a_state_is_that_of_all_processes(two):
    whole = [seen for seen, _ in two.run(2, cases.resume, None, 8)]
    begun = two.run(2, cases.resume, None, 3)
    rest = two.run(2, cases.resume, begun[0][1], 5)
    assert [seen + more for (seen, _), (more, _) in zip(begun, rest, strict=True)] == whole


@pytest.mark.parametrize(("name", "length"), [("in order", 27), ("in order", 3), ("drop_last", 27)])
def test_two_processes_share_one_order_as_distributed_sampler_does(two, name, length):
    sharded = partial(fastamp.DataLoader, shard=True)
    for rank, found in enumerate(two.run(2, cases.watch, sharded, name, length, {})):
        assert found[0] == cases.expected_sizes(name, length)
        batches, ends, gathered = ([row[i] for row in found[1:]] for i in (0, 2, 4))
        half = len(batches) // 2
        assert [*itertools.chain(*batches[:half])] == cases.expected_rows(name, length, rank)
        assert ends == ([False] * (half - 1) + [True]) * 2
        if name == "in order":
            assert sorted(itertools.chain(*gathered[:half])) == list(range(length))


ACCELERATES = [
    ("in order", {"even_batches": False}),
    ("in order", {"split_batches": True}),
    ("a generator", {}),
    ("a batch sampler", {}),
    ("a stream", {"dispatch_batches": False}),
    ("a stream", {}),
]


@pytest.mark.parametrize(("name", "options"), ACCELERATES)
def test_an_unsharded_loader_is_accelerates_own_over_two_processes(two, name, options):
    length = 26 if "split_batches" in options else 27
    ours, torchs = (
        two.run(2, cases.watch, kind, name, length, options)
        for kind in (fastamp.DataLoader, DataLoader)
    )
    assert ours == torchs


@pytest.mark.parametrize(("share", "drop_last"), [((), False), ((1, 2), False), ((0, 2), True)])
def test_skip_first_batches_knows_the_order_of_a_seed(share, drop_last):
    one = cases.make()
    rank, count = share or (0, 1)
    own = SimpleNamespace(
        num_processes=count, process_index=rank, gradient_state=one.gradient_state
    )
    options = dict(zip(("rank", "world_size"), share, strict=False))
    data = TensorDataset(torch.arange(43))
    made = fastamp.DataLoader(data, 4, shuffle=True, seed=3, drop_last=drop_last, **options)
    loader = prepare_loader(made, own, on_device=False)
    loader.set_epoch(2)
    expected = samples(loader)
    loader.set_epoch(2)
    assert samples(accelerate.skip_first_batches(loader, 3)) == expected[3 * 4 :]
    assert len(loader.batch_sampler) == len(loader)


def test_ranks_that_share_a_model_get_accelerates_own_loader():
    mesh = SimpleNamespace(mesh_dim_names=("dp", "tp"))
    own = SimpleNamespace(num_processes=4, process_index=1, torch_device_mesh=mesh)
    loader = fastamp.DataLoader(ROWS, BATCH, rank=1, world_size=4)
    assert prepare_loader(loader, own, on_device=True) is None
