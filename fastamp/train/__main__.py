"""`python -m fastamp.train`: train the bench's GPT, byte by byte, on the user's text."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch.utils.data import Subset

from fastamp.data import TokenDataset
from fastamp.metrics import MetricsTracker
from fastamp.metrics.sinks import Scalar
from fastamp.train import CheckpointError, TrainConfig, fine_tune
from fastamp.train.config import AUTOCAST
from fastamp.train.gpt import GPT, Shape
from fastamp.train.options import DEFAULT, number, progress, refuse
from fastamp.train.ranks import is_launched
from fastamp.train.text import load_corpus

VALIDATION_WINDOWS = 64
_COUNTS = {
    "steps": (500, "of the optimizer"),
    "batch-size": (16, "windows in a step, on every rank"),
    "block-size": (128, "bytes in a window"),
    "layers": (4, "of the model"),
    "heads": (4, "in a layer"),
    "width": (256, "of the model"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print the summary and return the exit status."""
    parser = _make_parser()
    args = parser.parse_args(argv)
    try:
        return _train(args)
    except argparse.ArgumentError as error:
        parser.error(str(error))  # prints the usage and exits with 2
    except (CheckpointError, OSError) as error:
        message = str(error).replace("resume=False", "--no-resume")
        parser.exit(1, f"{parser.prog}: error: {message}\n")
    except KeyboardInterrupt:
        kept = f"; resume from {args.checkpoint_dir}" if args.checkpoint_dir else ""
        parser.exit(130, f"{parser.prog}: interrupted{kept}\n")


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fastamp.train",
        description="Train a small GPT on the bytes of your text; the last tenth is held out.",
        epilog="Exit status: 0; 1 if a checkpoint cannot be resumed or written; 2 for a bad "
        "argument; 130 after Ctrl-C and 143 after SIGTERM, with a checkpoint written first.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--data", metavar="PATH", help="a file or folder (default: the standard library's sources)")
    for name, (default, text) in _COUNTS.items():
        add(f"--{name}", type=number(int, 1), default=default, help=f"{text} {DEFAULT}")
    add("--lr", type=number(float, 1e-12), default=1e-3, help=f"highest learning rate {DEFAULT}")
    add("--seed", type=number(int, 0, 2**32), default=0, help=f"of all random numbers {DEFAULT}")
    add("--precision", choices=tuple(AUTOCAST), default="32-true")
    add("--device", help="(default: cuda if torch finds a GPU)")
    text = "how the ranks of torchrun share the model (default: ddp)"
    add("--parallel", choices=("ddp", "fsdp"), help=text)
    add("--checkpoint-dir", metavar="DIR", help="write checkpoints there, and resume from them")
    text = f"steps between checkpoints {DEFAULT}"
    add("--checkpoint-every", type=number(int, 1), default=100, help=text)
    add("--no-resume", dest="resume", action="store_false", help="start anew")
    return parser


def _train(args: argparse.Namespace) -> int:
    if args.width % args.heads:
        refuse("--width", args.width, f"is no multiple of --heads {args.heads}")
    if args.parallel and not is_launched():
        refuse("--parallel", args.parallel, "needs ranks: start them with torchrun")
    is_first = os.environ.get("RANK", "0") == "0"
    corpus = load_corpus(args.data, block_size=args.block_size)
    parts = (corpus.train, corpus.validation)
    train, held_out = (TokenDataset(part, args.block_size) for part in parts)
    stride = -(-len(held_out) // VALIDATION_WINDOWS)
    torch.manual_seed(args.seed)
    with progress(args.steps) if is_first else nullcontext(lambda _: None) as advance:

        def count(scalars: list[Scalar]) -> None:
            advance(sum(name == "train/loss" for name, _, _ in scalars))

        try:
            config = TrainConfig(
                **_options_of(TrainConfig, args),
                max_steps=args.steps,
                warmup_steps=args.steps // 10,
                eval_every=args.checkpoint_every,
                tracker=MetricsTracker(sinks=[count]),
            )
        except (ValueError, RuntimeError) as error:
            refuse("--device", args.device, str(error))
        validation = Subset(held_out, range(0, len(held_out), stride))
        result = fine_tune(GPT(Shape(**_options_of(Shape, args))), train, validation, config)
    if is_first:
        print(corpus.source, result, sep="\n")  # noqa: T201
    return 0


def _options_of(kind: type, args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that are called as a field of a dataclass."""
    return {field.name: vars(args)[field.name] for field in fields(kind) if field.name in args}


if __name__ == "__main__":
    sys.exit(main())
