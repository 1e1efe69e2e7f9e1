"""The latency of inference per batch size, in FP32 and under autocast: p50, p90 and p99."""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch

import fastamp
from fastamp.bench.environment import DTYPES, PRECISION, no_speed_reason
from fastamp.bench.gpt import GPT, GPT2_SMALL, Shape
from fastamp.bench.options import DEFAULT, number
from fastamp.bench.race import Plan
from fastamp.bench.record import Case, Task, run_cases

SHAPES = {"cpu": Shape(layers=4, heads=2, width=256, block_size=128), "cuda": GPT2_SMALL}
PLAN = Plan(rounds=400, half_width=0.02, limit_s=6.0)
METRICS = "speedup/ and the batch size, of AMP against FP32"


def _sizes(text: str) -> list[int]:
    return [int(number(int, 1)(item)) for item in text.split(",")]


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this command alone."""
    add("--batch-sizes", type=_sizes, default="1,4,16", metavar="LIST", help=DEFAULT)
    add("--precision", **PRECISION)


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and the function that runs it."""
    shape = SHAPES[args.device]
    torch.manual_seed(args.seed)
    model = GPT(shape).to(args.device).eval()
    dtypes = {"fp32": None, "amp": DTYPES[args.precision]}

    def make(name: str) -> Case:
        tokens = torch.randint(256, (int(name), shape.block_size), device=args.device)
        servers = {arm: Server(model, tokens, dtype) for arm, dtype in dtypes.items()}
        return Case(
            arms={arm: server.serve for arm, server in servers.items()},
            details=lambda _: {arm: server.percentiles() for arm, server in servers.items()},
        )

    sizes = list(dict.fromkeys(map(str, args.batch_sizes)))
    notes = [
        f"a race for each batch size; {args.precision}, windows of {shape.block_size} bytes",
        "a request ends when its result is there: each one waits for the device",
        "percentiles are fastamp.Timer's, of buckets at most 3.2 % wide",
        *filter(None, [no_speed_reason(args.device, args.precision)]),
    ]
    job = {"batch_sizes": sizes, "precision": args.precision, "shape": asdict(shape)}
    return job, partial(run_cases, args, PLAN, sizes, make, notes)


class Server:
    """Answers requests of one batch size in one precision, each a region of a timer."""

    def __init__(self, model: GPT, tokens: torch.Tensor, dtype: torch.dtype | None) -> None:
        self.model = model
        self.tokens = tokens
        self.dtype = dtype
        self.synchronize = torch.get_device_module(tokens.device).synchronize
        self.timer = fastamp.Timer("cpu")  # the host's clock, which includes the wait
        for _ in range(PLAN.warmup):  # the first requests make kernels and pools
            self.serve()
        self.timer.reset()

    @torch.inference_mode()
    def serve(self) -> None:
        """Answer one request, and wait for its result."""
        device = self.tokens.device.type
        with (
            self.timer("request"),
            torch.autocast(device, dtype=self.dtype, enabled=self.dtype is not None),
        ):
            self.model(self.tokens)
            self.synchronize()  # returns at once on a CPU

    def percentiles(self) -> dict[str, float]:
        """Return percentiles of the requests' times in milliseconds."""
        found = self.timer.summary()["request"]
        return {"p50 ms": found.p50 * 1e3, "p90 ms": found.p90 * 1e3, "p99 ms": found.p99 * 1e3}
