"""Datasets of kinds of one's own: columns that are gathered, or batches made at one go."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.loading import assert_same
from torch.utils.data import DataLoader as TorchDataLoader

import fastamp

N = 50
WAYS = {
    "here": {},
    "processes": {"num_workers": 2},
    "threads": {"num_workers": 2, "worker": "thread"},
}


class Mapped(fastamp.Source):
    """Memory that is there already."""

    x, y = np.arange(3 * N, dtype=np.float32).reshape(N, 3), torch.arange(N)

    def __len__(self):
        return N

    def columns(self):
        return {"x": self.x, "y": self.y}


class Made(fastamp.Source):
    """Batches that are read at one go, with a draw for each sample."""

    def __len__(self):
        return N

    def make(self, rows, keys):
        assert rows.dtype == keys.dtype == torch.int64
        noise = [np.random.default_rng(key % 2**64).random() for key in keys.tolist()]
        return {"row": rows, "noise": torch.tensor(noise, dtype=torch.float64, device="cpu")}


class Bad(Made):
    def make(self, rows, keys):
        if 7 in rows:
            msg = "row 7"
            raise LookupError(msg)
        return super().make(rows, keys)


def test_columns_are_gathered_and_are_what_torchs_loader_reads(backend):
    loader = fastamp.DataLoader(Mapped(), 8, shuffle=True, seed=1)
    assert loader.stats().path.startswith("gathered")
    order = torch.Generator().manual_seed(1)
    expected = TorchDataLoader(Mapped(), 8, sampler=torch.randperm(N, generator=order).tolist())
    assert_same([*loader], [*expected])


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_is_made_at_one_go_with_the_same_draws_whoever_makes_it(way):
    def make(**options):
        return fastamp.DataLoader(Made(), 8, shuffle=True, seed=1, **options)

    expected = [*make()]
    assert str(make()) == "fastamp.DataLoader: batch by batch: Made.make"
    assert sorted(torch.cat([batch["row"] for batch in expected]).tolist()) == [*range(N)]
    assert len({*torch.cat([batch["noise"] for batch in expected]).tolist()}) == N
    assert_same([*make(**WAYS[way])], expected)
    loader = make(**WAYS[way])
    batches = iter(loader)
    next(batches)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert_same([*resumed], expected[1:])


@pytest.mark.parametrize("way", WAYS)
def test_an_error_of_a_source_comes_in_its_batchs_place(way):
    batches = iter(fastamp.DataLoader(Bad(), 5, **WAYS[way]))
    next(batches)
    with pytest.raises(LookupError, match="row 7"):
        next(batches)
    assert next(batches)["row"].tolist() == [10, 11, 12, 13, 14]


def test_items_of_a_source_are_the_rows_of_its_batches():
    assert_same(Mapped()[-1], {"x": Mapped.x[N - 1], "y": Mapped.y[N - 1]})
    assert Made()[3]["row"] == 3
    collated = fastamp.DataLoader(Made(), 4, collate_fn=lambda items: [i["row"] for i in items])
    assert next(iter(collated)) == [0, 1, 2, 3]
    for source in (Mapped(), Made()):
        with pytest.raises(IndexError, match="index 50 is out of range for 50 samples"):
            source[N]


def test_a_source_without_a_method_is_told_which_to_write():
    class Nothing(fastamp.Source):
        def __len__(self):
            return 3

    with pytest.raises(NotImplementedError, match=r"Nothing: write columns\(\) or make"):
        next(iter(fastamp.DataLoader(Nothing(), 2)))


def test_a_default_device_does_not_move_rows_and_keys(backend):
    with torch.device("meta"):
        batch = next(iter(fastamp.DataLoader(Made(), 4, seed=0)))
        assert batch["row"].tolist() == [0, 1, 2, 3]
        assert Made()[2]["row"] == 2
