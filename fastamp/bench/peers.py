"""Alternatives to torch's AdamW: the compiled step, and DeepSpeed's where installed."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from subprocess import SubprocessError
from typing import Any, TypeAlias

import torch
from torch.optim import AdamW, Optimizer

Groups: TypeAlias = list[dict[str, Any]]

MOST_COMPILED = 200  # tensors: each takes about a second to compile on two cores
NOTE = (
    "torch.compile: the same sequence with a compiled optimizer.step, not timed while it compiles; "
    f"over {MOST_COMPILED} tensors take minutes. DeepSpeedCPUAdam: pip install deepspeed, with g++ "
    "and ninja. bitsandbytes and apex need a GPU, and are not raced"
)
# What a peer raises if it does not run here, or, as AssertionError, if its result is wrong.
ERRORS = (ImportError, AttributeError, AssertionError, RuntimeError, OSError, SubprocessError)


def _compiled(groups: Groups, lr: float) -> Optimizer:
    if sum(len(group["params"]) for group in groups) > MOST_COMPILED:
        msg = f"over {MOST_COMPILED} tensors"
        raise RuntimeError(msg)
    torch.compiler.reset()  # torch keeps only a few compilations of one function
    optimizer = AdamW(groups, lr=lr)
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    return optimizer


def _deepspeed(groups: Groups, lr: float) -> Optimizer:
    if importlib.util.find_spec("deepspeed") is None:
        msg = "not installed"
        raise RuntimeError(msg)
    with redirect_stdout(sys.stderr):  # it logs to stdout
        adam = importlib.import_module("deepspeed.ops.adam")
        optimizer: Optimizer = adam.DeepSpeedCPUAdam(groups, lr=lr, weight_decay=0.01)
    return optimizer


PEERS: dict[str, Callable[..., Optimizer]] = {
    "torch.compile": _compiled,
    "DeepSpeedCPUAdam": _deepspeed,
}


def why(error: BaseException) -> str:
    """Return in a few words why a peer is not raced."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0][:60]
