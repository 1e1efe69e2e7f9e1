"""The main job: a small GPT trained on real text in FP32, in AMP, and in AMP with fastamp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fastamp.bench.data import load_corpus
from fastamp.bench.environment import no_speed_reason
from fastamp.bench.model import Shape
from fastamp.bench.options import BadArgumentError, number, writable_file
from fastamp.bench.race import WARMUP_STEPS, measure
from fastamp.bench.report import render, show, write_json
from fastamp.bench.train import Job

if TYPE_CHECKING:
    import argparse

__all__ = ["add_parser", "run"]

# 11.2 M parameters. Many thin layers: the activations, which AMP halves, outweigh the parameters
# and Adam's state, which it does not. Heads of 128, for which torch's bf16 attention is fastest.
CPU_SIZES = {"layers": 14, "heads": 2, "width": 256, "block_size": 128}
CPU_BATCH = 40
CPU_CUT = {"batch_size": 1, "steps": 5}
CUDA_SIZES = {"layers": 12, "heads": 12, "width": 768, "block_size": 1024}  # as GPT-2 small


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `amp` and its options."""
    parser = subparsers.add_parser(
        "amp",
        help="FP32 against AMP, stock and with fastamp, on real text (the default)",
        description="Train a small GPT over bytes in FP32, in AMP, and in AMP with fastamp.",
        epilog="Sizes without a stated default have one that suits the device.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    add = parser.add_argument
    default = "(default: %(default)s)"
    add("--data", metavar="PATH", help="file or folder of text (default: the standard library)")
    add("--device", choices=("cpu", "cuda"), help="(default: cuda where torch finds a GPU)")
    add("--precision", choices=("bf16", "fp16"), default="bf16", help=f"of AMP {default}")
    steps = f"of every arm; the first {WARMUP_STEPS} are not timed"
    add("--steps", type=number(int, WARMUP_STEPS + 1), help=steps)
    add("--batch-size", type=number(int, 1), help="windows of text in a step")
    add("--block-size", type=number(int, 1), help="bytes in a window")
    add("--layers", type=number(int, 1), help="blocks of the model")
    add("--heads", type=number(int, 1), help="attention heads, a divisor of the width")
    add("--width", type=number(int, 1), help="of the residual stream")
    add("--seed", type=number(int, 0, 2**32), default=0, help=f"of all that is drawn {default}")
    speedup = f"target: times as fast as FP32 {default}"
    add("--min-speedup", type=number(float, 0, 1e6), default=1.5, help=speedup)
    saving = f"target: share of FP32's peak memory {default}"
    add("--min-memory-saving", type=number(float, -1, 1), default=0.4, help=saving)
    gap = f"target: difference in next-byte accuracy {default}"
    add("--max-accuracy-gap", type=number(float, 0, 1), default=0.01, help=gap)
    add("--json", type=writable_file, metavar="FILE", help="write all that was measured to FILE")
    add("--check", action="store_true", help="exit with 1 if a target is missed")


def run(args: argparse.Namespace) -> int:
    """Run the main job and return the exit status: 1 for a missed target with --check, else 0."""
    job = make_job(args)
    corpus = load_corpus(args.data, block_size=job.shape.block_size)
    train, held_out = len(corpus.train), len(corpus.validation)
    show(f"{corpus.source}: {train} bytes to train on, the last {held_out} to validate on")
    targets = {
        "speed-up": args.min_speedup,
        "memory saving": args.min_memory_saving,
        "accuracy gap": args.max_accuracy_gap,
    }
    report = measure(job, corpus, targets, excused=_excused(args, job))
    show(render(report))
    if args.json is not None:
        write_json(report, args.json)
    missed = any(target.verdict == "fail" for target in report.targets)
    return 1 if args.check and missed else 0


def make_job(args: argparse.Namespace) -> Job:
    """Return the job that the options ask for, with defaults that suit the device.

    Raises:
        BadArgumentError: the device is not there, or the heads do not divide the width.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        raise BadArgumentError(
            option="--device", value="cuda", problem="needs a GPU, and torch finds none"
        )
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    defaults = _default_sizes(device, fast=no_speed_reason(device, args.precision) is None)
    given = {name: getattr(args, name) for name in defaults if getattr(args, name) is not None}
    sizes = defaults | given
    job = {name: sizes.pop(name) for name in ("batch_size", "steps")}
    shape = Shape(**sizes)
    if shape.width % shape.heads:
        raise BadArgumentError(
            option="--heads", value=shape.heads, problem=f"does not divide --width {shape.width}"
        )
    return Job(device=device, precision=args.precision, shape=shape, seed=args.seed, **job)


def _default_sizes(device: str, *, fast: bool) -> dict[str, int]:
    if device == "cuda":
        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        # About 0.6 GiB a window in FP32, beside 4 GiB for the three arms themselves.
        batch_size = next((size for size in (32, 16, 8, 4, 2) if size <= gib), 1)
        return CUDA_SIZES | {"batch_size": batch_size, "steps": 52}
    # Without units for it, a step in low precision has been seen to take 20 times one in FP32.
    return CPU_SIZES | ({"batch_size": CPU_BATCH, "steps": 9} if fast else CPU_CUT)


def _excused(args: argparse.Namespace, job: Job) -> dict[str, str]:
    """Return why a target cannot be judged on this machine, by its name."""
    reason = no_speed_reason(job.device, job.precision)
    if reason is None:
        return {}
    excused = {"speed-up": reason}
    if job.device == "cpu" and args.batch_size is None:
        cut = f"the default batch is cut to {job.batch_size}, where parameters are most of the peak"
        excused["memory saving"] = f"{reason}, so {cut}: try --batch-size {CPU_BATCH}"
    return excused
