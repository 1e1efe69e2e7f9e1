"""fastamp's step against torch's, on the same gradients, beside the limit that the memory sets.

python benchmarks/amp.py [--device cuda] [--rounds N] [--json FILE]

Each row is one job done by both, in random order in one run: `norm`; `unscale + clip` in place;
`step` with unscaling and clipping, by fused AdamW and by SGD with momentum. `bare` is the
optimizer's step alone. The limit counts the bytes that fastamp has to move.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from measure import LIMIT_NBYTES, count_launches, host_seconds, interleaved, make_plain_read

import fastamp

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

WIDTH = 768
GPT2_BLOCK = [
    (WIDTH,),
    (WIDTH,),
    (3 * WIDTH, WIDTH),
    (3 * WIDTH,),
    (WIDTH, WIDTH),
    (WIDTH,),
    (WIDTH,),
    (WIDTH,),
    (4 * WIDTH, WIDTH),
    (4 * WIDTH,),
    (WIDTH, 4 * WIDTH),
    (WIDTH,),
]
LIMIT_SHAPE = "one tensor, 500 MB"
SHAPES: dict[str, list[tuple[int, ...]]] = {
    LIMIT_SHAPE: [(125_000_000,)],
    "GPT-2, 124 M in 148": [
        (50257, WIDTH),
        (1024, WIDTH),
        *GPT2_BLOCK * 12,
        (WIDTH,),
        (WIDTH,),
    ],
    "25 M in 192": [(25_000_000 // 192,)] * 192,
    "2,000 of 1,000": [(1000,)] * 2000,
}


@dataclass(frozen=True)
class Job:
    """One row: what both sides do, and how often fastamp moves each gradient-sized tensor."""

    what: str
    make_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
    passes: int


# A step reads the gradients once. Fused AdamW then reads and writes gradients, parameters and two
# moments; SGD with momentum follows an in-place multiply and reads them again, with parameters and
# momentum read and written.
JOBS = [
    Job("norm", lambda ps: torch.optim.SGD(ps, lr=0.0), 1),
    Job("unscale + clip", lambda ps: torch.optim.SGD(ps, lr=0.0), 3),
    Job("AdamW fused", lambda ps: torch.optim.AdamW(ps, lr=1e-4, fused=True), 9),
    Job("SGD", lambda ps: torch.optim.SGD(ps, lr=1e-4, momentum=0.9), 8),
]


@dataclass(frozen=True)
class Row:
    """One comparison: seconds per call, the limit, and on a GPU the launches of one call."""

    shape: str
    what: str
    ours_s: float
    stock_s: float
    bare_s: float | None
    limit_s: float
    ours_host_s: float | None
    stock_host_s: float | None
    ours_launches: int | None
    stock_launches: int | None


class Side:
    """Parameters, gradients, optimizer and scaler of one side of a comparison."""

    def __init__(
        self, shape: str, job: Job, scaler: type[torch.amp.GradScaler], device: torch.device
    ) -> None:
        self.parameters = make_parameters(SHAPES[shape], device)
        self.grads = [p.grad for p in self.parameters if p.grad is not None]
        self.optimizer = job.make_optimizer(self.parameters)
        # Not a power of two, and not 1: every multiply is a real one.
        self.scaler = scaler(device.type, init_scale=1.01)
        self.scaler.scale(torch.ones((), device=device))
        # A little less at every call, so that every call clips.
        self.limits = (1e-2 * 0.97**i for i in itertools.count())

    def stock(self, what: str) -> None:
        """Do the job in torch's words."""
        if what == "norm":
            torch.nn.utils.get_total_norm(self.grads)
            return
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.parameters, next(self.limits))
        if what != "unscale + clip":
            self.scaler.step(self.optimizer)
        self.scaler.update()

    def ours(self, what: str) -> None:
        """Do the job in fastamp's words."""
        assert isinstance(self.scaler, fastamp.GradScaler)  # noqa: S101
        if what == "norm":
            fastamp.get_total_norm(self.grads)
            return
        if what == "unscale + clip":
            self.scaler.clip_grad_norm_(self.optimizer, next(self.limits))
        else:
            self.scaler.step(self.optimizer, max_norm=next(self.limits))
        self.scaler.update()


def make_parameters(shapes: list[tuple[int, ...]], device: torch.device) -> list[Tensor]:
    """Make parameters with normal gradients."""
    made = []
    for shape in shapes:
        parameter = torch.nn.Parameter(torch.randn(shape, device=device))
        parameter.grad = torch.randn(shape, device=device)
        made.append(parameter)
    return made


def check(shape: str, job: Job, device: torch.device) -> None:
    """Compare fastamp's results with float64 arithmetic, before anything is timed.

    Not with torch's: its float32 norm of a large gradient is off in the fourth digit.
    """
    ours = Side(shape, job, fastamp.GradScaler, device)
    norm = math.sqrt(math.fsum(g.double().square().sum().item() for g in ours.grads))
    assert abs(fastamp.get_total_norm(ours.grads).item() - norm) <= 1e-7 * norm  # noqa: S101
    if job.what == "norm":
        return
    max_norm = next(Side(shape, job, fastamp.GradScaler, device).limits)
    expected = copy.deepcopy(ours.parameters)
    for parameter, grad in zip(expected, ours.grads, strict=True):
        parameter.grad = (grad.double() * (max_norm / norm)).float()
    if is_step(job):
        job.make_optimizer(expected).step()
    ours.ours(job.what)
    for mine, reference in zip(ours.parameters, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-5, atol=0)


def is_step(job: Job) -> bool:
    """Say whether the job moves the parameters."""
    return job.what not in {"norm", "unscale + clip"}


def compare(shape: str, job: Job, device: torch.device, rounds: int, byte_s: float) -> Row:
    """Measure one job at one shape."""
    check(shape, job, device)
    ours = Side(shape, job, fastamp.GradScaler, device)
    stock = Side(shape, job, torch.amp.GradScaler, device)
    arms: dict[str, Callable[[], object]] = {
        "ours": lambda: ours.ours(job.what),
        "stock": lambda: stock.stock(job.what),
    }
    if is_step(job):
        bare = Side(shape, job, torch.amp.GradScaler, device)
        arms["bare"] = bare.optimizer.step
    timings = interleaved(arms, device, rounds=rounds)
    nbytes = sum(g.nbytes for g in ours.grads)
    cuda = device.type == "cuda"
    return Row(
        shape,
        job.what,
        timings["ours"].median_s,
        timings["stock"].median_s,
        timings["bare"].median_s if is_step(job) else None,
        job.passes * nbytes * byte_s,
        host_seconds(arms["ours"]) if cuda else None,
        host_seconds(arms["stock"]) if cuda else None,
        count_launches(arms["ours"]) if cuda else None,
        count_launches(arms["stock"]) if cuda else None,
    )


def show(rows: list[Row]) -> None:
    """Print one line for each comparison."""
    print("| gradients | job | fastamp | torch | ratio | bare step | limit | host | launches |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        bare = "" if row.bare_s is None else f"{row.bare_s * 1e3:.2f} ms"
        host = launches = ""
        if row.ours_host_s is not None and row.stock_host_s is not None:
            host = f"{row.ours_host_s * 1e6:.0f} / {row.stock_host_s * 1e6:.0f} us"
            launches = f"{row.ours_launches} / {row.stock_launches}"
        print(
            f"| {row.shape} | {row.what} | {row.ours_s * 1e3:.2f} ms | {row.stock_s * 1e3:.2f} ms"
            f" | {row.stock_s / row.ours_s:.2f}x | {bare} | {row.limit_s * 1e3:.2f} ms"
            f" | {host} | {launches} |"
        )


def measure_limit(device: torch.device, rounds: int) -> tuple[float, float]:
    """Return the seconds that a byte takes, and how close fastamp's norm of 500 MB comes to it."""
    memory = Side(LIMIT_SHAPE, JOBS[0], fastamp.GradScaler, device)
    arms = {"plain": make_plain_read(device), "norm": lambda: memory.ours("norm")}
    timings = interleaved(arms, device, rounds=2 * rounds)
    plain_s = timings["plain"].median_s
    return plain_s / LIMIT_NBYTES, plain_s / timings["norm"].median_s


def main() -> None:
    """Measure every job at every shape and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    byte_s, read = measure_limit(device, args.rounds)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {fastamp.backends()}")
    print(f"plain read {1e-9 / byte_s:.1f} GB/s; fastamp's norm of 500 MB reads {read:.0%} of it")
    rows = [
        compare(shape, job, device, args.rounds, byte_s)
        for shape in SHAPES
        if shape != LIMIT_SHAPE
        for job in JOBS
    ]
    show(rows)
    if args.json:
        result = {"byte_s": byte_s, "read_of_plain": read, "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
