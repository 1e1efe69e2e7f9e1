"""A dataset whose items clip gradients on one thread or two, for the workers of a DataLoader."""

from __future__ import annotations

import numpy as np
import torch

import fastamp


def clipped(threads):
    """Return the norm of a million ones, and whether each was clipped."""
    torch.set_num_threads(threads)
    # In a forked worker torch's own operators must stay on one thread; NumPy makes the gradients,
    # so that fastamp alone runs on two.
    p = torch.nn.Parameter(torch.from_numpy(np.zeros(1 << 20, np.float32)))
    p.grad = torch.from_numpy(np.ones(1 << 20, np.float32))
    norm = fastamp.clip_grad_norm_(p, 1.0).item()
    return [norm, float(np.abs(p.grad.numpy() - 2.0**-10).max() < 1e-8)]


class Clips(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.tensor(clipped(1 + i % 2 if "cpu" in fastamp.backends() else 1))


def check_workers(start):
    """Clip here, in workers that were started in this way, and here again."""
    assert clipped(2) == [1024.0, 1.0]  # starts threads that a forked worker does not have
    options = {"multiprocessing_context": start, "timeout": 120}
    options["num_workers"] = (
        1 if start == "spawn" else 2
    )  # a spawned one imports torch, for seconds
    loader = torch.utils.data.DataLoader(Clips(), batch_size=2, **options)
    assert torch.cat(list(loader)).tolist() == [[1024.0, 1.0]] * 8
    assert clipped(2) == [1024.0, 1.0]
