"""The races of thread workers: items that wait, and the first batch."""

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import fastamp
from fastamp.bench.record import Case

WORKERS = 8
WAITING = 1024  # items


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


def give(index: int) -> int:
    """Do next to nothing."""
    return index


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


MAKE: dict[str, Callable[[argparse.Namespace], Case]] = {
    "waits": make_waits,
    "first": make_first,
}
DOCS = {"waits": make_waits.__doc__, "first": make_first.__doc__}
