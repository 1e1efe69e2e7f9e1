"""The arms of a task: each precision with torch's loader and step and with fastamp's, and others.

Every arm calls a task's function itself, so that no two share a model, a loss or a loader.
"""

import argparse
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fastamp.bench.environment import DTYPES, no_speed_reason
from fastamp.bench.tasks import with_absolute_path

PRECISIONS = ("fp32", *DTYPES)
NAME = r"[A-Za-z0-9_.+-]+"  # what --fail-on can tell from a bound


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train: a task's name, a precision, and whose loader and step."""

    name: str
    task: str  # for `find_make`, so that a fresh process can call it
    precision: str = "fp32"
    is_ours: bool = False  # fastamp's loader and step
    is_own: bool = False  # of --arm


def name_of(precision: str, *, is_ours: bool = False) -> str:
    """Return the name of an arm of the task itself."""
    return f"{'fastamp' if is_ours else 'torch'} {precision}"


def read(text: str) -> tuple[str, str]:
    """Return the name and the task of NAME=FILE.py:make, for argparse."""
    name, _, place = text.partition("=")
    if not re.fullmatch(NAME, name) or not place or name in PRECISIONS:
        message = f"{text!r} is not NAME=FILE.py:make, with a name of its own"
        raise argparse.ArgumentTypeError(message)
    return name, with_absolute_path(place)


def choose_precisions(device: str) -> list[str]:
    """Return FP32, and the lower precisions that this machine has units for."""
    low = DTYPES if device == "cuda" else ("bf16",)
    return ["fp32", *(name for name in low if no_speed_reason(device, name) is None)]


def list_arms(task: str, precisions: list[str], own: list[tuple[str, str]]) -> list[Arm]:
    """Return torch's arm and fastamp's of each precision, and one for each (name, task) of `own`.

    An arm of one's own trains in the last precision with torch's loader and step, as it is written.
    """
    arms = [
        Arm(name=name_of(each, is_ours=is_ours), task=task, precision=each, is_ours=is_ours)
        for each in precisions
        for is_ours in (False, True)
    ]
    last = precisions[-1]
    return arms + [Arm(name=name, task=made, precision=last, is_own=True) for name, made in own]


# What a task may set for the whole process: how it is read, and how it is set.
SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "anomaly": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "matmul": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "cudnn": (
        lambda: torch.backends.cudnn.benchmark,
        partial(setattr, torch.backends.cudnn, "benchmark"),
    ),
}


def read_switches() -> dict[str, Any]:
    """Return what is set for the whole process."""
    return {name: read() for name, (read, _) in SWITCHES.items()}


@contextmanager
def switched(values: dict[str, Any]) -> Iterator[None]:
    """Set an arm's own switches while it runs, keep what it changes, and put all back after it."""
    before = read_switches()
    _write(values)
    try:
        yield
    finally:
        values.update(read_switches())
        _write(before)


def _write(values: dict[str, Any]) -> None:
    for name, (read, write) in SWITCHES.items():
        if read() != values[name]:
            write(values[name])
