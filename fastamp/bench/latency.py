"""The latency of inference: how long one request takes, in FP32 and under autocast."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fastamp.bench.cases import race_cases, race_table
from fastamp.bench.compare import Plan
from fastamp.bench.environment import no_speed_reason
from fastamp.bench.model import GPT, Shape
from fastamp.bench.options import DEFAULT, add_command, numbers
from fastamp.bench.report import Report, Task

if TYPE_CHECKING:
    import argparse

    from fastamp.bench.cases import Arms
    from fastamp.bench.options import Subparsers

SHAPES = {
    "cpu": Shape(layers=4, heads=2, width=256, block_size=128),
    "cuda": Shape(layers=12, heads=12, width=768, block_size=1024),  # as GPT-2 small
}
REQUESTS = 5  # in a visit, after which the device is waited for once
PLAN = Plan(rounds=400, window=2, warmup=8, half_width=0.02, limit_s=6.0)
PERCENTILES = (50, 90, 99)


def add_parser(subparsers: Subparsers) -> None:
    """Add the command `latency` and its options."""
    add = add_command(
        subparsers,
        "latency",
        _prepare,
        help="inference per batch size in FP32 and in AMP: p50, p90, p99",
        description="Time requests to a small GPT: on a GPU by events that are read at the end.",
        epilog="speedup/ and the batch size, of AMP against FP32",
    )
    add("--batch-sizes", type=numbers, default="1,4,16", metavar="LIST", help=DEFAULT)
    add("--precision", choices=("bf16", "fp16"), default="bf16", help=f"of AMP {DEFAULT}")


def _prepare(args: argparse.Namespace) -> Task:
    sizes, shape = args.batch_sizes, asdict(SHAPES[args.device])
    job = {"batch_sizes": sizes, "precision": args.precision, "shape": shape}
    return Task(job=job, run=lambda: _run(args))


class Server:
    """Answers requests of one batch size in one precision, and remembers how long each took."""

    def __init__(self, model: GPT, tokens: torch.Tensor, dtype: torch.dtype | None) -> None:
        self.model = model
        self.tokens = tokens
        self.dtype = dtype
        self.latencies_s: list[float] = []

    @torch.inference_mode()
    def serve(self) -> None:
        """Answer some requests; on a GPU they queue up, and the events are read at the end."""
        device = self.tokens.device.type
        with torch.autocast(device, dtype=self.dtype, enabled=self.dtype is not None):
            marks = [_mark(device)]
            for _ in range(REQUESTS):
                self.model(self.tokens)
                marks.append(_mark(device))
        if device == "cuda":
            torch.cuda.synchronize()
        self.latencies_s += [
            b - a if device == "cpu" else a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)
        ]

    def describe(self, warmup_rounds: int) -> dict[str, float]:
        """Return the percentiles of all requests after the warm-up, in milliseconds."""
        latencies_ms = np.multiply(self.latencies_s[warmup_rounds * REQUESTS :], 1e3)
        values = np.percentile(latencies_ms, PERCENTILES).tolist()
        found = {f"p{p} ms": value for p, value in zip(PERCENTILES, values, strict=True)}
        return {"requests": latencies_ms.size, **found}


def _mark(device: str) -> Any:
    """Return an event on the stream of a GPU, else the time in seconds."""
    if device == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def _run(args: argparse.Namespace) -> Report:
    torch.manual_seed(args.seed)
    shape = SHAPES[args.device]
    model = GPT(shape).to(args.device).eval()
    dtype = torch.float16 if args.precision == "fp16" else torch.bfloat16
    servers: dict[str, dict[str, Server]] = {}

    def make(name: str) -> Arms:
        tokens = torch.randint(256, (int(name), shape.block_size), device=args.device)
        dtypes = {"fp32": None, "amp": dtype}
        servers[name] = {arm: Server(model, tokens, kind) for arm, kind in dtypes.items()}
        return {arm: server.serve for arm, server in servers[name].items()}

    notes = [f"a race for each batch size; {args.precision}, windows of {shape.block_size} bytes"]
    reason = no_speed_reason(args.device, args.precision)
    notes += [] if reason is None else [reason]
    report = race_cases(args, PLAN, map(str, args.batch_sizes), make, notes=notes)
    details = {
        name: {arm: server.describe(race.warmup_rounds) for arm, server in servers[name].items()}
        for name, race in report.races.items()
    }
    table = race_table(report.races, *(f"p{p} ms" for p in PERCENTILES))
    return replace(report, table=table, details=details)
