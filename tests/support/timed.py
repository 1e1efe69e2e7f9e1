"""What the ranks of the timer's tests run."""

from __future__ import annotations

from unittest import mock

import torch.distributed as dist

import fastamp
from fastamp import _ops


def compare_ranks(backend):
    """Compare regions over ranks; return the comparison, and how often it gathered."""
    rank = dist.get_rank()
    with _ops.use_only(backend):
        timer = fastamp.Timer("cpu")
        for _ in range(2):
            timer("step").add(1_000_000 * (1 + 2 * rank))
        if rank == 1:
            timer("only").add(5_000_000)
        with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as gather:
            found = timer.summary_over_ranks()
    return {path: tuple(stats) for path, stats in found.items()}, gather.call_count
