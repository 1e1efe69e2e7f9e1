"""Profile a GPU: the speed of each kernel alone, and the share of copies that kernels overlap.

The times are the device's own: they include neither Python nor launches.
"""

import argparse
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

import fastamp
from fastamp._progress import progress
from fastamp.bench.race import Interval
from fastamp.bench.record import Measurement, Report, Task
from fastamp.bench.rows import NAMED

METRICS = """share/, the gradients, their kind and the kernel, as in share/gpt2/float32/reduce;
overlap/ and the steps that the producer sleeps"""
GRADS: dict[str, list[tuple[int, ...]]] = {
    "one": [(2**26,)],
    "gpt2": NAMED["gpt2"].sizes,
    "2000x1000": [(1000,)] * 2000,
}
KINDS = {"float32": (torch.float32, 0), "bfloat16": (torch.bfloat16, 0), "odd": (torch.float32, 1)}
"""Their dtype, and by how many elements they miss the alignment of a vector."""
# Launches of a kernel in a call, and how many elements a launch reads or writes for each element of
# the gradients: the update reads and writes parameter, gradient and two moments.
MOVED = {"reduce": (2, 1), "finish": (2, 0), "rescale": (1, 2), "update": (1, 8)}
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


def add_options(add: Callable[..., object]) -> None:
    """Narrow --device to a GPU; this command has no options of its own."""
    add("--device", type=_gpu, default="cuda", help="a GPU; there is nothing to see on a CPU")


def _gpu(text: str) -> str:
    if text != "cuda" or not torch.cuda.is_available():
        message = f"{text!r}: expected cuda, and a GPU that torch finds"
        raise argparse.ArgumentTypeError(message)
    return text


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and the function that runs it."""
    return {"calls": CALLS, "steps": STEPS}, partial(_run, args)


def _run(args: argparse.Namespace) -> Report:
    rows: list[dict[str, str]] = []
    metrics: list[Measurement] = []
    with progress(len(GRADS) * len(KINDS) + len(SLEEPS)) as tick:
        for name, kind in ((name, kind) for name in GRADS for kind in KINDS):
            for kernel, seconds, share in _kernels(args, GRADS[name], *KINDS[kind]):
                found = f"{seconds * 1e6:.1f}", f"{share:.0%}"
                row = {"kernel": kernel, "us": found[0], "of a copy's speed": found[1]}
                rows.append({"what": f"{name}, {kind}", **row})
                figure = f"share/{name}/{kind}/{kernel}"
                metrics.append(Measurement(name=figure, interval=Interval.exact(share)))
            tick()
        for sleep in SLEEPS:
            share = _overlap(args.device, sleep)
            what = f"copies, the producer sleeps {sleep:g} steps"
            rows.append({"what": what, "under kernels": f"{share:.0%}"})
            figure = f"overlap/{sleep:g}"
            metrics.append(Measurement(name=figure, interval=Interval.exact(share)))
            tick()
    notes = [
        f"mean of {CALLS} calls by the profiler; the copy is one of as many bytes in the same call",
        "reduce and finish read the gradients, rescale clips them in place, update is AdamW's step",
    ]
    return Report(table=rows, measurements=metrics, notes=notes)


def _kernels(
    args: argparse.Namespace, sizes: list[tuple[int, ...]], dtype: torch.dtype, odd: int
) -> Iterator[tuple[str, float, float]]:
    """Yield each kernel, its seconds in a call, and its bytes a second as a share of a copy's."""
    make = partial(_make, sizes, args.device, odd, dtype)
    parameters, grads, drawn = make(), make(), make()
    generator = torch.Generator(args.device).manual_seed(args.seed)
    for parameter, grad, draw in zip(parameters, grads, drawn, strict=True):
        parameter.requires_grad_()
        parameter.grad = grad
        draw.normal_(generator=generator)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    copied, source = torch.ones(2, sum(map(math.prod, sizes)), dtype=dtype, device=args.device)

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


def _make(
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


def _overlap(device: str, sleep: float) -> float:
    """Return the share of the copies' time that kernels overlap, with a slow producer."""
    weight = torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device=device)

    def work() -> None:
        for _ in range(8):
            torch.mm(weight, weight)

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
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
