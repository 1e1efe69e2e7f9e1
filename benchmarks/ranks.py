"""The step over ranks of this machine: torch's AdamW and fastamp's, on DTensor shards over gloo.

`python benchmarks/ranks.py --ranks 2 --shapes network`: unscale, clip and step; the collectives of
a step, and beside both an all-reduce of two numbers, the least that a step over ranks waits for.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.spawn import spawn

from fastamp.bench.options import DEFAULT, number
from fastamp.bench.race import Case, Plan, run_race, show
from fastamp.bench.step import FUSED, MAX_NORM, OUR_RTOL, STOCK_RTOL, Row, Side, draw_grads
from fastamp.timer.timer import align

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SHAPES = {  # torch needs long for its first step of DTensors
    "4x2000000": [(2_000_000,)] * 4,
    "192x50000": [(50_000,)] * 192,
    "1000x1000": [(1000,)] * 1000,
    "network": [(64, 4), (64,), (64, 64), (64,), (2, 64), (2,)],
}
TIMEOUT_S = 120  # of one collective: where a rank is gone, the others end with an error


class Sharded(Side):
    """A side whose tensors are split as FSDP2 splits parameters."""

    def __init__(self, drawn: list[torch.Tensor]) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        whole = [DTensor.from_local(tensor, mesh) for tensor in drawn]
        shards = [tensor.redistribute(placements=[Shard(0)]) for tensor in whole]
        super().__init__(Row(text="", sizes=(), optimizer=FUSED), shards)

    def before(self) -> None:
        """Restore the gradients as backward would leave them."""
        for parameter, grad, drawn in zip(self.parameters, self.grads, self.drawn, strict=True):
            grad.to_local().copy_(drawn.to_local())
            parameter.grad = grad

    def check(self, step: Callable[[], object], norm: float, rtol: float) -> None:
        """Take a step, and compare its first moments with plain float64 arithmetic."""
        self.before()
        step()
        for parameter, drawn in zip(self.parameters, self.drawn, strict=True):
            found = self.optimizer.state[parameter]["exp_avg"].to_local()
            expected = drawn.to_local().double() * (0.1 * MAX_NORM / norm)
            torch.testing.assert_close(found, expected, rtol=rtol, atol=0, check_dtype=False)


def count_collectives(call: Callable[[], object]) -> int:
    """Return how many collectives a call starts."""
    with CommDebugMode() as counted:
        call()
    total: int = counted.get_total_counts()
    return total


def race(shape: str, rounds: int) -> list[dict[str, str]]:
    """Check both steps, and race them and an all-reduce; return a row for each."""
    grads, norm = draw_grads(SHAPES[shape], "cpu", seed=0)
    counts: dict[str, int] = {}

    def make() -> Case:
        theirs, ours = Sharded(grads), Sharded(grads)
        theirs.check(theirs.torch, norm, rtol=STOCK_RTOL)
        ours.check(ours.fastamp, norm, rtol=OUR_RTOL)
        least = partial(dist.all_reduce, torch.zeros(2, dtype=torch.float64))
        arms: dict[str, Any] = {"torch": theirs.torch, "all-reduce": least, "fastamp": ours.fastamp}
        counts.update({arm: count_collectives(call) for arm, call in arms.items()})

        def prepare(arm: str) -> None:
            if arm != "all-reduce":
                {"torch": theirs, "fastamp": ours}[arm].before()
            dist.barrier()  # all ranks begin the call together

        return Case(arms=arms, before=prepare)

    # As many rounds and builds on all ranks, whatever their clocks say.
    found = run_race(make, Plan(rounds=rounds, builds=(5,)))
    return [
        {
            "gradients": shape,
            "arm": arm,
            "median ms": show(1e3 * found.quartiles_s(arm)[1], ".3f"),
            "collectives": str(counts[arm]),
            "times as fast [95 %]": found.ratio(arm).text(".2f", "x"),
        }
        for arm in found.arms
    ]


def run_rank(rank: int, folder: str, args: argparse.Namespace) -> None:
    """Race all shapes on this rank; the first one writes the table."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.ranks))
    options = {"rank": rank, "world_size": args.ranks, "timeout": timedelta(seconds=TIMEOUT_S)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", **options)
    rows = [row for shape in args.shapes for row in race(shape, args.rounds)]
    if rank == 0:
        table = align([[*rows[0]], *([*row.values()] for row in rows)])
        Path(folder, "table").write_text("\n".join(table))
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    """Start the ranks, wait for their end, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=number(int, 2), default=2, help=f"processes {DEFAULT}")
    default = [*SHAPES][:3]
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=default, help=DEFAULT)
    parser.add_argument("--rounds", type=number(int, 8), default=12, help=DEFAULT)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (folder, args), nprocs=args.ranks)
        print(Path(folder, "table").read_text())


if __name__ == "__main__":
    main()
