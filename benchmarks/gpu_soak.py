"""A soak of copies to a GPU: sums of batches are compared, and memory has to stay flat.

    python benchmarks/gpu_soak.py --batches 20000 --minutes 3

First `fastamp.prefetch` hands over batches of random sizes while the consumer bursts, is slow,
keeps batches, drops them, and changes its stream. Then each way of a loader to the device is
compared with the CPU's. Then a loader, a timer and a tracker run; the
memory that torch reserves on the device may not grow from the third of 40 passes on, the pinned
memory and that of the process not from the second quarter of them to the last. The exit status is
1 where something is wrong.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch

import fastamp

LARGEST = 3_000_000  # elements of a batch
PASSES = 40  # at least: torch hands out 32 streams in turn, and keeps memory for each
SLACK = {"device": 2**20, "pinned": 2**20, "process": 24 * 2**20}  # bytes that may be kept back


def soak_prefetch(device: torch.device, batches: int, draw: random.Random) -> list[str]:  # noqa: C901
    """Return what was wrong with the batches."""
    sums: list[int] = []

    def produce() -> Iterator[torch.Tensor]:
        for i in range(batches):
            size = int(10 ** draw.uniform(0, 6.47)) % LARGEST + 1
            batch = torch.arange(i, i + size, dtype=torch.int64)
            sums.append(int(batch.sum()))
            if i % 7 == 0 and size > 8:  # with gaps in its memory
                batch = batch.repeat(2).view(2, -1)[:, 1:-1]
                sums[-1] = int(batch.sum())
            yield batch
            if i % 500 == 0:
                time.sleep(0.02)

    on_gpu = device.type == "cuda"
    streams = [torch.cuda.Stream(device) for _ in range(3)] if on_gpu else [None]
    kept: deque[tuple[int, torch.Tensor]] = deque(maxlen=8)
    found: list[tuple[int, torch.Tensor]] = []
    weight = torch.randn(512, 512, device=device)
    iterator, current, problems = iter(fastamp.prefetch(produce(), device)), streams[0], []
    choose = random.Random(1)  # noqa: S311
    for i in range(batches):
        if on_gpu and choose.random() < 0.02:
            following = choose.choice(streams)
            following.wait_stream(current)
            current = following
        with torch.cuda.stream(current):
            batch = next(iterator)
            if choose.random() < 0.1:
                for _ in range(choose.randrange(30)):
                    weight = weight @ weight * 0.04
            found.append((i, batch.sum()))
            if choose.random() < 0.3:
                kept.append((i, batch))
            elif choose.random() < 0.5:
                del batch
                torch.full((choose.randrange(1, LARGEST),), -1, device=device)  # reuses memory
            if len(found) == 100 or i == batches - 1:
                found += [(number, old.sum()) for number, old in kept]
                problems += compare(found, sums)
                found = []
    return problems


def compare(found: list[tuple[int, torch.Tensor]], sums: list[int]) -> list[str]:
    """Return which sums are wrong; waits for the device."""
    return [
        f"batch {i}: the sum is {s.item()}, not {sums[i]}" for i, s in found if s.item() != sums[i]
    ]


class Items(torch.utils.data.Dataset):
    """Rows that no loader gathers."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def check_loaders(device: torch.device) -> list[str]:
    """Return the ways to the device on which a pass has other batches than on the CPU."""
    rows = torch.arange(2048 * 64, dtype=torch.float32).view(2048, 64)
    workers = {"num_workers": 2, "multiprocessing_context": "spawn"}
    ways = {
        "gathered, one ahead": (rows, {}),
        "gathered on the device": (rows.to(device), {}),
        "item by item": (Items(rows), {}),
        "in processes, pinned by torch": (Items(rows), workers),
        "in threads": (Items(rows), {"num_workers": 2, "worker": "thread"}),
    }
    expected = torch.stack([*fastamp.DataLoader(rows, 64, shuffle=True, seed=0)])
    problems = []
    for way, (dataset, options) in ways.items():
        loader = fastamp.DataLoader(dataset, 64, shuffle=True, seed=0, device=device, **options)
        kept = []  # so that each batch is read late, behind a product
        weight = torch.randn(512, 512, device=device)
        for batch in loader:
            weight = weight @ weight * 0.04
            kept.append(batch)
        found = torch.stack(kept)
        ok = found.device.type == device.type and torch.equal(found.cpu(), expected)
        say(case=f"a loader, {way}", ok=ok)
        problems += [] if ok else [way]
    return problems


def soak_memory(device: torch.device, minutes: float, count: int) -> list[str]:
    """Return what has grown while a loader, a timer and a tracker ran."""
    rows = fastamp.ArrayDataset(torch.rand(count, 3, 32, 32), torch.arange(count))
    loader = fastamp.DataLoader(rows, 128, shuffle=True, seed=0, device=device)
    timer, tracker = fastamp.Timer(device), fastamp.MetricsTracker()
    samples: list[dict[str, int]] = []
    end_s, step = time.monotonic() + 60 * minutes, 0
    while time.monotonic() < end_s or len(samples) < PASSES:
        for images, labels in loader:
            with timer("step"):
                total = images.sum() + labels.sum()
            tracker.log_scalar("total", total, step)
            step += 1
        tracker.flush()
        timer.summary()
        gc.collect()
        samples.append(measure(device))
    tracker.close()
    quarter = max(1, len(samples) // 4)
    problems = []
    for name in samples[0]:
        begin = 2 if name == "device" else quarter  # memory that torch reserves is flat at once
        first = statistics.median(s[name] for s in samples[begin : begin + quarter])
        last = statistics.median(s[name] for s in samples[-quarter:])
        say(memory=name, first_bytes=first, last_bytes=last, passes=len(samples), steps=step)
        if last > first + SLACK[name]:
            problems.append(f"{name} memory grew by {(last - first) / 2**20:.1f} MiB")
    return problems


def say(**line: object) -> None:
    """Print a line of JSON, as the parts of `on_gpu.sh` do."""
    print(json.dumps(line), flush=True)


def measure(device: torch.device) -> dict[str, int]:
    """Return the bytes that are held now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {"process": pages * 4096}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        found["device"] = torch.cuda.memory_reserved(device)
        found["pinned"] = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    return found


def main(words: list[str]) -> int:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(words)
    device = torch.device(args.device)
    problems = soak_prefetch(device, args.batches, random.Random(args.seed))  # noqa: S311
    say(case=f"{args.batches} batches", ok=not problems, wrong=problems[:20])
    problems += check_loaders(device)
    problems += (grown := soak_memory(device, args.minutes, args.rows))
    say(case="memory is flat", ok=not grown, wrong=grown)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
