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
from fastamp.train.options import DEFAULT, number, progress, refuse, say
from fastamp.train.ranks import check_environment, is_launched
from fastamp.train.text import load_corpus

VALIDATION_WINDOWS = 64
_MANY = 10**9
_COUNTS = {  # with their defaults, and the most that is sensible
    "steps": (500, _MANY, "of the optimizer"),
    "batch-size": (16, _MANY, "windows in a step, on every rank"),
    "block-size": (128, _MANY, "bytes in a window"),
    "layers": (4, 10_000, "of the model"),
    "heads": (4, 10_000, "in a layer"),
    "width": (256, _MANY, "of the model"),
}
_SIZES = ("layers", "width", "block-size", "batch-size")
# The option that sets a field of TrainConfig, where it has another name.
_OPTIONS = {"max_steps": "steps", "warmup_steps": "steps", "eval_every": "checkpoint-every"}


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print the summary and return the exit status."""
    parser = _make_parser()
    args = parser.parse_args(argv)
    try:
        check_environment()
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
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
        epilog="Exit status: 0; 1 if a checkpoint cannot be resumed or written, or the result not "
        "be printed; 2 for a bad argument; 130 after Ctrl-C and 143 after SIGTERM, with a "
        "checkpoint written first.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--data", metavar="PATH", help="a file or folder (default: the standard library's sources)")
    for name, (default, most, text) in _COUNTS.items():
        add(f"--{name}", type=number(int, 1, most), default=default, help=f"{text} {DEFAULT}")
    add(
        "--lr",
        type=number(float, 1e-12, 1e6),
        default=1e-3,
        help=f"highest learning rate {DEFAULT}",
    )
    add("--seed", type=number(int, 0, 2**32), default=0, help=f"of all random numbers {DEFAULT}")
    add("--precision", choices=tuple(AUTOCAST), default="32-true")
    add("--device", help="(default: cuda if torch finds a GPU)")
    text = "how the ranks of torchrun share the model (default: ddp)"
    add("--parallel", choices=("ddp", "fsdp"), help=text)
    add("--checkpoint-dir", metavar="DIR", help="write checkpoints there, and resume from them")
    text = f"steps between checkpoints {DEFAULT}"
    add("--checkpoint-every", type=number(int, 1, _MANY), default=100, help=text)
    add("--no-resume", dest="resume", action="store_false", help="start anew")
    return parser


def _train(args: argparse.Namespace) -> int:
    if args.width % args.heads:
        refuse("--width", args.width, f"is no multiple of --heads {args.heads}")
    if args.parallel and not is_launched():
        refuse("--parallel", args.parallel, "needs ranks: start them with torchrun")
    is_first = not is_launched() or int(os.environ.get("RANK", "0")) == 0
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
        except ValueError as error:
            field, _, problem = str(error).partition(": ")
            option = _OPTIONS.get(field, field.replace("_", "-"))
            raise argparse.ArgumentError(None, f"argument --{option}: {problem}") from error
        _check_sizes(args, len(train), config.chosen_device)
        validation = Subset(held_out, range(0, len(held_out), stride))
        result = fine_tune(GPT(Shape(**_options_of(Shape, args))), train, validation, config)
    if is_first:
        say(f"{corpus.source}\n{result}")
    return 0


def _check_sizes(args: argparse.Namespace, n_windows: int, device: torch.device) -> None:
    """Refuse what cannot fit into memory, before it is allocated.

    That is float32 parameters, gradients and two moments, and for each token and layer the inputs
    of linear layers, of 10 widths in 16 bits. Shards of FSDP count the whole parameters alone.
    """
    shape = Shape(**_options_of(Shape, args))
    n_tokens = min(args.batch_size, n_windows) * args.block_size
    of_model = (4 if args.parallel == "fsdp" else 16) * shape.n_parameters
    needed = of_model + 20 * n_tokens * args.width * args.layers
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
    elif hasattr(os, "sysconf"):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        return
    if needed > available:
        sizes = {name: getattr(args, name.replace("-", "_")) for name in _SIZES}
        name = max(sizes, key=lambda name: sizes[name] / _COUNTS[name][0])
        needs = f"needs {needed / 2**30:,.0f} GiB at least"
        refuse(f"--{name}", sizes[name], f"{needs}, {device} has {available / 2**30:,.0f}")


def _options_of(kind: type, args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that are called as a field of a dataclass."""
    return {field.name: vars(args)[field.name] for field in fields(kind) if field.name in args}


if __name__ == "__main__":
    sys.exit(main())
