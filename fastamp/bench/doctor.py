"""What this installation lacks, or where the time of a script's step goes.

It exits with 0, whatever it finds; with --check, which nothing here answers, with 3.
"""

import argparse
import importlib.util
import json
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
from fastamp.bench.options import refuse
from fastamp.bench.record import Report, Task

EXTRAS = {"PIL": "pillow", "simplejpeg": "simplejpeg"}  # modules of ImageFolder; it needs the first
DRIVER = Path("/proc/driver/nvidia/version")


def add_options(add: Callable[..., object]) -> None:
    """Add the options of this command alone."""
    what = "a file of Timer.to_json: show the share of each region, and the gain without it"
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
    devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    devices += [torch.device("mps")] * torch.backends.mps.is_available()
    rows, notes = [], []
    for device in devices:
        lack = why_fallback(device)
        compiled = "CUDA kernels" if device.type == "cuda" else "compiled code"
        rows.append({"device": str(device), "served by": "pure Python" if lack else compiled})
        if lack is not None:
            notes.append(f"{device} is served by pure Python, which is slower: {lack}")
    if DRIVER.exists() and not torch.cuda.is_available():
        why = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, and "
        why += f"CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES')!r}"
        notes.append(f"this machine has an NVIDIA driver, and torch finds no GPU: {why}")
    for kind in dict.fromkeys(device.type for device in devices if device.type != "mps"):
        if (reason := no_speed_reason(kind, "bf16")) is not None:
            mend = f"Fix it: train in FP32 there, without torch.autocast({kind!r})"
            notes.append(f"bf16 has no speed-up to expect on {kind}: {reason}. {mend}")
    for module, name in EXTRAS.items():
        if importlib.util.find_spec(module) is None:
            notes.append(f"not installed: {name}, for ImageFolder. Fix it: {PIP_INSTALL} {name}")
    return Report(table=rows, notes=notes or ["nothing is missing"])


def _read(text: str) -> tuple[str, dict[str, Any]]:
    """Return the path of a `Timer.to_json` file and what it says, for argparse."""
    try:
        return text, show_regions(json.loads(Path(text).read_bytes()))
    except (OSError, ValueError, TypeError, LookupError) as error:
        refuse(text, f"is no file of Timer.to_json with a region's time: {error!r}")


def show_regions(content: dict[str, Any]) -> dict[str, Any]:
    """Return the table of a `Timer.to_json` file: each region's share, and the limit without it.

    A share is one of the elapsed time; a region that is nested is a part of the one around it.
    """
    times_s = {path: region["total"] for path, region in content["regions"].items()}
    outermost = [path for path in times_s if path.rpartition("/")[0] not in times_s]
    in_regions_s = math.fsum(times_s[path] for path in outermost)
    if not in_regions_s:
        msg = "no region was timed"
        raise ValueError(msg)
    whole_s = max(in_regions_s, content["elapsed"])  # threads' regions may overlap
    times_s["outside of regions"] = whole_s - in_regions_s
    shares = {path: time_s / whole_s for path, time_s in times_s.items()}
    rows = [
        {
            "part": path,
            "seconds": f"{times_s[path]:.3f}",
            "share": f"{share:.0%}",
            "without it": f"at most {limit(share):.2f}x as fast",
        }
        for path, share in shares.items()
    ]
    return {"table": rows, "details": {"shares": shares}}
