"""Loops over loaders inside a function that torch.compile compiles: loaders stay out of graphs."""

from __future__ import annotations

import warnings

import pytest
import torch
from support.streams import Stream
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset

import fastamp

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C._dynamo.eval_frame, "_FrameAction"), reason="torch 2.6 traces loaders"
)
LARGE = torch.randn(8, 300_000)
ROWS = TensorDataset(torch.randn(20, 3), torch.arange(20))
ITEMS = [(torch.full((3,), float(i)), i) for i in range(20)]
LOADERS = {
    "rows": lambda lib: lib.DataLoader(ROWS, 4, shuffle=True),
    "items": lambda lib: lib.DataLoader(ITEMS, 4),
    "stream": lambda lib: lib.DataLoader(Stream(ITEMS), 4),
    "leased memory": lambda lib: lib.DataLoader(TensorDataset(LARGE), 4),
    "threads": lambda lib: lib.DataLoader(ITEMS, 4, num_workers=2, worker="thread"),
    "collator": lambda lib: DataLoader(ITEMS, 4, collate_fn=lib.BatchCollator()),
    "prefetch": lambda lib: lib.prefetch(DataLoader(ITEMS, 4)),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_an_epoch_in_a_graph_is_that_of_the_eager_loop(backend, make):
    loader = make(fastamp)

    def epoch():
        total = torch.zeros(())
        for batch in loader:
            total = total + batch[0].float().sum()
        return total

    torch.compiler.reset()
    torch.manual_seed(0)
    expected = [epoch() for _ in range(3)]
    torch.manual_seed(0)
    compiled = torch.compile(epoch, backend="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated")
        found = [compiled()]
        n_frames = counters["frames"]["total"]
        found += [compiled(), compiled()]
    assert found == expected
    assert counters["frames"]["total"] == n_frames  # later epochs trace nothing
