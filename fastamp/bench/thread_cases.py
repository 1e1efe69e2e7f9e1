"""The races of thread workers: items that wait, the first batch, and the choice of "auto"."""

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from timeit import timeit
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import fastamp
from fastamp.bench.race import Plan
from fastamp.bench.record import Case

WORKERS = 8
WAITING = 1024  # items
EPOCH_S = 30.0  # of a pass that "auto" is measured in
PROBE_S = 3.0  # at least, of the pass that measures a fixed choice
EPOCHS = Plan(rounds=6, warmup=0)  # of half a minute each: no warm-up is needed


class Items(Dataset[Any]):
    """Items of a function."""

    def __init__(self, make: Callable[[int], Any], length: int) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def wait(index: int) -> torch.Tensor:
    """Wait for a millisecond, as for a file or a socket."""
    time.sleep(1e-3)
    return torch.full((16,), index)


def compute_in_python(index: int) -> int:
    """Hold the GIL for a millisecond or two."""
    total = 0
    for number in range(20_000):
        total += number * index
    return total


def compute_in_torch(index: int) -> torch.Tensor:
    """Multiply matrices, outside of the GIL."""
    matrix = torch.full((256, 256), float(index))
    return (matrix @ matrix)[0]


def copy_memory(index: int) -> np.ndarray[Any, Any]:
    """Make a large array."""
    return np.full((3, 224, 224), index, np.float32)


def give(index: int) -> int:
    """Do next to nothing."""
    return index


KINDS = {
    "auto-python": compute_in_python,
    "auto-waits": wait,
    "auto-torch": compute_in_torch,
    "auto-copies": copy_memory,
    "auto-nothing": give,
}


class TorchLoader(DataLoader[Any]):
    """torch's loader, without its warning of more workers than cores."""

    def check_worker_number_rationality(self) -> None:
        """Skip the warning."""


def make_waits(_args: argparse.Namespace) -> Case:
    """Items that wait 1 ms, batches of 8: torch without workers and with 8, and 8 threads."""
    items = Items(wait, WAITING)
    loaders: dict[str, Any] = {
        "torch": TorchLoader(items, 8),
        "torch, 8 workers": TorchLoader(items, 8, num_workers=WORKERS),
        "fastamp, 8 threads": fastamp.DataLoader(items, 8, num_workers=WORKERS, worker="thread"),
    }
    expected = list(islice(loaders["torch"], 3))
    for loader in loaders.values():
        torch.testing.assert_close(list(islice(loader, 3)), expected, rtol=0, atol=0)
    arms = {name: partial(deque[Any], loader, 0) for name, loader in loaders.items()}
    return Case(arms=arms, amounts={"batches/s": WAITING // 8})


def make_first(_args: argparse.Namespace) -> Case:
    """The first batch of a pass, its start included: 8 workers of torch's, and 8 threads."""
    items = Items(give, 4096)
    loaders: dict[str, Any] = {
        "torch, 8 workers": TorchLoader(items, 8, num_workers=WORKERS),
        "fastamp, 8 threads": fastamp.DataLoader(items, 8, num_workers=WORKERS, worker="thread"),
    }
    kept: list[Iterator[Any]] = []  # whose end is not measured

    def begin(loader: Any) -> None:
        kept.append(iter(loader))
        next(kept[0])

    arms = {name: partial(begin, loader) for name, loader in loaders.items()}
    return Case(arms=arms, before=lambda _: kept.clear())


def make_auto(kind: str, _args: argparse.Namespace) -> Case:
    """A pass of half a minute, by the better fixed choice of two workers and by "auto"."""

    def run(worker: str, length: int) -> None:
        items = Items(KINDS[kind], length)
        deque(fastamp.DataLoader[Any](items, 32, num_workers=2, worker=worker), 0)

    rates = {worker: _find_rate(partial(run, worker)) for worker in ("thread", "process")}
    best = max(rates, key=rates.__getitem__)
    length = int(rates[best] * EPOCH_S)
    arms = {worker: partial(run, worker, length) for worker in (best, "auto")}
    return Case(arms=arms, plan=EPOCHS)


def _find_rate(run: Callable[[int], None]) -> float:
    """Return the items a second of a pass of PROBE_S or more."""
    length, elapsed_s = 256, 0.0
    while elapsed_s < PROBE_S:
        length *= 4
        elapsed_s = timeit(partial(run, length), number=1)
    return length / elapsed_s


MAKE: dict[str, Callable[[argparse.Namespace], Case]] = {
    "waits": make_waits,
    "first": make_first,
    **{kind: partial(make_auto, kind) for kind in KINDS},
}
DOCS = {"waits": make_waits.__doc__, "first": make_first.__doc__} | {
    kind: f"{make_auto.__doc__} {make.__doc__}" for kind, make in KINDS.items()
}
