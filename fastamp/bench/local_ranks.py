"""The step on FSDP2's shards: processes of its own play the ranks, over gloo on this machine."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.spawn import spawn

from fastamp.bench.cases import race_cases
from fastamp.bench.compare import AGAIN, Plan
from fastamp.bench.step import Step, check

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastamp.bench.cases import Arms
    from fastamp.bench.record import Report

    Shapes = dict[str, tuple[int, int]]

# All ranks run the same rounds, whatever their clocks say: the warm-up is too short to settle.
PLAN = Plan(rounds=44, window=44, warmup=4)
TIMEOUT_S = 120  # of one collective: where a rank is gone, the others end with an error


def run(count: int, shapes: Shapes, seed: int) -> Report:
    """Start the ranks, and return what rank 0 found when all have ended; none is left behind."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_work, (count, folder, shapes, seed), nprocs=count)  # type: ignore[no-untyped-call]
        report: Report = pickle.loads(Path(folder, "report").read_bytes())  # noqa: S301 - our own
        return report


def _work(rank: int, count: int, folder: str, shapes: Shapes, seed: int) -> None:
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
    report = _race(shapes, seed)
    if rank == 0:
        Path(folder, "report").write_bytes(pickle.dumps(report))
    dist.destroy_process_group()


def _race(shapes: Shapes, seed: int) -> Report:
    sides: dict[str, ShardedStep] = {}
    costs: dict[str, Cost] = {}

    def make(name: str) -> Arms:
        for arm in ("stock", AGAIN, "fastamp"):
            sides[arm] = ShardedStep(shapes[name], seed)
        check(sides["stock"], sides["fastamp"])
        for arm, side in sides.items():
            costs[arm] = Cost(side.fastamp if arm == "fastamp" else side.stock)
        return {arm: cost.visit for arm, cost in costs.items()}

    return race_cases(
        argparse.Namespace(device="cpu", seed=seed),
        PLAN,
        shapes,
        make,
        before=lambda arm: sides[arm].restore(),
        details=lambda _: {arm: cost.figures() for arm, cost in costs.items()},
        notes=[
            "FSDP2's shards, fused AdamW; stock is unscale_, clip_grad_norm_, step and update",
            "collectives of a step; host: the time that rank 0's main thread is busy with it",
        ],
    )


class Cost:
    """The collectives of one step, and the time that its thread was busy in each visit."""

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step
        self._host_s: list[float] = []
        with CommDebugMode() as counted:  # type: ignore[no-untyped-call]
            step()
        self._collectives: int = counted.get_total_counts()

    def visit(self) -> None:
        """Step, and keep the thread's time."""
        start_s = time.thread_time()
        self._step()
        self._host_s.append(time.thread_time() - start_s)

    def figures(self) -> dict[str, float]:
        """Return what one step takes; the time is the median of the visits after the warm-up."""
        host_ms = 1e3 * float(np.median(self._host_s[PLAN.warmup :]))
        return {"collectives": self._collectives, "host ms": host_ms}


class ShardedStep(Step):
    """The step where every rank holds its part of each parameter, as FSDP2 leaves them."""

    def __init__(self, shape: tuple[int, int], seed: int) -> None:
        super().__init__(shape, "cpu", seed)
        for parameter in self.parameters:
            parameter.grad = None
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        module = torch.nn.ParameterList(self.parameters)
        fully_shard(module, mesh=mesh)
        self.parameters = [*module.parameters()]
        drawn = [distribute_tensor(g, mesh, [Shard(0)], src_data_rank=None) for g in self.grads]
        self.grads = [grad.to_local() for grad in drawn]
        for parameter in self.parameters:
            parameter.grad = torch.empty_like(parameter)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=True)

    def restore(self) -> None:
        """Put this rank's parts of the gradients back as backward would leave them."""
        grads = [p.grad.to_local() for p in self.parameters if isinstance(p.grad, DTensor)]
        torch._foreach_copy_(grads, self.grads)
