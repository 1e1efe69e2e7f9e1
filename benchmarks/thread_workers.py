"""Thread workers against torch's processes: items that wait, the first batch, and photographs.

`python benchmarks/thread_workers.py waits first photos`:
waits: items that wait 1 ms, batches of 8; torch without workers and with 8, and 8 threads;
first: the first batch of a pass, its start included; 8 workers of torch's, and 8 threads;
photos: 2,000 JPEGs of 500x375 to 3x224x224, batches of 64: torch with Pillow, in as many processes
as are fastest; plain, the same dataset in fastamp's threads; ImageFolder; and SPDL where it is
installed (pip install spdl; FFmpeg's libraries).
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import shutil
import tempfile
from collections import deque
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from timeit import timeit
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

import fastamp
from fastamp.bench import photos
from fastamp.bench.environment import count_cores
from fastamp.bench.loader import PLAN, Items, check, wait
from fastamp.bench.options import DEFAULT, number
from fastamp.bench.race import Case, run_race, show
from fastamp.bench.record import PLAIN
from fastamp.timer.timer import align

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    # The arms, the batches or images of a visit, and what prepares an arm.
    Race = tuple[dict[str, Callable[[], object]], int, Callable[[str], object]]

WAITING = 1024  # items
COUNT, BATCH_SIZE = 2000, 64  # photographs
WORKERS = (0, 1, 2, 4)  # of torch's loader
CHECKED = 3  # batches of each arm
TOLERANCE = 4.0  # of the mean difference: crops and filters differ by half a pixel


class TorchLoader(DataLoader[Any]):
    """torch's loader, without its warning of more workers than cores."""

    def check_worker_number_rationality(self) -> None:
        """Skip the warning."""


def make_loaders(items: Items, workers: int) -> dict[str, Any]:
    """Return torch's loader with processes, and fastamp's with threads."""
    threads = fastamp.DataLoader(items, 8, num_workers=workers, worker="thread")
    return {
        f"torch, {workers} workers": TorchLoader(items, 8, num_workers=workers),
        f"fastamp, {workers} threads": threads,
    }


def drain(loaders: dict[str, Any], amount: int) -> Race:
    """Return arms that make a pass."""
    arms = {name: partial(deque[Any], loader, 0) for name, loader in loaders.items()}
    return arms, amount, lambda _: None


def make_waits(workers: int) -> Race:
    """Return passes over items that wait, after a check of each arm's first batch."""
    items = Items(wait, WAITING)
    loaders = {"torch": TorchLoader(items, 8)} | make_loaders(items, workers)
    expected = [next(iter(loaders["torch"]))]
    for loader in loaders.values():
        check(loader.__iter__, expected)
    return drain(loaders, WAITING // 8)


def make_first(workers: int) -> Race:
    """Return arms that begin a pass; the end of the pass before is not timed."""
    kept: list[Iterator[Any]] = []

    def begin(loader: Any) -> None:
        kept.append(iter(loader))
        next(kept[0])

    loaders = make_loaders(Items(int, 4096), workers)
    arms = {name: partial(begin, loader) for name, loader in loaders.items()}
    return arms, 1, lambda _: kept.clear()


def make_spdl(samples: list[tuple[str, int]]) -> Any:
    """Return SPDL's DataLoader, as its documentation has it."""
    io, loaders = (importlib.import_module(f"spdl.{name}") for name in ("io", "dataloader"))
    short, size = min(photos.WIDTH, photos.HEIGHT), photos.SIZE
    filters = f"crop={short}:{short}:exact=1,scale={size}:{size}:flags=bilinear,format=rgb24"
    config = io.decode_config(decoder_options={"threads": "1"})

    def decode(sample: tuple[str, int]) -> tuple[Any, int]:
        packets = io.demux_image(sample[0])
        return io.decode_packets(packets, decode_config=config, filter_desc=filters), sample[1]

    def join(decoded: list[tuple[Any, int]]) -> list[torch.Tensor]:
        images = io.to_torch(io.convert_frames([frames for frames, _ in decoded]))
        return [images.permute(0, 3, 1, 2), torch.tensor([label for _, label in decoded])]

    options = {"num_threads": count_cores(), "output_order": "input"}
    return loaders.DataLoader(
        samples, preprocessor=decode, aggregator=join, batch_size=BATCH_SIZE, **options
    )


@cache
def write_photos() -> str:
    """Write photographs, once for all builds; return their folder."""
    folder = tempfile.mkdtemp(prefix="fastamp photos ")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    photos.write_photos(Path(folder), COUNT, seed=0)
    return folder


def make_photo_loaders() -> dict[str, Any]:
    """Return loaders of photographs, after a check: torch's best one comes first."""
    ours = fastamp.ImageFolder(write_photos(), photos.SIZE)
    pillow = photos.PillowFolder(ours.samples)
    processes = {
        f"torch, {n} workers": TorchLoader(pillow, BATCH_SIZE, num_workers=n) for n in WORKERS
    }
    best = min(processes, key=lambda name: timeit(lambda: deque(processes[name], 0), number=1))
    found: dict[str, Any] = {best: processes[best]}
    for name, dataset in {PLAIN: pillow, "fastamp": ours}.items():
        options: dict[str, Any] = {"num_workers": count_cores(), "worker": "thread"}
        found[name] = fastamp.DataLoader[Any](dataset, BATCH_SIZE, **options)
    if find_spec("spdl"):
        found["SPDL"] = make_spdl(ours.samples)
    for loader in found.values():
        check_photos(loader, found[best])
    return found


def check_photos(batches: Iterable[Any], expected: Iterable[Any]) -> None:
    """Compare the first batches of two passes.

    Raises:
        AssertionError: they differ by more than the crops and filters do, or are too few.
    """
    for found, wanted in zip(*(islice(b, CHECKED) for b in (batches, expected)), strict=True):
        torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0)
        apart = (found[0].float() - wanted[0].float()).abs().mean().item()
        if apart > TOLERANCE:
            msg = f"the images differ by {apart:.1f} of 255 in the mean"
            raise AssertionError(msg)


def make_photos(_workers: int) -> Race:
    """Return passes over photographs, the start of processes and threads included."""
    return drain(make_photo_loaders(), COUNT)


RACES = {"waits": make_waits, "first": make_first, "photos": make_photos}


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row for each arm of each race."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("races", nargs="+", choices=RACES, metavar="NAME")
    parser.add_argument("--workers", type=number(int, 1), default=8, help=DEFAULT)
    parser.add_argument("--rounds", type=number(int, 8), default=PLAN.rounds, help="at most")
    args = parser.parse_args(argv)
    rows = [["race", "arm", "median ms", "batches or images/s", "times as fast [95 %]"]]
    for name in args.races:
        amount = 1

        def make(name: str = name) -> Case:
            nonlocal amount
            arms, amount, before = RACES[name](args.workers)
            return Case(arms=arms, before=before)

        race = run_race(make, replace(PLAN, rounds=args.rounds))
        for arm in race.arms:
            time_s = race.quartiles_s(arm)[1]
            figures = [show(1e3 * time_s, ".3f"), show(amount / time_s, ".0f")]
            rows.append([name, arm, *figures, race.ratio(arm).text(".2f", "x")])
    print("\n".join(align(rows)))


if __name__ == "__main__":
    main()
