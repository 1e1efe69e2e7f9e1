"""The loader alone: torch's DataLoader against fastamp's, over datasets of several kinds.

Takes a few minutes on two CPU cores.
"""

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import fastamp
from fastamp.bench import crops
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
    by_torch: Any = None  # the dataset that torch's loader reads in its place


def _make_tensors(generator: torch.Generator) -> Data:
    """A TensorDataset of 60,000 x 784 float32, batches of 256."""
    rows, labels = torch.rand(60_000, 784, generator=generator), torch.arange(60_000)
    return Data(TensorDataset(rows, labels), 256, [rows, labels])


def _make_columns(generator: torch.Generator) -> Data:
    """A table of 50,000 x 100 float32, stored by columns as pandas', batches of 128."""
    rows, labels = torch.rand(100, 50_000, generator=generator).T, torch.arange(50_000)
    return Data(TensorDataset(rows, labels), 128, [rows, labels])


def _make_windows(generator: torch.Generator) -> Data:
    """Windows of 96 values of a series of 50,000 float32, one at each, batches of 128."""
    series = torch.rand(50_000, generator=generator)
    windows = series.unfold(0, 96, 1)
    return Data(TensorDataset(windows), 128, [windows])


def _make_tokens(generator: torch.Generator) -> Data:
    """Windows of 257 uint16 tokens, batches of 64."""
    tokens = torch.randint(2**15, (16_384 * 256 + 1,), dtype=torch.int16, generator=generator)
    windows = [part.view(-1, 256) for part in (tokens[:-1], tokens[1:])]
    return Data(fastamp.TokenDataset(tokens.numpy().view(np.uint16), 256), 64, windows)


def _make_images(generator: torch.Generator) -> Data:
    """Images of 3x224x224 uint8, batches of 64."""
    count = 2048  # a pass over a few batches would mostly measure its start
    pixels = torch.randint(256, (count, 3, 224, 224), dtype=torch.uint8, generator=generator)
    labels = torch.arange(count)
    return Data(TensorDataset(pixels, labels), 64, [pixels, labels])


def _make_augmented(generator: torch.Generator) -> Data:
    """50,000 images of 3x32x32 uint8, padded, cropped, flipped, batches of 256."""
    # 0 fills only margins.
    pixels = torch.randint(1, 256, (50_000, 3, 32, 32), dtype=torch.uint8, generator=generator)
    tensors = [pixels, torch.arange(len(pixels))]
    dataset = fastamp.ArrayDataset(*tensors, augment=crops.make_augmentations())
    return Data(dataset, 256, tensors, crops.Samples(*tensors))


def _make_dicts(_generator: torch.Generator) -> Data:
    """Dicts of 5 tensors, batches of 256."""
    keys = ("input_ids", "mask", "position", "weight", "label")
    return Data([{key: torch.full((16,), float(i)) for key in keys} for i in range(2560)], 256)


def _make_collate(generator: torch.Generator) -> Data:
    """The collate function alone, for such dicts."""
    return _make_dicts(generator)


def _make_table(generator: torch.Generator) -> Data:
    """A Hugging Face dataset of 20,000 rows of 128 int32 tokens and a label, batches of 64."""
    datasets: Any = import_module("datasets")
    tokens = torch.randint(2**15, (20, 1000, 128), dtype=torch.int32, generator=generator)
    parts = [{"input_ids": [*rows.numpy()], "label": range(1000)} for rows in tokens]
    table = datasets.concatenate_datasets([*map(datasets.Dataset.from_dict, parts)])
    return Data(table.with_format("torch"), 64)


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
    "columns": _make_columns,
    "windows": _make_windows,
    "tokens": _make_tokens,
    "images": _make_images,
    "augmented": _make_augmented,
    "dicts": _make_dicts,
    "collate": _make_collate,
    "slow": _make_slow,
}
# A local folder called `datasets` is not Hugging Face's, which is too slow to import here.
_found = find_spec("datasets")
if _found and PathFinder.find_spec("arrow_dataset", _found.submodule_search_locations):
    DATA["table"] = _make_table

METRICS = "speedup/ or of_plain/ and the data, as in speedup/tokens"


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
    if "augmented" in args.data:
        notes += ["augmented: torch augments samples, and plain batches, with torch's operators"]
    if {*args.data} - {"augmented"}:
        notes += ["all others: a visit is a shuffled pass; plain is index_select(out=), no limit"]
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
    # Tokens of 16 bits become int64, as TokenDataset makes them.
    outputs = [buffer.long() if buffer.dtype == torch.int16 else buffer for buffer in buffers]

    def gather(rows: torch.Tensor) -> list[torch.Tensor]:
        for source, buffer, output in zip(data.tensors, buffers, outputs, strict=True):
            torch.index_select(source, 0, rows, out=buffer)
            if output is not buffer:
                output.copy_(buffer)
        return outputs

    def augment(rows: torch.Tensor) -> list[torch.Tensor]:
        images, labels = gather(rows)
        return [crops.augment_batch(images), labels]

    make = gather if data.by_torch is None else augment
    return lambda: map(make, torch.split(order(length)[: length // size * size], size))


def _make_arms(data: Data, args: argparse.Namespace, *, shuffle: bool) -> dict[str, Batches]:
    def load(make: Callable[..., Batches], num_workers: int) -> Batches:
        by_torch = data.by_torch is not None and make is torch_batches
        return make(
            data.by_torch if by_torch else data.dataset,
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
    if name == "collate":
        collates = {"torch": default_collate, "fastamp": fastamp.BatchCollator()}
        sources: dict[str, Batches] = {a: partial(map, c, samples) for a, c in collates.items()}
        batches = CHECKED
        check(sources["fastamp"], expected)
    elif name == "augmented":
        sources = _make_arms(data, args, shuffle=True)
        for arm in sources.values():
            crops.check_augmented(arm(), data.tensors[0])
        batches = len(data.dataset) // size
    else:
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
