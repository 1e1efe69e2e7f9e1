"""Datasets of every kind in torch's own tests of its loader, with the options of their loaders."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import torch
from support.loading import Rows, Squares, make_array
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    RandomSampler,
    StackDataset,
    Subset,
    TensorDataset,
)

import fastamp

X = make_array(torch.float32, 60, 40, 30)  # rows that are large enough to be copied by threads
Y = torch.arange(60)
Named = namedtuple("Named", ["data", "label", "random_tensor"])  # noqa: PYI024 - as in torch's tests


class Together(Squares):
    """Has `__getitems__`."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Bulk(Dataset):
    """Takes a list of indices for one."""

    def __len__(self):
        return 60

    def __getitem__(self, indices):
        assert isinstance(indices, list | tuple)
        return torch.as_tensor(indices, dtype=torch.float)


class Custom:  # noqa: PLW1641 - compared only
    """A batch of the user's."""

    def __init__(self, samples):
        self.x = torch.stack([x for x, _ in samples])
        self.y = torch.stack([y for _, y in samples])

    def __eq__(self, other):
        same = torch.equal(self.x.view(torch.int32), other.x.view(torch.int32))
        return same and torch.equal(self.y, other.y)


class CustomDict(dict):
    pass


class Augmented(Squares):
    """Draws, from each of the generators."""

    def __getitem__(self, index):
        rng = fastamp.sample_rng()
        drawn = torch.rand(30, 40, generator=rng.torch), rng.numpy.random(), rng.python.random()
        return index, *drawn


def row(make):
    return Rows(60, make)


KINDS = {
    "TensorDataset": lambda: (TensorDataset(X.clone().requires_grad_(), Y), {}),
    "pairs": lambda: (row(lambda i: (X[i], Y[i])), {}),
    "strings": lambda: (row(lambda i: (str(i), i)), {}),
    "dicts in another order": lambda: (
        row(lambda i: {"x": X[i], "y": i} if i % 2 else {"y": i, "x": X[i]}),
        {},
    ),
    "a dict of its own type": lambda: (row(lambda i: CustomDict(x=X[i])), {}),
    "named tuples": lambda: (row(lambda i: Named(X[i], str(i), X[i, 0])), {}),
    "lists": lambda: (row(lambda i: [X[i], [X[i], 1.0]]), {}),
    "numpy": lambda: (row(lambda i: np.ones((20, 30, 4)) * i), {}),
    "numpy, transposed": lambda: (row(lambda i: (X[i].numpy().T, np.float32(i), np.array(i))), {}),
    "other dtypes": lambda: (
        row(lambda i: (X[i].to([torch.float16, torch.uint8, torch.bfloat16][i // 20]), i)),
        {"batch_size": 20},
    ),
    "tensors with strides": lambda: (row(lambda i: X[i].T), {}),
    "scalars": lambda: (row(float), {}),
    "no rows": lambda: (TensorDataset(torch.empty(60, 0), X), {}),
    "a tensor of its own type": lambda: (row(lambda i: torch.nn.Parameter(X[i])), {}),
    "Together": lambda: (Together(60), {}),
    "Subset": lambda: (Subset(Squares(60), range(0, 60, 2)), {}),
    "ConcatDataset": lambda: (ConcatDataset([Squares(33), Squares(10)]), {}),
    "StackDataset": lambda: (StackDataset(Squares(60), X), {}),
    "bulk": lambda: (
        Bulk(),
        {"batch_size": None, "sampler": BatchSampler(RandomSampler(Y), 7, drop_last=True)},
    ),
    "no batches": lambda: (Squares(60), {"batch_size": None}),
    "no batches, converted": lambda: (row(lambda i: X[i].numpy()), {"batch_size": None}),
    "custom batches": lambda: (
        row(lambda i: (X[i], Y[i])),
        {"collate_fn": Custom, "batch_size": 7},
    ),
    "drop_last": lambda: (Squares(60), {"drop_last": True, "batch_size": 7}),
    "a sampler": lambda: (Squares(60), {"sampler": RandomSampler(Y, True, 100)}),
    "a batch sampler": lambda: (Squares(60), {"batch_sampler": [[1, 2], [], [3, 4, 5], [6]][::2]}),
    "augmented": lambda: (Augmented(60), {"seed": 3}),
    "augmented Subset": lambda: (Subset(Augmented(60), range(3, 50)), {"seed": 3}),
}
