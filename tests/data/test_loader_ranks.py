"""A sharded loader: DistributedSampler's parts, and one state for any number of ranks."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from support.loading import Rows, Squares, assert_same
from support.streams import Stream
from torch.utils.data import BatchSampler, DistributedSampler, TensorDataset
from torch.utils.data import DataLoader as TorchDataLoader

import fastamp

N = 83
BATCH = 4


def make_loaders(world_size, kind="arrays", batch_size=BATCH, **options):
    dataset = TensorDataset(torch.arange(N)) if kind == "arrays" else Squares(N)
    options = {"shuffle": True, "seed": 5, **options}
    return [
        fastamp.DataLoader(dataset, batch_size, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


def samples(batches):
    """Return the samples of batches of either dataset."""
    found = []
    for batch in batches:
        rows = batch["x"][..., 0] if isinstance(batch, dict) else batch[0]
        found += rows.reshape(-1).tolist()
    return found


def flat(parts):
    return [*itertools.chain.from_iterable(parts)]


ALIVE = []
"""Passes that are not over: the end of a pass's iterator ends its epoch."""


def take(iterator, count):
    ALIVE[:] = [*ALIVE[-8:], iterator]
    return list(itertools.islice(iterator, count))


@pytest.mark.parametrize("kind", ["arrays", "python"])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4, 83, 100])
def test_the_batches_are_those_of_a_distributed_sampler(
    world_size, shuffle, drop_last, kind, backend
):
    options = {"shuffle": shuffle, "drop_last": drop_last}
    for rank, ours in [*enumerate(make_loaders(world_size, kind, **options))][-2:]:
        sampler = DistributedSampler(ours.dataset, world_size, rank, seed=5, **options)
        theirs = TorchDataLoader(ours.dataset, BATCH, sampler=sampler, drop_last=drop_last)
        assert len(ours) == len(theirs)
        for epoch in (0, 1, 7):
            sampler.set_epoch(epoch)
            ours.set_epoch(epoch)
            assert_same(list(ours), list(theirs))
            batches = BatchSampler(sampler, BATCH, drop_last)
            sampler.set_epoch(99)
            told = fastamp.DataLoader(ours.dataset, batch_sampler=batches)
            told.set_epoch(epoch)
            assert_same(list(told), list(theirs))
            if shuffle:  # as loops that were written for DistributedSampler do
                ours.sampler.set_epoch(epoch)
            else:
                ours.set_epoch(epoch)
            assert_same(list(ours), list(theirs))


def test_epochs_count_up_and_all_ranks_draw_the_same_order():
    """Nothing depends on what a rank has drawn before, and a missing seed is 0."""
    orders = []
    for seed, program in ((0, 1), (None, 2)):
        torch.manual_seed(program)
        loaders = make_loaders(3, seed=seed)
        orders.append([[samples(loader) for loader in loaders] for _ in range(3)])
    assert orders[0] == orders[1]
    for parts in orders[0]:
        assert set(flat(parts)) == set(range(N))
    assert orders[0][0] != orders[0][1] != orders[0][2]


# Ranks and batch sizes, before and after.
CHANGES = {
    "2 to 4": ((2, 4), (4, 4)),
    "2 to 1": ((2, 4), (1, 4)),
    "4 to 2, the same batches": ((4, 4), (2, 8)),
    "3 to 5": ((3, 2), (5, 3)),
    "2 to 2": ((2, 4), (2, 4)),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", ["arrays", "python", "unbatched"])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_every_sample_comes_once_when_the_ranks_change(change, shuffle, kind, backend):
    (old, old_batch), (new, new_batch) = CHANGES[change]
    if kind == "unbatched":
        old_batch = new_batch = None
    for stop in (0, 1, 5, N // old // (old_batch or 1)):
        befores, state = [], None
        for loader in make_loaders(old, kind, old_batch, shuffle=shuffle):
            loader.set_epoch(1)
            befores += samples(take(iter(loader), stop))
            states = (state, state := loader.state_dict())
        assert states[0] == states[1]  # of any rank
        assert len(pickle.dumps(state)) < 500
        assert (state["epoch"], state["consumed"]) == (1, len(befores))
        loaders = make_loaders(new, kind, new_batch, shuffle=shuffle)
        for loader in loaders:
            loader.load_state_dict(pickle.loads(pickle.dumps(state)))
        parts = [samples(loader) for loader in loaders]
        assert {len(part) for part in parts} == {-(-(N - len(befores)) // new)}
        counts = Counter(befores + flat(parts))
        assert set(counts) == set(range(N))
        assert counts.total() - N < new  # the padding
        fresh = make_loaders(new, kind, new_batch, shuffle=shuffle)
        for ours, theirs in zip(loaders, fresh, strict=True):
            theirs.set_epoch(2)
            assert samples(ours) == samples(theirs)


def test_a_run_with_other_ranks_can_be_stopped_again():
    seen, state = [], None
    for world_size in (2, 4, 1, 3):
        loaders = make_loaders(world_size, batch_size=2)
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        seen += flat(samples(take(iter(loader), 3)) for loader in loaders)
        state = loaders[-1].state_dict()
    assert len(seen) == len(set(seen)) == state["consumed"] == 3 * 2 * (2 + 4 + 1 + 3)


def test_workers_draw_what_they_draw_beside_a_distributed_sampler():
    """Their seeds are the program's: with the loader's own they would be alike on all ranks."""
    noise = Rows(8, lambda _: torch.rand(3))
    drawn = []
    for rank in range(2):
        ours = fastamp.DataLoader(noise, 2, seed=5, num_workers=1, rank=rank, world_size=2)
        sampler = DistributedSampler(noise, 2, rank, shuffle=False)
        for loader in (ours, TorchDataLoader(noise, 2, sampler=sampler, num_workers=1)):
            torch.manual_seed(rank)
            drawn.append(torch.cat(list(loader)))
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[2], drawn[3])
    assert not torch.equal(drawn[0], drawn[2])


def test_what_is_left_is_cut_where_the_last_is_dropped():
    loaders = make_loaders(2, drop_last=True)
    before = flat(samples(take(iter(loader), 3)) for loader in loaders)
    state = loaders[0].state_dict()
    resumed = make_loaders(4, drop_last=True, batch_size=3)
    for loader in resumed:
        loader.load_state_dict(state)
    parts = [samples(loader) for loader in resumed]
    assert [len(part) for part in parts] == [(N - 24) // 4 // 3 * 3] * 4
    assert max(Counter(before + flat(parts)).values()) == 1


def test_the_end_of_an_epoch_is_a_state_for_all_ranks():
    loader = make_loaders(2)[1]
    iterator = iter(loader)
    take(iterator, len(loader))
    state = loader.state_dict()
    assert (state["epoch"], state["consumed"]) == (0, N)
    (alone,) = make_loaders(1)
    alone.load_state_dict(state)
    assert list(alone) == []
    ended = alone.state_dict()
    assert (ended["epoch"], ended["consumed"]) == (1, 0)
    assert sorted(samples(alone)) == list(range(N))
    assert list(iterator) == []
    assert (loader.state_dict()["epoch"], loader.state_dict()["consumed"]) == (1, 0)


def test_a_state_of_another_order_is_refused():
    whole = fastamp.DataLoader(TensorDataset(torch.arange(N)), BATCH, shuffle=True, seed=5)
    with pytest.raises(ValueError, match="its is_sharded is False, the loader's True"):
        make_loaders(2)[0].load_state_dict(whole.state_dict())
    with pytest.raises(ValueError, match="its seed is 5, the loader's 0"):
        make_loaders(2, seed=None)[0].load_state_dict(make_loaders(2)[0].state_dict())


def test_a_program_without_ranks_is_a_world_of_one(monkeypatch):
    x = torch.arange(10)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert torch.equal(torch.cat(list(fastamp.DataLoader(x, 3, shard=True))), x)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert torch.equal(torch.cat(list(fastamp.DataLoader(x, 3, shard=True))), x)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"WORLD_SIZE=2: call torch\.distributed\.init_process"):
        fastamp.DataLoader(x, 3, shard=True)
    assert len(list(fastamp.DataLoader(x, 1, rank=0, world_size=2))) == 5


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rank": 1}, ValueError, "rank, world_size: expected a rank below .*, got 1 and None"),
        ({"world_size": 2}, ValueError, "rank, world_size: expected a rank below .*, got None and"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank, world_size: expected a .*, got 2 and 2"),
        ({"rank": -1, "world_size": 2}, ValueError, "rank: expected an integer of at least 0"),
        ({"rank": 0, "world_size": 0}, ValueError, "world_size: expected an integer of at least 1"),
        ({"shard": True, "sampler": [1, 2]}, ValueError, "sampler: expected None for a sharded"),
        (
            {"rank": 0, "world_size": 1, "batch_sampler": [[1]], "batch_size": 1},
            ValueError,
            "batch_sampler: expected None for a sharded loader",
        ),
        ({"shard": True, "dataset": Stream(range(10))}, TypeError, "dataset: Stream is iterable"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(options, error, message):
    with pytest.raises(error, match=f"^{message}"):
        fastamp.DataLoader(**{"dataset": torch.arange(10), **options})


def test_the_ranks_are_those_of_torch_distributed(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    loader = fastamp.DataLoader(torch.arange(10), 3, shard=True)
    assert torch.cat([*loader]).tolist() == [1, 3, 5, 7, 9]


def test_whoever_rebuilds_a_sharded_loader_loses_neither_order_nor_samples():
    dataset = torch.arange(40)
    loader = fastamp.DataLoader(dataset, 4, shuffle=True, seed=3, rank=1, world_size=2)
    assert (len(loader), len(loader.batch_sampler)) == (5, 10)
    rows = [*itertools.chain(*loader.batch_sampler)]
    expected = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    assert rows == expected.tolist()
    again = TorchDataLoader(dataset, batch_sampler=loader.batch_sampler)
    second = torch.randperm(40, generator=torch.Generator().manual_seed(4))
    assert torch.cat([*again]).tolist() == second.tolist()
    assert torch.cat([*loader]).tolist() == expected[1::2].tolist()
