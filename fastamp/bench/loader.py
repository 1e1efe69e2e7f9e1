"""The loader alone: torch's DataLoader against fastamp's, over the rows of tensors and over dicts.

Takes a few minutes on two CPU cores.
"""

import argparse
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, TensorDataset, default_collate

from fastamp.bench.comparison import PLAIN, run_cases
from fastamp.bench.race import Case, Plan
from fastamp.bench.record import Task
from fastamp.bench.tasks import with_fastamp

Batches: TypeAlias = Callable[[], Iterator[Any]]  # each call begins a pass

CHECKED = 3  # batches of each arm
PLAN = Plan(build_s=2.0, limit_s=45.0)
KEYS = ("input_ids", "mask", "position", "weight", "label")

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
}


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and the function that runs it."""
    notes = [f"{name}: {text}" for name, (text, *_) in DATA.items()]
    notes += ["a visit is a shuffled pass; plain is index_select(out=), no limit"]
    cases = {name: partial(_make_case, args, name) for name in DATA}
    return {"data": [*DATA], "seed": args.seed}, lambda: run_cases(args, PLAN, cases, notes)


def make_plain(dataset: TensorDataset, size: int) -> Batches:
    """Return a function that begins a shuffled pass that gathers into the same memory."""
    length = len(dataset) // size * size
    buffers = [torch.empty(size, *t.shape[1:], dtype=t.dtype) for t in dataset.tensors]

    def gather(rows: torch.Tensor) -> list[torch.Tensor]:
        for source, buffer in zip(dataset.tensors, buffers, strict=True):
            torch.index_select(source, 0, rows, out=buffer)
        return buffers

    return lambda: map(gather, torch.split(torch.randperm(len(dataset))[:length], size))


def make_arms(dataset: Any, size: int, device: str, seed: int) -> dict[str, Batches]:
    """Return what begins a shuffled pass, by arm."""

    def load(workers: int, *, is_ours: bool) -> Batches:
        options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
        options |= {"generator": torch.Generator().manual_seed(seed), "shuffle": True}
        loader = DataLoader(dataset, size, drop_last=True, pin_memory=device == "cuda", **options)
        if is_ours:
            return with_fastamp(loader, device).__iter__
        if device == "cpu":
            return loader.__iter__
        move = partial(torch.Tensor.to, device=device, non_blocking=True)
        return lambda: (tree_map(move, batch) for batch in loader)

    arms = {"torch": load(0, is_ours=False), "torch, 2 workers": load(2, is_ours=False)}
    if not isinstance(dataset, TensorDataset):
        arms["fastamp, 2 workers"] = load(2, is_ours=True)
    elif device == "cpu":
        arms[PLAIN] = make_plain(dataset, size)
    return arms | {"fastamp": load(0, is_ours=True)}


def _make_case(args: argparse.Namespace, name: str) -> Case:
    """Make the data, check every arm's batches, and return their race."""
    torch.manual_seed(args.seed)
    _, size, make = DATA[name]
    dataset = make()
    arms = make_arms(dataset, size, args.device, args.seed)
    nbytes = max(check(batches, dataset) for batches in arms.values())
    batches = len(dataset) // size
    visits = {arm: partial(_drain, source) for arm, source in arms.items()}
    return Case(arms=visits, amounts={"batches/s": batches, "GB/s": batches * nbytes / 1e9})


def _drain(batches: Batches) -> None:
    deque(batches(), maxlen=0)  # which keeps none


def check(batches: Batches, dataset: Any) -> int:
    """Compare the first batches with the samples whose numbers they hold; return a batch's bytes.

    Raises:
        AssertionError: they differ, or are too few, or a sample comes twice.
    """
    rows, chosen, leaves = list[int](), list[int](), list[torch.Tensor]()
    for batch in islice(batches(), CHECKED):
        leaves = tree_leaves(batch)
        chosen = leaves[-1].reshape(len(leaves[-1]), -1)[:, 0].long().tolist()
        expected = tree_leaves(default_collate([dataset[row] for row in chosen]))
        torch.testing.assert_close(leaves, expected, rtol=0, atol=0, check_device=False)
        rows += chosen
    assert len({*rows}) == len(rows) == CHECKED * len(chosen) > 0, "batches are missing"  # noqa: S101
    return sum(leaf.nbytes for leaf in leaves)
