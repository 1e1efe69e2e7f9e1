"""`python -m fastamp.train`: train the bench's GPT, byte by byte, on the user's text."""

import argparse
import ast
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import torch
from torch.utils.data import Subset

from fastamp.data import TokenDataset
from fastamp.train import CheckpointError, TrainConfig, fine_tune
from fastamp.train.config import AUTOCAST, INTEGERS
from fastamp.train.gpt import GPT, Shape
from fastamp.train.optimizer import OPTIMIZERS, SCHEDULES
from fastamp.train.options import DEFAULT, escape_output, number, refuse, say
from fastamp.train.ranks import check_environment, is_launched
from fastamp.train.text import load_corpus

VALIDATION_WINDOWS = 64
_MANY = 10**9
_STEPS = 500
_COUNTS = {  # name: default, the most that is accepted, help
    "block-size": (128, _MANY, "bytes in a window"),
    "layers": (4, 10_000, "of the model"),
    "heads": (4, 10_000, "in a layer"),
    "width": (256, _MANY, "of the model"),
}
_SIZES = {"layers": 4, "width": 256, "block-size": 128, "batch-size": 16}
_OBJECTS = {"tracker", "loss_fn", "model_call"}  # fields of TrainConfig that have no option
_DEFAULTS = {"batch_size": 16, "checkpoint_every": 100, "progress": True, "epochs": None}
_DEFAULTS |= {"warmup_steps": None}
_NOTES = {
    "max_steps": f" (default: {_STEPS}, without --epochs)",
    "epochs": " Used without --steps.",
    "warmup_steps": " (default: a tenth of --steps)",
    "eval_every": " (default: that of --checkpoint-every)",
}
_CHOICES: dict[str, Any] = {"optimizer": OPTIMIZERS, "schedule": SCHEDULES, "precision": AUTOCAST}
_CHOICES |= {"parallel": ("ddp", "fsdp")}


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print the summary and return the exit status."""
    escape_output()
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
        epilog="Exit status: 0; 1 if a checkpoint cannot be resumed or written, or the result "
        "cannot be printed; 2 for a bad argument; 130 after Ctrl-C and 143 after SIGTERM, with a "
        "checkpoint written first.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--data", metavar="PATH", help="a file or folder (default: the standard library's sources)")
    for name, (default, most, text) in _COUNTS.items():
        add(f"--{name}", type=number(int, 1, most), default=default, help=f"{text} {DEFAULT}")
    own = parser.add_argument_group("options of TrainConfig")
    texts = _texts()
    for field in fields(TrainConfig):
        if field.name not in _OBJECTS:
            _add_field(own, field.name, _DEFAULTS.get(field.name, field.default), texts[field.name])
    return parser


def _add_field(group: Any, name: str, default: Any, text: str) -> None:
    """Add the option of a field of TrainConfig; "none" stands for None if the field allows it."""
    kinds = get_args(get_type_hints(TrainConfig)[name]) or (get_type_hints(TrainConfig)[name],)
    options: dict[str, Any] = {"default": default, "dest": name}
    option = name.replace("_", "-")
    if name in _CHOICES:
        options["choices"] = tuple(_CHOICES[name])
    elif bool in kinds:
        options["action"] = argparse.BooleanOptionalAction
    elif int in kinds:
        options["type"] = number(int, INTEGERS[name], 2**32 if name == "seed" else _MANY)
    elif float in kinds:
        least, most = (0.0, 1e6) if name == "weight_decay" else (1e-12, 1e6)
        options["type"] = number(float, least, most)
    if "type" in options and type(None) in kinds:
        options["type"] = _or_none(options["type"])
    names = ["--steps", "--max-steps"] if name == "max_steps" else [f"--{option}"]
    shown = _NOTES.get(name, "" if default is None or bool in kinds else f" {DEFAULT}")
    group.add_argument(*names, help=text.replace("%", "%%") + shown, **options)


def _or_none(parse: Callable[[str], float]) -> Callable[[str], float | None]:
    return lambda text: None if text.lower() == "none" else parse(text)


def _texts() -> dict[str, str]:
    """Return the text that follows each field of TrainConfig in its source."""
    found, name = dict.fromkeys((field.name for field in fields(TrainConfig)), ""), ""
    nodes: list[ast.stmt] = []
    with suppress(OSError):  # where only compiled files are installed
        nodes = ast.parse(inspect.getsource(TrainConfig)).body[0].body  # type: ignore[attr-defined]
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and name:
            found[name] = " ".join(str(node.value.value).split())
    return found


def _train(args: argparse.Namespace) -> int:
    if args.width % args.heads:
        refuse("--width", args.width, f"is no multiple of --heads {args.heads}")
    if args.parallel and not is_launched():
        refuse("--parallel", args.parallel, "needs ranks: start them with torchrun")
    is_first = not is_launched() or int(os.environ.get("RANK", "0")) == 0
    corpus = load_corpus(args.data, block_size=args.block_size, without=args.checkpoint_dir)
    parts = (corpus.train, corpus.validation)
    train, held_out = (TokenDataset(part, args.block_size) for part in parts)
    stride = -(-len(held_out) // VALIDATION_WINDOWS)
    torch.manual_seed(args.seed)
    if args.max_steps is None and args.epochs is None:
        args.max_steps = _STEPS
    if args.warmup_steps is None:
        args.warmup_steps = (args.max_steps or 0) // 10
    args.epochs = args.epochs or TrainConfig.epochs
    args.eval_every = args.eval_every or args.checkpoint_every
    try:
        config = TrainConfig(**_options_of(TrainConfig, args))
    except ValueError as error:
        field, _, problem = str(error).partition(": ")
        option = "steps" if field == "max_steps" else field.replace("_", "-")
        raise argparse.ArgumentError(None, f"argument --{option}: {problem}") from error
    _check_sizes(args, len(train), config.chosen_device)
    validation = Subset(held_out, range(0, len(held_out), stride))
    result = fine_tune(GPT(Shape(**_options_of(Shape, args))), train, validation, config)
    if is_first:
        say(f"{corpus.source}\n{result}")
    return 0


def _check_sizes(args: argparse.Namespace, n_windows: int, device: torch.device) -> None:
    """Refuse sizes that cannot fit into memory, before anything is allocated.

    Counted are float32 parameters, gradients and two moments, and for each token and layer the
    inputs of its linear layers: 10 widths in 16 bits. With FSDP only the whole parameters count.
    """
    shape = Shape(**_options_of(Shape, args))
    n_tokens = min(args.batch_size, n_windows) * args.block_size
    of_model = (4 if args.parallel == "fsdp" else 16) * shape.n_parameters
    needed = of_model + 20 * n_tokens * args.width * args.layers
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        sizes = {name: getattr(args, name.replace("-", "_")) for name in _SIZES}
        name = max(sizes, key=lambda name: sizes[name] / _SIZES[name])
        needs = f"needs {needed / 2**30:,.0f} GiB at least"
        refuse(f"--{name}", sizes[name], f"{needs}, {device} has {available / 2**30:,.0f}")


def _options_of(kind: type, args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that have the name of a field of a dataclass."""
    return {field.name: vars(args)[field.name] for field in fields(kind) if field.name in args}


if __name__ == "__main__":
    sys.exit(main())
