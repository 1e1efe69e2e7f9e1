"""The latency of inference per batch size, in FP32 and under autocast: p50, p90 and p99."""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch

import fastamp
from fastamp.bench.environment import DTYPES, no_speed_reason
from fastamp.bench.gpt import GPT, GPT2_SMALL, Shape
from fastamp.bench.race import Plan
from fastamp.bench.record import Case, Task, run_cases
from fastamp.train.options import DEFAULT, number

SHAPES = {"cpu": Shape(layers=4, heads=2, width=256, block_size=128), "cuda": GPT2_SMALL}
PLAN = Plan(rounds=400, half_width=0.02, limit_s=6.0)
METRICS = "speedup/ and the batch size, of AMP against FP32"


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this command alone."""

    def sizes(text: str) -> list[int]:
        return [int(number(int, 1)(item)) for item in text.split(",")]

    add("--batch-sizes", type=sizes, default="1,4,16", metavar="LIST", help=DEFAULT)
    add("--precision", choices=DTYPES, default="bf16", help=f"of AMP {DEFAULT}")


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and the function that runs it."""
    shape = SHAPES[args.device]
    torch.manual_seed(args.seed)
    model = GPT(shape).to(args.device).eval()

    def make(name: str) -> Case:
        tokens = torch.randint(256, (int(name), shape.block_size), device=args.device)
        fp32, amp = (Server(model, tokens, dtype) for dtype in (None, DTYPES[args.precision]))
        return Case(
            arms={"fp32": fp32.serve, "amp": amp.serve},
            details=lambda _: {"fp32": fp32.percentiles(), "amp": amp.percentiles()},
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
        return {f"{name} ms": getattr(found, name) * 1e3 for name in ("p50", "p90", "p99")}
