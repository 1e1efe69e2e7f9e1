"""What this installation lacks, or where the time of a script's step goes.

It exits with 0, whatever it finds; with --check, which nothing here answers, with 3.
"""

import argparse
import importlib.util
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastamp._ops.choose import PIP_INSTALL, why_fallback
from fastamp.bench.environment import no_speed_reason
from fastamp.bench.measure import limit
from fastamp.bench.record import Report, Task, read_json

METRICS = "none"
OUTSIDE = "outside of regions"
EXTRA = "simplejpeg"  # whose absence is no error but slower
DRIVER = Path("/proc/driver/nvidia/version")


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this command alone."""
    what = "a file written by Timer.to_json in your own script: show the share of each region, and "
    what += "how many times as fast the whole were without it"
    add("--timer", type=_read, metavar="FILE", help=what)


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and the function that runs it."""
    if args.timer is None:
        return {}, _look
    path, report = args.timer
    return {"timer": path}, partial(Report, **report)


def _look() -> Report:
    """Say which backend serves which device, and what is missing."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    devices += [torch.device("mps")] * torch.backends.mps.is_available()
    rows, notes = [], []
    for device in devices:
        lack = why_fallback(device)
        compiled = "CUDA kernels" if device.type == "cuda" else "compiled code"
        rows.append({"device": str(device), "served by": "pure Python" if lack else compiled})
        if lack is not None:
            text = f"{device} is served by pure Python, which is slower"
            notes.append(_finding(text, lack))
    notes += _examine_torch()
    for kind in dict.fromkeys(device.type for device in devices if device.type != "mps"):
        if (reason := no_speed_reason(kind, "bf16")) is not None:
            mend = f"train in FP32 there, without torch.autocast({kind!r})"
            notes.append(_finding(f"bf16 has no speed-up to expect on {kind}", reason, mend))
    if importlib.util.find_spec(EXTRA) is None:
        mend = f"{PIP_INSTALL} {EXTRA}"
        notes.append(_finding("not installed", f"{EXTRA}, if you need it", mend))
    return Report(table=rows, notes=notes or ["nothing is missing"])


def _finding(what: str, why: str, mend: str = "") -> str:
    """Return what is not as fast as it could be, why, and the command that fixes it, if any."""
    return f"{what}: {why}" + f". Fix it: {mend}" * bool(mend)


def _examine_torch() -> list[str]:
    """Return why torch finds no GPU where there is a driver for one."""
    if torch.cuda.is_available() or not DRIVER.exists():
        return []
    why, mend = f"torch is built for CUDA {torch.version.cuda}; `nvidia-smi` shows its driver", ""
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} is built without CUDA"
        mend = "install torch as https://pytorch.org/get-started/locally says"
    elif "CUDA_VISIBLE_DEVICES" in os.environ:
        why = f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} is set"
        mend = "unset CUDA_VISIBLE_DEVICES"
    return [_finding("this machine has an NVIDIA driver, and torch finds no GPU", why, mend)]


def _read(text: str) -> tuple[str, dict[str, Any]]:
    """Return the path of a `Timer.to_json` file and what it says, for argparse."""
    return text, read_json(text, show_regions, "is no file of Timer.to_json with a region's time")


def show_regions(content: dict[str, Any]) -> dict[str, Any]:
    """Return the table of a `Timer.to_json` file: each region's share, and the limit without it.

    A share is one of the elapsed time; a region that is nested is a part of the one around it.

    Raises:
        ValueError: no region has a time.
    """
    totals_s = {path: float(region["total"]) for path, region in content["regions"].items()}
    outermost = [path for path in totals_s if path.rpartition("/")[0] not in totals_s]
    in_regions_s = math.fsum(totals_s[path] for path in outermost)
    if not 0 < in_regions_s < math.inf:
        msg = "no region has a time"
        raise ValueError(msg)
    whole_s = max(in_regions_s, float(content.get("elapsed", 0.0)))
    times_s = totals_s | {OUTSIDE: whole_s - in_regions_s}
    shares = {path: time_s / whole_s for path, time_s in times_s.items() if time_s}
    rows = []
    for path, share in shares.items():
        row = {"part": path, "seconds": f"{times_s[path]:.3f}", "share": f"{share:.0%}"}
        without = f"at most {limit(share):.2f}x as fast" if share < 1 else "-"
        rows.append(row | {"without it": without})
    return {"table": rows, "details": {"shares": shares}}
