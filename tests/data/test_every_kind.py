"""Every kind of dataset, over ranks and runners: one order, torch's batches, also after a stop."""

import numpy as np
import pytest
import torch
from support.loading import assert_same
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

import fastamp

ROWS, TARGETS = torch.rand(203, 5, generator=torch.Generator().manual_seed(1)), torch.arange(203)
TOKENS = np.arange(9000, dtype=np.uint16)
PIXELS = torch.arange(203 * 36).remainder(251).to(torch.uint8).view(203, 6, 6)
LENGTHS = range(0, 203, 2)


class Noise(Dataset):
    """Items that are drawn anew for each epoch and place."""

    def __len__(self):
        return 203

    def __getitem__(self, index):
        return torch.rand(3, generator=fastamp.sample_rng().torch), index


KINDS = {
    "tensors": TensorDataset(ROWS, TARGETS),
    "columns": TensorDataset(ROWS.T.contiguous().T, TARGETS),
    "array": ROWS.numpy(),
    "dict": fastamp.ArrayDataset({"x": ROWS, "y": [TARGETS.numpy(), (ROWS,)]}),
    "subset": Subset(Subset(TensorDataset(ROWS, TARGETS), LENGTHS), [5, 3, -1] * 60),
    "tokens": fastamp.TokenDataset(TOKENS, 8),
    "offsets": fastamp.TokenDataset(TOKENS, 8, random_offsets=True),
    "augmented": fastamp.ArrayDataset(PIXELS, augment=[fastamp.RandomCrop(padding=2)]),
    "noise": Noise(),
}
DRAWN = {"offsets", "augmented", "noise"}
"""Of which an item alone is another than in a batch."""


def rows_of(loader, rank, world):
    """Return a rank's part of the whole order, as torch's DistributedSampler shares it out."""
    order = [*loader.sampler]
    order += order[: -len(order) % world]
    return order[rank::world]


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_gives_the_same_batches_over_ranks_threads_and_a_stop(kind, world, threads, backend):
    dataset, rank = KINDS[kind], world - 1

    def make(threads=threads):
        options = {"num_workers": threads, "worker": "thread"} if threads else {}
        shared = {"rank": rank, "world_size": world} if world > 1 else {}
        return fastamp.DataLoader(dataset, 16, shuffle=True, seed=4, **options, **shared)

    alone = make(threads=0)
    expected = []
    for epoch in range(2):
        alone.set_epoch(epoch)
        rows = rows_of(alone, rank, world)
        parts = [rows[i : i + 16] for i in range(0, len(rows), 16)]
        batches = list(alone)
        assert len(batches) == len(parts)
        if kind not in DRAWN:
            items = [
                [torch.as_tensor(dataset[i]) if kind == "array" else dataset[i] for i in part]
                for part in parts
            ]
            assert_same(batches, [default_collate(each) for each in items])
        expected.append(batches)

    stopped = make()
    iterator = iter(stopped)
    begun = [next(iterator) for _ in range(3)]
    resumed = make()
    resumed.load_state_dict(stopped.state_dict())
    assert_same([*begun, *resumed], expected[0])
    assert_same([*resumed], expected[1])
