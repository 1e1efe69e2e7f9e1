"""Datasets of kinds of one's own: columns that are gathered, or batches made at one go."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.loading import assert_same
from torch.utils.data import DataLoader as TorchDataLoader

import fastamp

N = 50


class Mapped(fastamp.Source):
    """Memory that is there already."""

    x, y = np.arange(3 * N, dtype=np.float32).reshape(N, 3), torch.arange(N)

    def __len__(self):
        return N

    def columns(self):
        return {"x": self.x, "y": self.y}


def test_columns_are_gathered_and_are_what_torchs_loader_reads(backend):
    loader = fastamp.DataLoader(Mapped(), 8, shuffle=True, seed=1)
    assert loader.stats().path.startswith("gathered")
    order = torch.Generator().manual_seed(1)
    expected = TorchDataLoader(Mapped(), 8, sampler=torch.randperm(N, generator=order).tolist())
    assert_same([*loader], [*expected])


def test_items_of_a_source_are_the_rows_of_its_batches():
    assert_same(Mapped()[-1], {"x": Mapped.x[N - 1], "y": Mapped.y[N - 1]})


def test_a_source_without_a_method_is_told_which_to_write():
    class Nothing(fastamp.Source):
        def __len__(self):
            return 3

    with pytest.raises(NotImplementedError, match=r"Nothing: write columns\(\)"):
        next(iter(fastamp.DataLoader(Nothing(), 2)))
