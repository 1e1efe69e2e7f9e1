"""How a subcommand is added, with the options that all of them share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch

from fastamp.bench import baseline
from fastamp.bench.record import Task
from fastamp.train.options import DEFAULT, number

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISION: dict[str, Any] = {"choices": DTYPES, "default": "bf16", "help": f"of AMP {DEFAULT}"}
STATUS = """Exit status: 0; 1 a target is missed, with --check, or a bound of --fail-on; 2 a bad
argument; 3 the environment does not allow a verdict: with --check where one is inconclusive or all
are n/a, with --fail-on where the change is inconclusive, and with a --baseline of another schema,
command, job or machine."""


def _writable_file(text: str) -> Path:
    path = Path(text).absolute()
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        message = f"{text!r} is no file that can be written"
        raise argparse.ArgumentTypeError(message)
    return path


def _device(text: str) -> str:
    if text == "cuda" and not torch.cuda.is_available():
        message = f"{text!r} needs a GPU, and torch finds none"
        raise argparse.ArgumentTypeError(message)
    return text


def add_command(
    subparsers: Subparsers,
    name: str,
    prepare: Callable[[argparse.Namespace], Task],
    text: str | None,
    *,
    metrics: str,
    gpu: bool = True,
) -> Callable[..., argparse.Action]:
    """Add a command with the options that all have; return what adds one more.

    `text` says what the command measures, `metrics` what it is called, `gpu` whether it can run on
    one.
    """
    epilog = f"Metrics for --fail-on: {metrics}. {STATUS}"
    parser = subparsers.add_parser(
        name, allow_abbrev=False, help=text, description=text, epilog=epilog
    )
    parser.set_defaults(prepare=prepare, device="cpu")
    add = parser.add_argument
    if gpu:
        here = "cuda" if torch.cuda.is_available() else "cpu"
        where = "(default: cuda where torch finds a GPU)"
        add("--device", type=_device, choices=("cpu", "cuda"), default=here, help=where)
    add("--seed", type=number(int, 0, 2**32), default=0, help=f"of all that is drawn {DEFAULT}")
    add("--json", type=_writable_file, metavar="FILE", help="write all that was measured to FILE")
    add("--report", type=_writable_file, metavar="FILE", help="write a page to FILE, in HTML")
    add("--baseline", type=baseline.read, metavar="FILE", help="a file that --json wrote before")
    moves = "a metric and how far it may move from the baseline, as in 'speedup:-5%%' or "
    moves += "'step_time:+10%%'; may be given several times"
    bound = baseline.bound
    add("--fail-on", type=bound, action="append", default=[], metavar="BOUND", help=moves)
    add("--check", action="store_true", help="exit with 1 if a target is missed")
    return add
