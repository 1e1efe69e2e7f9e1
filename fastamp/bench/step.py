"""The step alone: torch's unscale, clip and step against fastamp's, on drawn gradients."""

from __future__ import annotations

import argparse
import re
from functools import partial
from typing import TYPE_CHECKING

import torch

import fastamp
from fastamp.bench.cases import race_cases
from fastamp.bench.command import add_command
from fastamp.bench.compare import AGAIN, Plan
from fastamp.bench.record import Task
from fastamp.train.options import number

if TYPE_CHECKING:
    from fastamp.bench.cases import Arms
    from fastamp.bench.command import Subparsers

SHAPES = "4x2000000,192x50000,2000x1000"
SHARDED_SHAPES = "4x2000000,192x50000,1000x1000"  # DTensors take torch long to get to know
MAX_NORM = 1.0  # always less than the norm of what is drawn: every step clips
PLAN = Plan(rounds=2000, window=3, warmup=12, half_width=0.01, limit_s=8.0)


def add_parser(subparsers: Subparsers) -> None:
    """Add the command `step` and its options."""
    metrics = "speedup/ and the shape, as in speedup/192x50000"
    add = add_command(subparsers, "step", _prepare, __doc__, metrics=metrics)
    shapes = f"tensors and elements of each (default: {SHAPES}; with --ranks {SHARDED_SHAPES})"
    add("--shapes", type=_parse_shapes, metavar="LIST", help=shapes)
    ranks = "of processes that share the tensors as FSDP2's shards, on the CPU over gloo"
    add("--ranks", type=number(int, 2), metavar="N", help=ranks)


def _parse_shapes(text: str) -> dict[str, tuple[int, int]]:
    shapes = {}
    for item in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", item)
        if match is None:
            message = f"{item!r} is not a number of tensors and of elements, as in 2000x1000"
            raise argparse.ArgumentTypeError(message)
        shapes[item] = (int(match[1]), int(match[2]))
    return shapes


def _prepare(args: argparse.Namespace) -> Task:
    default = SHAPES if args.ranks is None else SHARDED_SHAPES
    args.shapes = args.shapes or _parse_shapes(default)
    job = {"shapes": list(args.shapes), "seed": args.seed}
    if args.ranks is not None:
        args.device = "cpu"
        job["ranks"] = args.ranks
        from fastamp.bench import local_ranks  # noqa: PLC0415 - it needs torch.distributed

        return Task(job=job, run=lambda: local_ranks.run(args.ranks, args.shapes, args.seed))
    sides: dict[str, Step] = {}

    def make(name: str) -> Arms:
        for arm in ("stock", AGAIN, "fastamp"):
            sides[arm] = Step(args.shapes[name], args.device, args.seed)
        check(sides["stock"], sides["fastamp"])
        return {a: side.fastamp if a == "fastamp" else side.stock for a, side in sides.items()}

    notes = ["fused AdamW; stock is unscale_, clip_grad_norm_, step and update"]
    return Task(
        job=job,
        run=lambda: race_cases(
            args, PLAN, args.shapes, make, before=lambda arm: sides[arm].restore(), notes=notes
        ),
    )


class Step:
    """Parameters, their gradients as drawn, an optimizer, and one side's scaler."""

    def __init__(self, shape: tuple[int, int], device: str, seed: int) -> None:
        count, numel = shape
        generator = torch.Generator(device).manual_seed(seed)
        draw = partial(torch.randn, numel, device=device, generator=generator)
        weights, self.grads = ([draw() for _ in range(count)] for _ in range(2))
        self.parameters = [torch.nn.Parameter(weight) for weight in weights]
        for parameter in self.parameters:
            parameter.grad = torch.empty_like(parameter)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, fused=True)
        # Not a power of two, and not 1: every multiply is a real one.
        self.stock_scaler = torch.amp.GradScaler(device, init_scale=1.01)
        self.scaler = fastamp.GradScaler(device, init_scale=1.01)
        for scaler in (self.stock_scaler, self.scaler):
            scaler.scale(torch.ones((), device=device))

    def restore(self) -> None:
        """Put the gradients back as backward would leave them."""
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        torch._foreach_copy_(grads, self.grads)

    def stock(self) -> None:
        """Step in torch's words."""
        self.stock_scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.stock_scaler.step(self.optimizer)
        self.stock_scaler.update()

    def fastamp(self) -> None:
        """Step in fastamp's words."""
        self.scaler.step(self.optimizer, max_norm=MAX_NORM)
        self.scaler.update()


def check(stock: Step, ours: Step) -> None:
    """Compare the parameters after one step of each, before anything is timed.

    Raises:
        AssertionError: they differ by more than torch's float32 norm is off.
    """
    for side, step in ((stock, stock.stock), (ours, ours.fastamp)):
        side.restore()
        step()
    for theirs, mine in zip(stock.parameters, ours.parameters, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
