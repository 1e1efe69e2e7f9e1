"""The loader alone: torch's DataLoader against fastamp's, over datasets of several kinds.

Takes a few minutes on two CPU cores.
"""

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import fastamp
from fastamp.bench.race import Case, Plan
from fastamp.bench.record import PLAIN, Report, Task, run_cases

Batches: TypeAlias = Callable[[], Iterator[Any]]  # each call begins a pass

CHECKED = 3  # batches of each arm
PLAN = Plan(build_s=2.0, limit_s=45.0)


class Data(NamedTuple):
    """A dataset, its batch size, and the tensors that it is made of, if any."""

    dataset: Any
    batch_size: int
    tensors: Sequence[torch.Tensor] = ()


def _make_tensors(generator: torch.Generator) -> Data:
    """A TensorDataset of 60,000 x 784 float32, batches of 256."""
    rows, labels = torch.rand(60_000, 784, generator=generator), torch.arange(60_000)
    return Data(TensorDataset(rows, labels), 256, [rows, labels])


def _make_dicts(_generator: torch.Generator) -> Data:
    """Dicts of 5 tensors, batches of 256."""
    keys = ("input_ids", "mask", "position", "weight", "label")
    return Data([{key: torch.full((16,), float(i)) for key in keys} for i in range(2560)], 256)


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


def _make_slow(_generator: torch.Generator) -> Data:
    """Items that take 1 ms, batches of 8."""
    return Data(Items(wait, 128), 8)


DATA = {
    "tensors": _make_tensors,
    "dicts": _make_dicts,
    "slow": _make_slow,
}
METRICS = "speedup/ or of_plain/ and the data, as in speedup/tensors"


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this command alone."""
    data = " ".join(f"{name}: {_text(name)}" for name in DATA)
    data += " Several may be given (default: all)"
    add("--data", nargs="+", choices=DATA, default=[*DATA], metavar="NAME", help=data)


def _text(name: str) -> str:
    return " ".join(str(DATA[name].__doc__).split())


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and the function that runs it."""
    args.data = list(dict.fromkeys(args.data))
    return {"data": args.data, "seed": args.seed}, partial(_run, args)


def _run(args: argparse.Namespace) -> Report:
    notes = [f"{name}: {_text(name)}" for name in args.data]
    notes += ["a visit is a shuffled pass; plain is index_select(out=), no limit"]
    return run_cases(args, PLAN, args.data, partial(_make_case, args), notes)


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


def plain_batches(data: Data, *, shuffle: bool) -> Batches:
    """Return a function that begins a pass that gathers every batch into the same memory."""
    size, length = data.batch_size, len(data.dataset)
    order = torch.randperm if shuffle else torch.arange
    buffers = [torch.empty(size, *t.shape[1:], dtype=t.dtype) for t in data.tensors]

    def gather(rows: torch.Tensor) -> list[torch.Tensor]:
        for source, buffer in zip(data.tensors, buffers, strict=True):
            torch.index_select(source, 0, rows, out=buffer)
        return buffers

    return lambda: map(gather, torch.split(order(length)[: length // size * size], size))


def _make_arms(data: Data, args: argparse.Namespace, *, shuffle: bool) -> dict[str, Batches]:
    def load(make: Callable[..., Batches], num_workers: int) -> Batches:
        return make(
            data.dataset,
            data.batch_size,
            args.device,
            shuffle=shuffle,
            drop_last=True,
            num_workers=num_workers,
            persistent_workers=shuffle and num_workers > 0,
            generator=torch.Generator().manual_seed(args.seed),
        )

    arms = {"torch": load(torch_batches, 0), "torch, 2 workers": load(torch_batches, 2)}
    if not data.tensors:
        arms["fastamp, 2 workers"] = load(fastamp_batches, 2)
    elif args.device == "cpu":
        arms[PLAIN] = plain_batches(data, shuffle=shuffle)
    return arms | {"fastamp": load(fastamp_batches, 0)}


def _make_case(args: argparse.Namespace, name: str) -> Case:
    """Make the data, compare every arm's batches with default_collate's, and return their race."""
    data = DATA[name](torch.Generator().manual_seed(args.seed))
    size = data.batch_size
    samples = [[data.dataset[i] for i in range(n * size, (n + 1) * size)] for n in range(CHECKED)]
    expected = list(map(default_collate, samples))
    for arm in _make_arms(data, args, shuffle=False).values():
        check(arm, expected)
    sources = _make_arms(data, args, shuffle=True)
    expected = list(islice(sources["torch"](), CHECKED))
    check(sources["fastamp"], expected)
    batches = len(data.dataset) // size
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
