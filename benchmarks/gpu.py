"""Profile a GPU: the speed of each kernel alone, and the share of copies that kernels overlap.

`python benchmarks/gpu.py --json gpu.json`. The times are the device's own, means of 20 calls: they
include neither Python nor launches. `reduce` and `finish` read the gradients, `rescale` clips them
in place, `update` is AdamW's step, and the rows of fastamp.AdamW are its own update of bfloat16
weights; each is compared with a copy of as many bytes in the same call.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

import fastamp
from fastamp.bench.step import GPT2
from fastamp.timer.timer import align

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

GRADS: dict[str, list[tuple[int, ...]]] = {
    "one": [(2**26,)],
    "gpt2": GPT2,
    "2000x1000": [(1000,)] * 2000,
}
KINDS = {"float32": (torch.float32, 0), "bfloat16": (torch.bfloat16, 0), "odd": (torch.float32, 1)}
"""Their dtype, and by how many elements they miss the alignment of a vector."""
# Launches of a kernel in a call, and how many elements a launch reads or writes for each element of
# the gradients: the update reads and writes parameter, gradient and two moments.
MOVED = {"reduce": (2, 1), "finish": (2, 0), "rescale": (1, 2), "update": (1, 8)}
LEAN = {"float32": 28, "bfloat16": 20, "8bit": 16 + 4 * 4 / 256}
"""Bytes that an update of fastamp.AdamW moves for an element, by how moments are kept: a bfloat16
weight and gradient, the weight's lower half and both moments, each read and written.
"""
CALLS = 20
STEPS = 60  # batches in a trace
SLEEPS = (0.0, 1.0, 2.0)  # of the producer, in steps of the consumer
SIDE = 4096
BATCH = (256, 3, 64, 64)


class Event(NamedTuple):
    """Something that ran on the device."""

    name: str
    span: tuple[float, float]
    """Begin and end in microseconds."""


def time_kernels(
    device: str, sizes: list[tuple[int, ...]], dtype: torch.dtype, odd: int
) -> Iterator[tuple[str, float, float]]:
    """Yield each kernel, its seconds in a call, and its bytes a second as a share of a copy's."""
    make = partial(make_tensors, sizes, device, odd, dtype)
    parameters, grads, drawn = make(), make(), make()
    generator = torch.Generator(device).manual_seed(0)
    for parameter, grad, draw in zip(parameters, grads, drawn, strict=True):
        parameter.requires_grad_()
        parameter.grad = grad
        draw.normal_(generator=generator)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    copied, source = torch.ones(2, sum(map(math.prod, sizes)), dtype=dtype, device=device)

    def call() -> None:
        torch._foreach_copy_(grads, drawn)
        assert fastamp.optimizer_step(optimizer, 1.0).way == "native"  # noqa: S101
        fastamp.clip_grad_norm_(parameters, 1e-3)
        copied.copy_(source)

    totals = count_s(trace(call, CALLS))
    copy_rate = 2 * source.nbytes * CALLS / totals["copy"]
    for kernel, (calls, moved) in MOVED.items():
        each_s = totals[kernel] / (CALLS * calls)
        yield kernel, each_s, moved * source.nbytes / each_s / copy_rate


def time_lean(device: str, sizes: list[tuple[int, ...]], moments: str) -> tuple[float, float]:
    """Return the same of the update of fastamp.AdamW, and of its kernels, whatever their names."""
    parameters = make_tensors(sizes, device, 0, torch.bfloat16)
    drawn = [torch.randn_like(parameter) for parameter in parameters]
    grads = [torch.empty_like(parameter) for parameter in parameters]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.requires_grad_()
        parameter.grad = grad
    optimizer = fastamp.AdamW(parameters, lr=1e-4, moments=moments)
    copied, source = torch.ones(2, sum(map(math.prod, sizes)), dtype=torch.bfloat16, device=device)

    def call() -> None:
        torch._foreach_copy_(grads, drawn)
        assert fastamp.optimizer_step(optimizer, 1.0).way == "native"  # noqa: S101
        copied.copy_(source)

    totals = count_s(trace(call, CALLS))
    copy_rate = 2 * source.nbytes * CALLS / totals.pop("copy")
    each_s = sum(s for name, s in totals.items() if name not in {"reduce", "finish"}) / CALLS
    return each_s, LEAN[moments] * source.numel() / each_s / copy_rate


def make_tensors(
    sizes: list[tuple[int, ...]], device: str, odd: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return tensors in one buffer."""
    buffer = torch.zeros(sum(math.prod(size) + 8 for size in sizes), dtype=dtype, device=device)
    made, start = [], odd
    for size in sizes:
        made.append(buffer[start : start + math.prod(size)].view(size))
        start += -(-math.prod(size) // 8) * 8
    return made


def trace(call: Callable[[], object], calls: int) -> list[Event]:
    """Return what the device ran in so many calls, after three calls to warm up."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    events: Any = found.events()
    ran = [event for event in events if event.device_type.name == "CUDA"]
    return [Event(e.name, (e.time_range.start, e.time_range.end)) for e in ran]


def count_s(events: Iterable[Event]) -> dict[str, float]:
    """Return the seconds of fastamp's kernels, by their names, and of copies inside the device."""
    totals: dict[str, float] = defaultdict(float)
    for name, (begin, end) in events:
        kernel = re.search(r"fastamp::.*?(\w+)_kernel", name)
        if kernel is not None or name.startswith("Memcpy DtoD"):
            totals[kernel[1] if kernel else "copy"] += (end - begin) / 1e6
    return totals


def find_overlap(device: str, sleep: float) -> float:
    """Return the share of the copies' time that kernels overlap, with a slow producer."""
    weight = torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device=device)

    def work() -> None:
        for _ in range(8):
            torch.mm(weight, weight)

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for event in (start, end):
        event.record()
        work()
    end.synchronize()
    pause_s = sleep * start.elapsed_time(end) / 1e3

    def produce() -> Iterator[torch.Tensor]:
        for _ in range(STEPS):
            time.sleep(pause_s)
            yield torch.ones(BATCH)

    def call() -> None:
        for batch in fastamp.prefetch(produce(), device):
            work()
            batch.sum()

    return find_share(trace(call, 1))


def find_share(events: Iterable[Event]) -> float:
    """Return the share of the time of copies from the host that kernels overlap, or NaN."""
    copies, kernels = [], []
    for name, span in events:
        if name.startswith("Memcpy HtoD"):
            copies.append(span)
        elif not name.startswith(("Memcpy", "Memset")):
            kernels.append(span)
    total = sum(end - begin for begin, end in copies)
    covered, seen_to = 0.0, -math.inf
    for begin, end in sorted(kernels):
        new, seen_to = max(begin, seen_to), max(end, seen_to)  # what no kernel before has covered
        covered += sum(max(0.0, min(stop, seen_to) - max(start, new)) for start, stop in copies)
    return covered / total if total else math.nan


def measure(device: str) -> Iterator[dict[str, str]]:
    """Yield the rows of the table."""
    for name, kind in ((name, kind) for name in GRADS for kind in KINDS):
        for kernel, time_s, share in time_kernels(device, GRADS[name], *KINDS[kind]):
            yield _row(f"{name}, {kind}", kernel, time_s, share)
    for name, moments in ((name, moments) for name in ("one", "gpt2") for moments in LEAN):
        yield _row(f"{name}, fastamp.AdamW", moments, *time_lean(device, GRADS[name], moments))
    for sleep in SLEEPS:
        what = f"copies, the producer sleeps {sleep:g} steps"
        yield {"what": what, "under kernels": f"{find_overlap(device, sleep):.0%}"}


def _row(what: str, kernel: str, time_s: float, share: float) -> dict[str, str]:
    row = {"what": what, "kernel": kernel, "us": f"{time_s * 1e6:.1f}"}
    return row | {"of a copy's speed": f"{share:.0%}"}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and write it as JSON; or print each row as JSON when it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table to FILE")
    parser.add_argument("--lines", action="store_true", help="print rows as JSON, one by one")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("it needs a GPU, and torch finds none")
    rows = []
    for row in measure("cuda"):
        rows.append(row)
        if args.lines:
            print(json.dumps(row), flush=True)
    columns = ["what", "kernel", "us", "of a copy's speed", "under kernels"]
    if not args.lines:
        print("\n".join(align([columns, *([row.get(c, "") for c in columns] for row in rows)])))
    if args.json:
        args.json.write_text(json.dumps({"table": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
