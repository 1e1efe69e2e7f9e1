"""The latency of inference per batch size, in FP32 and under autocast: p50, p90 and p99."""

import argparse
from collections.abc import Callable
from functools import partial

import torch

from fastamp.bench.comparison import PLAN, run_cases
from fastamp.bench.environment import DTYPES, no_speed_reason
from fastamp.bench.gpt import GPT, GPT2_SMALL, Shape
from fastamp.bench.options import DEFAULT, number
from fastamp.bench.race import Case
from fastamp.bench.record import Task

SHAPES = {"cpu": Shape(layers=4, heads=2, width=256, block_size=128), "cuda": GPT2_SMALL}


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this command alone."""
    add("--batch-sizes", type=number(int, 1), nargs="+", default=[1, 4, 16], help=DEFAULT)
    add("--precision", choices=DTYPES, default="bf16", help=f"of AMP {DEFAULT}")


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and the function that runs it."""
    shape = SHAPES[args.device]
    about = (shape, args.device, args.seed, DTYPES[args.precision])
    cases = {str(size): partial(_make_case, *about, size) for size in args.batch_sizes}
    notes = [f"a race for each batch size; {args.precision}, windows of {shape.block_size} bytes"]
    notes += filter(None, [no_speed_reason(args.device, args.precision)])
    job = {"batch_sizes": [*cases], "precision": args.precision, "shape": shape._asdict()}
    return job, partial(run_cases, args, PLAN, cases, notes)


def _make_case(shape: Shape, device: str, seed: int, dtype: torch.dtype, size: int) -> Case:
    torch.manual_seed(seed)
    model = GPT(shape).to(device).eval()
    tokens = torch.randint(256, (size, shape.block_size), device=device)
    dtypes = {"fp32": None, "amp": dtype}
    return Case(arms={arm: partial(answer, model, tokens, each) for arm, each in dtypes.items()})


@torch.inference_mode()
def answer(model: torch.nn.Module, tokens: torch.Tensor, dtype: torch.dtype | None) -> None:
    """Answer a request; the race waits for the device, and leaves its first rounds out."""
    with torch.autocast(tokens.device.type, dtype=dtype, enabled=dtype is not None):
        model(tokens)
