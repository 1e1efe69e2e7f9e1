"""fastamp's loader against torch's, the bare gather and the peers that are installed.

python benchmarks/loader.py [--device cuda] [--rounds N] [--json FILE]

Every arm of a row is an endless run over the same data, a share of a second at a time, in random
order; workers are started before. `direct` is `index_select(out=)`, or `numpy.take(out=)` and the
cast, on indices that are already there. Bytes are those of the batches. On a GPU torch's loader
pins and its batches are moved with `non_blocking=True`; there is no direct arm and there are no
peers.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import LIMIT_NBYTES, interleaved, make_plain_read
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

import fastamp

ROUND_S = 0.12  # of one arm
WARM_UP = 12  # batches, more than all workers make ahead
CHECKED = 3
GETITEM_S = 1e-3

# An epoch at every call of `iter`; the argument says whether it is shuffled.
Make = Callable[[bool], Iterable[Any]]


@dataclass(frozen=True)
class Case:
    """One row: what is loaded, and by whom."""

    name: str
    dataset: Any
    batch_size: int
    arms: dict[str, Make]


@dataclass(frozen=True)
class Row:
    """One comparison: batches per second of each arm, and their quartiles."""

    case: str
    batch_nbytes: int
    batches_s: dict[str, float]
    quartiles: dict[str, tuple[float, float]]

    def best(self, prefix: str) -> float | None:
        """Return the best rate of the arms whose names begin so."""
        return max(
            (r for name, r in self.batches_s.items() if name.startswith(prefix)), default=None
        )


class Slow(Dataset[torch.Tensor]):
    """Items that take a millisecond each."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(GETITEM_S)
        return torch.full((16,), index)


class Moved:
    """A loader whose batches are moved to a device without waiting."""

    def __init__(self, loader: Iterable[Any], device: torch.device) -> None:
        self._loader = loader
        self._device = device

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield tree_map(lambda tensor: tensor.to(self._device, non_blocking=True), batch)


def ours(dataset: Any, batch_size: int, device: torch.device, num_workers: int = 0) -> Make:
    """Return fastamp's loader as an arm."""
    return lambda shuffle: fastamp.DataLoader(
        dataset,
        batch_size,
        shuffle,
        drop_last=True,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        generator=torch.Generator().manual_seed(0),
        device=device if device.type == "cuda" else None,
    )


def stock(dataset: Any, batch_size: int, device: torch.device, num_workers: int) -> Make:
    """Return torch's loader as an arm."""

    def make(shuffle: bool) -> Iterable[Any]:  # noqa: FBT001 - as Make
        loader: Iterable[Any] = DataLoader(
            dataset,
            batch_size,
            shuffle,
            drop_last=True,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            generator=torch.Generator().manual_seed(0),
            pin_memory=device.type == "cuda",
        )
        return Moved(loader, device) if device.type == "cuda" else loader

    return make


class Direct:
    """A gather into the same memory at every batch."""

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        gather: Callable[[torch.Tensor], Any],
        shuffle: bool,  # noqa: FBT001 - as Make
    ) -> None:
        self._num_rows, self._batch_size = num_rows, batch_size
        self._gather = gather
        self._order = torch.randperm if shuffle else torch.arange

    def __iter__(self) -> Iterator[Any]:
        used = self._num_rows // self._batch_size * self._batch_size
        return map(self._gather, self._order(self._num_rows)[:used].split(self._batch_size))


def select_into(tensors: tuple[torch.Tensor, ...], batch_size: int) -> Callable[..., Any]:
    """Return `index_select(out=)` of all tensors."""
    outputs = [torch.empty(batch_size, *t.shape[1:], dtype=t.dtype) for t in tensors]

    def gather(rows: torch.Tensor) -> Any:
        for tensor, output in zip(tensors, outputs, strict=True):
            torch.index_select(tensor, 0, rows, out=output)
        return outputs

    return gather


def take_into(dataset: fastamp.TokenDataset, batch_size: int) -> Callable[..., Any]:
    """Return `numpy.take(out=)` of x and y, and their cast to int64."""
    shape = (batch_size, dataset.block_size)
    narrow = np.empty(shape, dataset.x.dtype)
    outputs = [torch.empty(shape, dtype=torch.int64) for _ in range(2)]

    def gather(rows: torch.Tensor) -> Any:
        for part, output in zip((dataset.x, dataset.y), outputs, strict=True):
            # Without clip, take does not write into `out` as it goes.
            np.take(part, rows.numpy(), axis=0, out=narrow, mode="clip")
            output.copy_(torch.from_numpy(narrow))
        return outputs

    return gather


class Fetched(Iterable[Any]):
    """What the peers have in common: batches of indices, and a function that makes a batch."""

    def __init__(self, dataset: Any, batch_size: int, shuffle: bool) -> None:  # noqa: FBT001
        sampler = (RandomSampler if shuffle else SequentialSampler)(dataset)
        self.indices = BatchSampler(sampler, batch_size, drop_last=True)
        self.dataset = dataset

    def fetch(self, indices: list[int]) -> Any:
        """Return the batch of the items at the indices."""
        return default_collate([self.dataset[i] for i in indices])


class TorchDataNodes(Fetched):
    """torchdata's nodes, with two threads."""

    def __iter__(self) -> Iterator[Any]:
        from torchdata import nodes  # noqa: PLC0415 - optional

        source = nodes.SamplerWrapper(self.indices)
        return iter(nodes.Loader(nodes.ParallelMapper(source, self.fetch, 2, method="thread")))


class Spdl(Fetched):
    """SPDL's pipeline, with two threads."""

    def __iter__(self) -> Iterator[Any]:
        from spdl.pipeline import PipelineBuilder  # noqa: PLC0415 - optional

        builder = PipelineBuilder().add_source(self.indices)
        builder.pipe(self.fetch, concurrency=2, output_order="input")
        pipeline = builder.add_sink(4).build(num_threads=2)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator()


class Grain(Fetched):
    """Grain's dataset, with two threads."""

    def __iter__(self) -> Iterator[Any]:
        import grain  # noqa: PLC0415 - optional

        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
        data = grain.MapDataset.source(list(self.indices)).map(self.fetch)
        return iter(data.to_iter_dataset(options))


PEERS = {"torchdata": TorchDataNodes, "spdl": Spdl, "grain": Grain}


def make_case(
    name: str,
    dataset: Any,
    batch_size: int,
    device: torch.device,
    gather: Callable[[torch.Tensor], Any] | None = None,
    *,
    peers: bool = False,
) -> Case:
    """Return a case with fastamp's loader, torch's with 0 and 2 workers, and the others asked."""
    arms = {"fastamp": ours(dataset, batch_size, device)}
    for num_workers in (0, 2):
        arms[f"torch, {num_workers} workers"] = stock(dataset, batch_size, device, num_workers)
    if device.type == "cpu":
        if gather is not None:
            arms["direct"] = partial(Direct, len(dataset), batch_size, gather)
        for peer, make in PEERS.items() if peers else ():
            if importlib.util.find_spec(peer):
                arms[peer] = partial(make, dataset, batch_size)
    return Case(name, dataset, batch_size, arms)


def make_cases(device: torch.device) -> Iterator[Case]:
    """Make the data of one case after the other."""
    random = torch.Generator().manual_seed(0)
    digits = TensorDataset(torch.rand(60_000, 784, generator=random), torch.arange(60_000) % 10)
    select = select_into(digits.tensors, 256)
    yield make_case("60,000 x 784 float32 at 256", digits, 256, device, select, peers=True)
    array = np.random.default_rng(0).integers(0, 50257, 20_000_000, np.uint16)
    tokens = fastamp.TokenDataset(array, 256)
    yield make_case(
        "257 tokens uint16 at 64", tokens, 64, device, take_into(tokens, 64), peers=True
    )
    pixels = torch.randint(0, 256, (512, 3, 224, 224), dtype=torch.uint8, generator=random)
    images = TensorDataset(pixels, torch.arange(512))
    select = select_into(images.tensors, 64)
    yield make_case("3x224x224 uint8 at 64", images, 64, device, select)
    keys = ("input_ids", "mask", "position", "weight", "label")
    dicts = [{key: torch.full((16,), float(i)) for key in keys} for i in range(2560)]
    yield make_case("dicts of 5 tensors at 256", dicts, 256, device)
    for num_workers in (0, 2):
        arms = {
            "fastamp": ours(Slow(), 8, device, num_workers),
            f"torch, {num_workers} workers": stock(Slow(), 8, device, num_workers),
        }
        yield Case(f"1 ms getitem at 8, {num_workers} workers", Slow(), 8, arms)


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of one epoch after the other."""
    while True:
        yield from loader


def check(case: Case) -> int:
    """Compare the batches of every arm with default_collate's; return the bytes of one."""
    size = case.batch_size
    starts = range(0, CHECKED * size, size)
    expected = [default_collate([case.dataset[i] for i in range(s, s + size)]) for s in starts]
    for name, make in case.arms.items():
        for reference, batch in zip(expected, make(False), strict=False):
            assert_equal(name, batch, reference)
    # Shuffled too, with the same generator.
    shuffled = [
        list(itertools.islice(make(True), CHECKED))
        for name, make in case.arms.items()
        if name.startswith(("fastamp", "torch,"))
    ]
    for other in shuffled[1:]:
        assert_equal(case.name, other, shuffled[0])
    return sum(tensor.nbytes for tensor in tree_leaves(expected[0]))


def assert_equal(name: str, batch: Any, reference: Any) -> None:
    """Compare all tensors of two batches."""
    for mine, theirs in zip(tree_leaves(batch), tree_leaves(reference), strict=True):
        if not torch.equal(mine.cpu(), theirs.cpu()):
            msg = f"{name}: its batch is not default_collate's"
            raise AssertionError(msg)


def measure(
    name: str,
    batch_nbytes: int,
    sources: dict[str, Iterator[Any]],
    device: torch.device,
    rounds: int,
) -> Row:
    """Measure endless iterators against each other."""
    counts = {arm: count_batches(source) for arm, source in sources.items()}
    arms = {arm: make_round(source, counts[arm]) for arm, source in sources.items()}
    timings = interleaved(arms, device, rounds=rounds)
    rates = {arm: counts[arm] / timing.median_s for arm, timing in timings.items()}
    quartiles = {
        arm: (counts[arm] / timing.high_s, counts[arm] / timing.low_s)
        for arm, timing in timings.items()
    }
    return Row(name, batch_nbytes, rates, quartiles)


def count_batches(source: Iterator[Any]) -> int:
    """Return how many batches make a round, after the start of workers and threads."""
    make_round(source, WARM_UP)()
    start_s, count = time.perf_counter(), 0
    while (elapsed_s := time.perf_counter() - start_s) < ROUND_S / 2:
        next(source)
        count += 1
    return max(2, round(count * ROUND_S / elapsed_s))


def make_round(source: Iterator[Any], count: int) -> Callable[[], object]:
    """Return a call that consumes batches, and keeps none."""

    def consume() -> None:
        for _ in itertools.islice(source, count):
            pass

    return consume


def compare(case: Case, device: torch.device, rounds: int) -> Row:
    """Measure the loaders of one case."""
    nbytes = check(case)
    sources = {name: endless(make(True)) for name, make in case.arms.items()}
    return measure(case.name, nbytes, sources, device, rounds)


def compare_collate(case: Case, rounds: int) -> Row:
    """Measure the collate functions alone."""
    samples = [case.dataset[i] for i in range(case.batch_size)]
    collate = fastamp.BatchCollator()
    expected = default_collate(samples)
    assert_equal("BatchCollator", collate(samples), expected)

    def repeat(function: Callable[[Any], Any]) -> Iterator[Any]:
        while True:
            yield function(samples)

    sources = {"fastamp": repeat(collate), "torch, collate": repeat(default_collate)}
    nbytes = sum(tensor.nbytes for tensor in tree_leaves(expected))
    cpu = torch.device("cpu")
    return measure(f"{case.name}, collate only", nbytes, sources, cpu, rounds)


def compare_training(case: Case, device: torch.device, rounds: int) -> tuple[Row, str]:
    """Measure training steps of a small network, and return the loader's verdict on them."""
    loader: Any = case.arms["fastamp"](True)
    batch = next(iter(case.arms["torch, 0 workers"](True)))
    sources = {
        "fastamp": train(endless(loader), device),
        **{
            name: train(endless(make(True)), device)
            for name, make in case.arms.items()
            if name.startswith("torch,")
        },
        "no loading": train(itertools.repeat(batch), device),
    }
    nbytes = sum(tensor.nbytes for tensor in batch)
    row = measure(f"training on {case.name}", nbytes, sources, device, rounds)
    return row, str(loader.stats())


def train(batches: Iterator[Any], device: torch.device) -> Iterator[None]:
    """Yield after every step."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(784, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for x, y in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        yield


def show(rows: list[Row], byte_s: float) -> None:
    """Print one line for each comparison."""
    print("| case | fastamp | torch's better | ratio | direct | of direct | GB/s | others |")
    print("|---|--:|--:|--:|--:|--:|--:|---|")
    for row in rows:
        mine, theirs, bare = row.best("fastamp"), row.best("torch,"), row.best("direct")
        assert mine is not None  # noqa: S101
        assert theirs is not None  # noqa: S101
        others = "; ".join(
            f"{name} {rate:,.0f}" for name, rate in row.batches_s.items() if name != "fastamp"
        )
        direct_columns = " | " if bare is None else f"{bare:,.0f}/s | {mine / bare:.2f}"
        print(
            f"| {row.case} | {mine:,.0f}/s | {theirs:,.0f}/s | {mine / theirs:.2f}x"
            f" | {direct_columns} | {mine * row.batch_nbytes / 1e9:.1f} | {others} |"
        )
    print(f"A plain read of memory: {1e-9 / byte_s:.1f} GB/s.")


def main() -> None:
    """Measure every case and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    limit = interleaved({"plain": make_plain_read(device)}, device, rounds=args.rounds)
    byte_s = limit["plain"].median_s / LIMIT_NBYTES
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {fastamp.backends()}")
    for peer in PEERS:
        if not importlib.util.find_spec(peer):
            print(f"{peer} is not installed: left out")
    rows, verdict = [], ""
    for case in make_cases(device):
        rows.append(compare(case, device, args.rounds))
        if "float32" in case.name:
            row, verdict = compare_training(case, device, args.rounds)
            rows.append(row)
        if "dicts" in case.name:
            rows.append(compare_collate(case, args.rounds))
    show(rows, byte_s)
    print(f"fastamp's loader on the training: {verdict}")
    if args.json:
        result = {"byte_s": byte_s, "verdict": verdict, "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
