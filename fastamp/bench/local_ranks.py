"""Ranks on this machine: processes that share tensors as DTensor shards, over gloo."""

import io
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.spawn import spawn

TIMEOUT_S = 120  # of one collective: where a rank is gone, the others end with an error
T = TypeVar("T")


def run_on_ranks(count: int, work: Callable[..., T], *args: object) -> T:
    """Call `work` on `count` ranks; return rank 0's result after all have ended."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_start, (count, folder, work, args), nprocs=count)  # type: ignore[no-untyped-call]
        result: T = pickle.loads(Path(folder, "result").read_bytes())  # noqa: S301 - our own
        return result


def _start(
    rank: int, count: int, folder: str, work: Callable[..., object], args: tuple[object, ...]
) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    if rank > 0:
        sys.stderr = io.StringIO()  # one progress bar is enough
    result = work(*args)
    if rank == 0:
        Path(folder, "result").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


def shard(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's part of each tensor as a DTensor, split as FSDP2 splits parameters."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [DTensor.from_local(t, mesh).redistribute(placements=[Shard(0)]) for t in tensors]


def make_all_reduce() -> Callable[[], object]:
    """Return the least that a step on ranks has to wait for: an all-reduce of two numbers."""
    numbers = torch.zeros(2, dtype=torch.float64)
    return lambda: dist.all_reduce(numbers)


def count_collectives(call: Callable[[], object]) -> int:
    """Return how many collectives a call starts."""
    with CommDebugMode() as counted:  # type: ignore[no-untyped-call]
        call()
    total: int = counted.get_total_counts()
    return total
