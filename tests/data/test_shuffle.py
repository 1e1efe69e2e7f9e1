"""The order of a long dataset: a permutation that is computed, uniform, undone, and resumed."""

from __future__ import annotations

import itertools
import json
import random

import pytest
import torch
from support import at_scale
from support.at_scale import find_places
from support.loading import Rows, assert_same
from torch.utils.data import RandomSampler, TensorDataset

import fastamp
from fastamp.data import shuffle
from fastamp.data.shuffle import Permutation

N = 1003
HUGE = 10**10
CELLS = 32
# Of the chi-square distribution with 31 * 31 degrees of freedom: one in a million lies below, and
# one above. The seeds are fixed.
QUANTILES = 766.8, 1184.0


@pytest.fixture
def always_computed(monkeypatch):
    """Compute the order of every dataset, some indices at a time."""
    monkeypatch.setattr(shuffle, "_KEPT_ROWS", 0)
    monkeypatch.setattr(shuffle, "_CHUNK", 64)


@pytest.fixture
def drawn(monkeypatch):
    """Return a list that gets the number of indices each time that some are computed."""
    counts, compute = [], Permutation.__getitem__

    def count(self, places):
        counts.append(len(places))
        return compute(self, places)

    monkeypatch.setattr(Permutation, "__getitem__", count)
    return counts


def test_it_is_a_permutation_with_an_inverse_for_every_length():
    for length in [*range(1, 300), 4095, 4096, 4097, 65535, 65536, 65537]:
        places = torch.arange(length)
        for seed in (0, 2**64 - 1):
            permutation = Permutation(length, seed)
            indices = permutation[places]
            assert torch.equal(indices.sort().values, places)
            assert torch.equal(find_places(permutation, indices), places)
    for length in (2**28 + 1, 10**9, HUGE, 2**62 + 1, 2**63 - 1):
        permutation = Permutation(length, 3)
        places = torch.randint(length, (1000,))
        places[:2] = torch.tensor([0, length - 1])
        indices = permutation[places]
        assert indices.min() >= 0
        assert indices.max() < length
        assert torch.equal(find_places(permutation, indices), places)


def chi_square(rows, columns, length):
    """Return how far pairs of numbers below a length are from equally many in all cells."""
    cells = rows * CELLS // length * CELLS + columns * CELLS // length
    counts = torch.bincount(cells, minlength=CELLS**2).double()
    return float(((counts - counts.mean()) ** 2 / counts.mean()).sum())


def statistics(length, seeds):
    """Return how uniform indices are at their places, after others, and from epoch to epoch."""
    places = torch.arange(length)
    orders = torch.stack([Permutation(length, seed)[places] for seed in range(seeds)])
    side = int(length**0.5)
    pairs = {"places": (places.expand_as(orders), orders), "epochs": (orders[:-1], orders[1:])}
    for lag in (1, 2, side, side + 1, length // 2):
        pairs[f"lag {lag}"] = orders[:, :-lag], orders[:, lag:]
    return {
        name: chi_square(rows.flatten(), columns.flatten(), length)
        for name, (rows, columns) in pairs.items()
    }


@pytest.mark.parametrize(("length", "seeds"), [(CELLS * 64, 50), (CELLS * 2**12, 2)])
def test_it_is_uniform(length, seeds, monkeypatch):
    """Over places, over pairs of places, and over pairs of epochs: also close to each other."""
    low, high = QUANTILES
    for name, value in statistics(length, seeds).items():
        assert low < value < high, name
    monkeypatch.setattr(shuffle, "_ROUNDS", 2)  # which are known to be too few
    assert max(statistics(length, seeds).values()) > 3 * high


def numbers(batches):
    return [int(x) for batch in batches for x in (batch if isinstance(batch, list) else [batch])[0]]


@pytest.mark.usefixtures("always_computed")
def test_the_order_is_the_same_on_every_path(backend):
    arrays, python = TensorDataset(torch.arange(N)), Rows(N, lambda i: torch.tensor([i])[0])
    epochs = [Permutation(N, 5 + epoch)[torch.arange(N)].tolist() for epoch in range(2)]
    assert epochs[0] != epochs[1]
    for dataset, workers in ((arrays, 0), (python, 0), (python, 1), (python, -2)):
        options = {"shuffle": True, "seed": 5, "num_workers": abs(workers)}
        options["worker"] = "thread" if workers < 0 else None
        loader = fastamp.DataLoader(dataset, 10, **options)
        assert [numbers(loader) for _ in range(2)] == epochs
        assert len(loader) == 101
        short = fastamp.DataLoader(dataset, 10, drop_last=True, **options)
        assert numbers(short) == epochs[0][: N - 3]
    single = fastamp.DataLoader(python, None, shuffle=True, seed=5)
    assert list(map(int, single)) == list(single.sampler) == epochs[0]
    for kind in (arrays, python):
        ranks = [
            fastamp.DataLoader(kind, 10, shuffle=True, seed=5, rank=rank, world_size=3)
            for rank in range(3)
        ]
        parts = [numbers(loader) for loader in ranks]
        dealt = [*itertools.chain.from_iterable(zip(*parts, strict=True))]
        assert dealt == epochs[0] + epochs[0][:2]


def test_only_a_long_dataset_with_a_seed_is_computed(monkeypatch, drawn):
    def order(**options):
        torch.manual_seed(1)
        return torch.cat([*fastamp.DataLoader(torch.arange(N), 10, **options)]).tolist()

    def given():
        return {"shuffle": True, "seed": 5, "generator": torch.Generator()}

    mine = RandomSampler(range(N), generator=torch.Generator().manual_seed(2))
    cases = [given, lambda: {"shuffle": True}, lambda: {"seed": 5}, lambda: {"sampler": mine}]
    monkeypatch.setattr(shuffle, "_KEPT_ROWS", N)
    mine.generator.manual_seed(2)
    kept = [order(**case()) for case in cases]
    expected = torch.randperm(N, generator=torch.Generator().manual_seed(5)).tolist()
    assert order(shuffle=True, seed=5) == kept[0] == expected
    monkeypatch.setattr(shuffle, "_KEPT_ROWS", N - 1)
    mine.generator.manual_seed(2)
    assert [order(**case()) for case in cases] == kept
    assert drawn == []
    assert order(shuffle=True, seed=5) != kept[0]
    assert sum(drawn) == N


@pytest.mark.parametrize("workers", [0, 1, "thread"])
@pytest.mark.parametrize("options", [{}, {"batch_size": None}, {"rank": 1, "world_size": 4}])
def test_a_huge_dataset_resumes_at_once(options, workers, drawn):
    dataset = Rows(HUGE, torch.tensor)
    size = options.get("batch_size", 100)
    options = {"batch_size": 100, "shuffle": True, "seed": 3, "num_workers": workers, **options}
    if workers == "thread":
        options = {**options, "num_workers": 2, "worker": "thread"}
    loader = fastamp.DataLoader(dataset, **options)
    ranks, rank = options.get("world_size", 1), options.get("rank", 0)
    assert len(loader) == HUGE // ranks // (size or 1)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    assert len(json.dumps(state)) < 1000
    stop = 9 * 10**9
    state["consumed" if ranks > 1 else "batch"] = stop if ranks > 1 else stop // (size or 1)
    loader = fastamp.DataLoader(dataset, **options)
    loader.load_state_dict(json.loads(json.dumps(state)))
    places = stop + rank + torch.arange(size or 1) * ranks
    expected = Permutation(HUGE, 3)[places]
    drawn.clear()
    batch = next(iter(loader))
    assert_same(batch.view(-1), expected)
    assert sum(drawn) <= 1 << 15
    loader = fastamp.DataLoader(dataset, **{**options, "shuffle": False})
    assert len(loader) == HUGE // ranks // (size or 1)


@pytest.mark.parametrize("ranks", [{}, {"rank": 0, "world_size": 2}])
def test_a_state_of_the_other_order_is_refused(ranks, monkeypatch):
    def make():
        return fastamp.DataLoader(torch.arange(N), 10, shuffle=True, seed=5, **ranks)

    torchs = make().state_dict()
    monkeypatch.setattr(shuffle, "_KEPT_ROWS", N - 1)
    computed = make()
    with pytest.raises(ValueError, match=r"state: its (sampler|source of randomness) is"):
        computed.load_state_dict(torchs)
    make().load_state_dict(computed.state_dict())
    state = computed.state_dict()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="Feistel"):
        make().load_state_dict(state)


def test_every_sample_comes_once_at_scale():
    """4,096 ranks over 10^10 samples with 20 changes; `nox -s scale` looks at more of them."""
    batches, samples, drawn = at_scale.simulate(HUGE, 4096, 20, looks=2, seed=1)
    assert (batches, samples) == (84, 42)
    assert drawn <= (batches + samples) << 15


@pytest.mark.usefixtures("always_computed")
def test_every_sample_comes_once_in_all_of_a_small_epoch():
    rng, length = random.Random(2), 4007
    stages = at_scale.make_stages(rng, length, 24, 20)
    at_scale.look_at_ranks(rng, length, stages, 1)
    counts = at_scale.read_all(length, stages)
    padding = -(length - stages[-1].begin) % stages[-1].ranks
    assert sorted(counts) == list(range(length))
    assert counts.total() == length + padding


def test_a_long_part_of_a_dataset_is_not_walked_through():
    class Long(torch.utils.data.Dataset):
        def __len__(self):
            return 10**10

        def __getitem__(self, index):
            return index

    part = torch.utils.data.Subset(Long(), range(5, 10**10 - 3))
    assert next(iter(fastamp.DataLoader(part, 3))).tolist() == [5, 6, 7]
    loader = fastamp.DataLoader(part, 3, shuffle=True, seed=1)
    assert len(next(iter(loader))) == 3
