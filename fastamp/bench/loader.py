"""The loader alone: torch's DataLoader against fastamp's, over datasets of three kinds.

Takes a few minutes on two CPU cores.
"""

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import fastamp
from fastamp.bench.race import Case, Plan
from fastamp.bench.record import PLAIN, Report, Task, run_cases

Batches: TypeAlias = Callable[[], Iterator[Any]]  # each call begins a pass

CHECKED = 3  # batches of each arm
PLAN = Plan(build_s=2.0, limit_s=45.0)
KEYS = ("input_ids", "mask", "position", "weight", "label")


class Slow(Dataset[torch.Tensor]):
    """Items that take a millisecond, as from a file or a socket."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(1e-3)
        return torch.full((16,), index)


DATA: dict[str, tuple[str, int, Callable[[], Any]]] = {  # the words, the batch size, the dataset
    "tensors": (
        "a TensorDataset of 60,000 x 784 float32, batches of 256",
        256,
        lambda: TensorDataset(torch.rand(60_000, 784), torch.arange(60_000)),
    ),
    "dicts": (
        "dicts of 5 tensors, batches of 256",
        256,
        lambda: [{key: torch.full((16,), float(i)) for key in KEYS} for i in range(2560)],
    ),
    "slow": ("items that take 1 ms, batches of 8", 8, partial(Slow, 128)),
}
METRICS = "speedup/ or of_plain/ and the data, as in speedup/tensors"


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and the function that runs it."""
    return {"data": [*DATA], "seed": args.seed}, partial(_run, args)


def _run(args: argparse.Namespace) -> Report:
    notes = [f"{name}: {text}" for name, (text, *_) in DATA.items()]
    notes += ["a visit is a shuffled pass; plain is index_select(out=), no limit"]
    return run_cases(args, PLAN, [*DATA], partial(_make_case, args), notes)


def torch_batches(dataset: Any, batch_size: int, device: str, **options: Any) -> Batches:
    """Return a function that begins a pass of torch's loader, with asynchronous copies to a GPU."""
    loader = DataLoader(dataset, batch_size, pin_memory=device == "cuda", **options)
    if device == "cpu":
        return lambda: iter(loader)
    move = partial(torch.Tensor.to, device=device, non_blocking=True)
    return lambda: (tree_map(move, batch) for batch in loader)


def fastamp_batches(dataset: Any, batch_size: int, device: str, **options: Any) -> Batches:
    """Return a function that begins a pass of fastamp's loader."""
    return fastamp.DataLoader[Any](dataset, batch_size, device=device, **options).__iter__


def plain_batches(dataset: TensorDataset, size: int, *, shuffle: bool) -> Batches:
    """Return a function that begins a pass that gathers every batch into the same memory."""
    order, length = torch.randperm if shuffle else torch.arange, len(dataset)
    buffers = [torch.empty(size, *t.shape[1:], dtype=t.dtype) for t in dataset.tensors]

    def gather(rows: torch.Tensor) -> list[torch.Tensor]:
        for source, buffer in zip(dataset.tensors, buffers, strict=True):
            torch.index_select(source, 0, rows, out=buffer)
        return buffers

    return lambda: map(gather, torch.split(order(length)[: length // size * size], size))


def make_arms(
    dataset: Any, size: int, device: str, seed: int, *, shuffle: bool
) -> dict[str, Batches]:
    """Return what begins a pass, by arm."""

    def load(make: Callable[..., Batches], num_workers: int) -> Batches:
        return make(
            dataset,
            size,
            device,
            shuffle=shuffle,
            drop_last=True,
            num_workers=num_workers,
            persistent_workers=shuffle and num_workers > 0,
            generator=torch.Generator().manual_seed(seed),
        )

    arms = {"torch": load(torch_batches, 0), "torch, 2 workers": load(torch_batches, 2)}
    if not isinstance(dataset, TensorDataset):
        arms["fastamp, 2 workers"] = load(fastamp_batches, 2)
    elif device == "cpu":
        arms[PLAIN] = plain_batches(dataset, size, shuffle=shuffle)
    return arms | {"fastamp": load(fastamp_batches, 0)}


def _make_case(args: argparse.Namespace, name: str) -> Case:
    """Make the data, compare every arm's batches with default_collate's, and return their race."""
    torch.manual_seed(args.seed)
    _, size, make = DATA[name]
    dataset = make()
    samples = [[dataset[i] for i in range(n * size, (n + 1) * size)] for n in range(CHECKED)]
    expected = list(map(default_collate, samples))
    for arm in make_arms(dataset, size, args.device, args.seed, shuffle=False).values():
        check(arm, expected)
    sources = make_arms(dataset, size, args.device, args.seed, shuffle=True)
    expected = list(islice(sources["torch"](), CHECKED))
    check(sources["fastamp"], expected)
    batches = len(dataset) // size
    nbytes = batches * sum(tensor.nbytes for tensor in tree_leaves(expected[0]))
    arms = {arm: partial(_drain, source) for arm, source in sources.items()}
    return Case(arms=arms, amounts={"batches/s": batches, "GB/s": nbytes / 1e9})


def _drain(batches: Batches) -> None:
    deque(batches(), maxlen=0)  # which keeps none


def check(batches: Batches, expected: list[Any]) -> None:
    """Compare the first batches of a pass.

    Raises:
        AssertionError: they differ, or are too few.
    """
    found = batches()
    for reference in expected:
        pair = (tree_leaves(next(found, ())), tree_leaves(reference))
        torch.testing.assert_close(*pair, rtol=0, atol=0, check_device=False)
