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
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import LIMIT_NBYTES, interleaved, make_plain_read
from peers import INSTALLED, PEERS, PeerLoader
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import fastamp

ROUND_S = 0.12  # of one arm
WARM_UP = 12  # batches, more than all workers make ahead
CHECKED = 3
GETITEM_S = 1e-3

# An epoch at every call of `iter`; the argument says whether it is shuffled.
Make = Callable[[bool], Iterable[Any]]
Gather = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Case:
    """One row: what is loaded, and by whom."""

    name: str
    dataset: Any
    batch_size: int
    arms: dict[str, Make]


@dataclass(frozen=True)
class Row:
    """One comparison: batches per second of each arm, as median and quartiles."""

    case: str
    batch_nbytes: int
    batches_s: dict[str, dict[str, float]]

    def best(self, prefix: str) -> float:
        """Return the best rate of the arms whose names begin so, 0 where there is none."""
        rates = (r["median"] for name, r in self.batches_s.items() if name.startswith(prefix))
        return max(rates, default=0.0)


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


def loader_of(
    cls: type[DataLoader[Any]], case: tuple[Any, int], device: torch.device, num_workers: int = 0
) -> Make:
    """Return torch's loader of a dataset and a batch size, or fastamp's, as an arm."""
    on_gpu = device.type == "cuda"
    is_ours = cls is fastamp.DataLoader
    own = {"device": device if on_gpu else None} if is_ours else {"pin_memory": on_gpu}

    def make(shuffle: bool) -> Iterable[Any]:  # noqa: FBT001 - as Make
        loader = cls(
            *case,
            shuffle,
            drop_last=True,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            generator=torch.Generator().manual_seed(0),
            **own,
        )
        return Moved(loader, device) if on_gpu and not is_ours else loader

    return make


class Direct:
    """A gather into the same memory at every batch."""

    def __init__(self, num_rows: int, batch_size: int, gather: Gather, shuffle: bool) -> None:  # noqa: FBT001 - as Make
        self._num_used, self._batch_size = num_rows // batch_size * batch_size, batch_size
        self._make_order = partial(torch.randperm if shuffle else torch.arange, num_rows)
        self._gather = gather

    def __iter__(self) -> Iterator[Any]:
        return map(self._gather, self._make_order()[: self._num_used].split(self._batch_size))


def select_into(tensors: tuple[torch.Tensor, ...], batch_size: int) -> Gather:
    """Return `index_select(out=)` of all tensors."""
    outputs = [torch.empty(batch_size, *t.shape[1:], dtype=t.dtype) for t in tensors]

    def gather(rows: torch.Tensor) -> Any:
        for tensor, output in zip(tensors, outputs, strict=True):
            torch.index_select(tensor, 0, rows, out=output)
        return outputs

    return gather


def take_into(dataset: fastamp.TokenDataset, batch_size: int) -> Gather:
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


def make_case(
    name: str,
    dataset: Any,
    batch_size: int,
    device: torch.device,
    gather: Gather | None = None,
    *,
    peers: bool = False,
) -> Case:
    """Return a case with fastamp's loader, torch's with 0 and 2 workers, and the others asked."""
    what = (dataset, batch_size)
    arms = {"fastamp": loader_of(fastamp.DataLoader, what, device)}
    for num_workers in (0, 2):
        arms[f"torch, {num_workers} workers"] = loader_of(DataLoader, what, device, num_workers)
    if device.type == "cpu":
        if gather is not None:
            arms["direct"] = partial(Direct, len(dataset), batch_size, gather)
        if peers:
            arms |= {peer: partial(PeerLoader, peer, *what) for peer in INSTALLED}
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
            "fastamp": loader_of(fastamp.DataLoader, (Slow(), 8), device, num_workers),
            f"torch, {num_workers} workers": loader_of(
                DataLoader, (Slow(), 8), device, num_workers
            ),
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
    rates = {}
    for arm, timing in timings.items():
        ends = {"median": timing.median_s, "low": timing.high_s, "high": timing.low_s}
        rates[arm] = {end: counts[arm] / time_s for end, time_s in ends.items()}
    return Row(name, batch_nbytes, rates)


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
    return lambda: deque(itertools.islice(source, count), maxlen=0)


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
    functions = {"fastamp": collate, "torch, collate": default_collate}
    sources = {arm: map(call, itertools.repeat(samples)) for arm, call in functions.items()}
    nbytes = sum(tensor.nbytes for tensor in tree_leaves(expected))
    cpu = torch.device("cpu")
    return measure(f"{case.name}, collate only", nbytes, sources, cpu, rounds)


def compare_training(case: Case, device: torch.device, rounds: int) -> tuple[Row, str]:
    """Measure training steps of a small network, and return the loader's verdict on them."""
    loader: Any = case.arms["fastamp"](True)
    batch = next(iter(case.arms["torch, 0 workers"](True)))
    batches = {name: endless(case.arms[name](True)) for name in case.arms if "torch, " in name}
    batches |= {"fastamp": endless(loader), "no loading": itertools.repeat(batch)}
    sources = {name: train(source, device) for name, source in batches.items()}
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
        others = "; ".join(
            f"{name} {r['median']:,.0f}" for name, r in row.batches_s.items() if name != "fastamp"
        )
        direct_columns = f"{bare:,.0f}/s | {mine / bare:.2f}" if bare else " | "
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
        if peer not in INSTALLED:
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
