"""The small parts of `on_gpu.sh`: facts of the machine, launches, NVML, a failed kernel, the bench.

    python benchmarks/gpu_parts.py facts       # or check, launches, nvml, failed-kernel
    python benchmarks/gpu_parts.py bench step gpt2/adamw

On stdout are lines of JSON, each as soon as it is known. `bench` starts a process for each row.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OLDEST = (2, 10)  # of torch, for the compiled core
# An empty kernel with as many bytes of arguments as each of the tables, or none.
PTX = """.version 8.1
.target sm_75
.address_size 64
.visible .entry none() { ret; }
.visible .entry small(.param .align 8 .b8 table[4000]) { ret; }
.visible .entry large(.param .align 8 .b8 table[32000]) { ret; }
"""
ARGUMENTS = {"none": 0, "small": 4000, "large": 32000}  # bytes
GRID = (1, 1, 1, 32, 1, 1, 0)  # one warp, without shared memory
RATIO_ATTRIBUTE = 87  # cudaDevAttrSingleToDoublePrecisionPerfRatio
CALLS = 300
STEP_ROWS = Path(__file__).with_name("step_rows.py")
LAUNCHES = [(148, 1, True, 3), (148, 1, None, 3), (600, 2, None, 3), (465, 465, None, 4)]
"""Tensors, groups, `fused`, and the launches of a step where the norm is read."""
ROWS = [
    *product(["gpt2"], ["adamw", "norm", "adamw-8bit", "adamw-bf16", "clip", "adamw-zero-grad"]),
    ("2000x1000", "adamw"),
    ("network", "adamw-no-scaler"),
    *product(["465gx1000", "192x130208-bf16", "2000x1000"], ["adamw-open"]),
    ("2000x64x64", "adamw-8bit"),
    ("gpt2", "muon"),
]
"""Rows of `step_rows.py`, those that tell most first."""


def say(**line: Any) -> None:
    """Print a line."""
    print(json.dumps(line), flush=True)


def check() -> None:
    """Print the GPU's name, or end with the reason why nothing can run."""
    version = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    if version < OLDEST:
        sys.exit(f"needs torch 2.10 or later, finds {torch.__version__}")
    if not torch.cuda.is_available():
        sys.exit(f"needs a GPU, and torch {torch.__version__} finds none")
    print(torch.cuda.get_device_name())


def built() -> None:
    """Print what was installed, or end with an error if it has no code for this GPU."""
    import fastamp  # noqa: PLC0415 - `check` needs none

    say(fastamp=fastamp.__version__, backends=fastamp.backends(), path=fastamp.__file__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            fastamp.get_total_norm([torch.ones(1, device="cuda")])
        except UserWarning as reason:  # the fallback serves this GPU
            sys.exit(str(reason))


def facts() -> None:
    """Print what the machine is, and what calls of the driver and launches cost the host."""
    device: Any = torch.cuda.get_device_properties(0)
    say(device=device.name, capability=f"{device.major}.{device.minor}", bytes=device.total_memory)
    say(multiprocessors=device.multi_processor_count, torch=torch.__version__)
    say(cuda=torch.version.cuda, cores=os.cpu_count(), python=sys.version.partition(" ")[0])
    driver = ctypes.CDLL("libcuda.so.1")
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    path = Path("/proc/driver/nvidia/version")
    say(driver=version.value, text=path.read_text().strip() if path.exists() else "")
    say(copy_bytes_a_second=find_copy_rate())
    call_us = time_us(lambda: driver.cuDriverGetVersion(ctypes.byref(version)))
    say(host_us={"a call by ctypes": call_us})
    query = find_query()
    say(host_us={"cudaDeviceGetAttribute": None if query is None else time_us(query)})
    for name, launch in find_launches(driver).items():
        say(host_us={f"a launch with {ARGUMENTS[name]} bytes of arguments": time_us(launch)})
    one = torch.ones(1, device="cuda")
    say(host_us={"one.add_(1) of torch": time_us(lambda: one.add_(1))})
    step = make_step(6, 1, None, "cuda")
    say(host_us={"a step of 6 tensors": time_us(step)})


def find_copy_rate() -> float:
    """Return the bytes a second that a copy of a gigabyte inside the device reads and writes."""
    source, to = (torch.ones(2**28, device="cuda") for _ in range(2))
    found = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        to.copy_(source)
        end.record()
        end.synchronize()
        found.append(2 * source.nbytes / (start.elapsed_time(end) / 1e3))
    return statistics.median(found[2:])


def time_us(call: Callable[[], object]) -> float:
    """Return the median microseconds of a call on the host; the device is idle at its beginning."""
    found = []
    for _ in range(CALLS):
        begin_ns = time.perf_counter_ns()
        call()
        found.append(time.perf_counter_ns() - begin_ns)
        if len(found) % 50 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return statistics.median(found) / 1e3


def find_query() -> Callable[[], object] | None:
    """Return the query of an attribute, in the runtime that torch has loaded; None if none is."""
    maps = Path("/proc/self/maps").read_text()
    loaded = re.search(r"\S*/libcudart\S*\.so\S*", maps)
    if loaded is None:
        return None
    query = ctypes.CDLL(loaded[0]).cudaDeviceGetAttribute
    found = ctypes.c_int()
    return lambda: query(ctypes.byref(found), RATIO_ATTRIBUTE, 0)


def find_launches(driver: ctypes.CDLL) -> dict[str, Callable[[], object]]:
    """Return launches of empty kernels, by name."""
    module = ctypes.c_void_p()
    torch.cuda.synchronize()  # which makes the context
    if driver.cuModuleLoadData(ctypes.byref(module), PTX.encode()) != 0:
        return {}
    found: dict[str, Callable[[], object]] = {}
    for name, size in ARGUMENTS.items():
        kernel = ctypes.c_void_p()
        if driver.cuModuleGetFunction(ctypes.byref(kernel), module, name.encode()) != 0:
            continue
        table = ctypes.create_string_buffer(max(size, 1))
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(table))

        def launch(kernel: Any = kernel, arguments: Any = arguments, _held: Any = table) -> int:
            return int(driver.cuLaunchKernel(kernel, *GRID, None, arguments, None))

        if launch() == 0:
            found[name] = launch
    return found


def make_step(tensors: int, groups: int, fused: bool | None, device: str) -> Callable[[], Any]:  # noqa: FBT001
    """Return a step of AdamW that has been made once; each reads the norm and clips."""
    import fastamp  # noqa: PLC0415

    made = [torch.nn.Parameter(torch.ones(1000, device=device)) for _ in range(tensors)]
    rows = [{"params": made[i::groups], "lr": 1e-3 / (1 + i)} for i in range(groups)]
    optimizer = torch.optim.AdamW(rows, fused=fused)
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)

    def step() -> str:
        return fastamp.optimizer_step(optimizer, 1.0).way

    step()
    return step


def launches() -> int:
    """Print the kernels of steps; return 1 if there are more than the emulated ones."""
    wrong = 0
    for tensors, groups, fused, most in LAUNCHES:
        step = make_step(tensors, groups, fused, "cuda")
        torch.cuda.synchronize()
        with torch.profiler.profile() as profile:
            way = step()
            torch.cuda.synchronize()
        ran = [e for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
        kernels = {e.key.partition("<")[0]: e.count for e in ran if "kernel" in e.key}
        total = sum(kernels.values())
        name = f"{tensors} tensors, {groups} groups, {'fused' if fused else 'left open'}"
        ok = 0 < total <= most and way == "native"
        say(case=name, ok=ok, launches=total, most=most, way=way, kernels=kernels)
        wrong += not ok
    return int(wrong > 0)


def nvml() -> int:
    """Print the values of NVML that reach the tracker; return 1 if there is none."""
    import fastamp  # noqa: PLC0415

    tracker = fastamp.MetricsTracker()
    tracker.watch("cuda")
    time.sleep(3)
    tracker.flush()
    names = [name for name in tracker.summary() if name.startswith("gpu")]
    tracker.close()
    say(case="values of NVML", ok=bool(names), names=names)
    return int(not names)


def failed_kernel() -> None:
    """Let a kernel fail: the program gets torch's error, and no thread waits for ever.

    It ends the process, with 1 if the error is another one: CUDA's own end may abort now.
    """
    import fastamp  # noqa: PLC0415

    parameter = torch.nn.Parameter(torch.zeros(8, device="cuda"))
    parameter.grad = torch.ones(8, device="cuda")
    batches = iter(fastamp.prefetch((torch.ones(1000) for _ in range(100)), "cuda"))
    next(batches)
    parameter.grad[torch.tensor([99], device="cuda")]
    said = "no error"
    try:
        fastamp.clip_grad_norm_(parameter, 1.0).item()
    except RuntimeError as error:
        said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    say(case="an index outside of a tensor", ok="assert" in said, said=said)
    os._exit("assert" not in said)


def bench(command: str, rows: Sequence[str], limit_s: float) -> int:
    """Run the bench, a process for each row, and print what it measured, without its samples.

    A row that takes as long as the longest so far has to fit into the limit.
    """
    end_s, wrong, longest_s = time.monotonic() + limit_s, 0, 0.0
    for row in rows:
        words = ["--rows", row] if command == "step" else [command, *filter(None, [row])]
        begin_s = time.monotonic()
        if begin_s + longest_s > end_s:
            say(row=f"{command} {row}", left_out="no time")
            continue
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "record.json")
            script = [str(STEP_ROWS)] if command == "step" else ["-m", "fastamp.bench"]
            start = [sys.executable, *script, *words, "--device", "cuda", "--json", str(out)]
            safe = {**os.environ, "PYTHONSAFEPATH": "1"}  # the installed package, not this folder's
            done = subprocess.run(start, stdout=sys.stderr, env=safe, check=False)
            found = json.loads(out.read_text()) if out.exists() else {}
        longest_s = max(longest_s, time.monotonic() - begin_s)
        wrong += done.returncode != 0
        parts = {name: found.get(name) for name in ("noise", "table", "details")}
        texts = [each["text"] for each in found.get("measurements", ())]
        say(row=f"{command} {row}", status=done.returncode, **parts, measurements=texts)
    return int(wrong > 0)


def main(words: Sequence[str] | None = None) -> int:
    """Run a part; return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parts = {"check": check, "built": built, "facts": facts, "launches": launches, "nvml": nvml}
    parts["failed-kernel"] = failed_kernel
    parser.add_argument("part", choices=[*parts, "bench"])
    parser.add_argument("command", nargs="?", default="step", help="of the bench")
    parser.add_argument("rows", nargs="*", help="rows of step, or tasks")
    parser.add_argument("--first", type=int, help="take so many of the default rows of step")
    parser.add_argument("--skip", type=int, default=0, help="but not so many of them")
    parser.add_argument(
        "--limit", type=float, default=3600.0, metavar="S", help="begin no row then"
    )
    args = parser.parse_args(words)
    if args.part != "bench":
        return parts[args.part]() or 0
    default = ["/".join(row) for row in ROWS][args.skip : args.first]
    return bench(
        args.command, args.rows or (default if args.command == "step" else [""]), args.limit
    )


if __name__ == "__main__":
    sys.exit(main())
