"""What this installation does and what it lacks: which backend serves which device, and why."""

import importlib.util
import os
from pathlib import Path

import torch

from fastamp._ops.choose import PIP_INSTALL, why_fallback
from fastamp.bench.environment import count_cores, no_speed_reason

EXTRA = "simplejpeg"  # whose absence is no error but slower
DRIVER = Path("/proc/driver/nvidia/version")


def _finding(what: str, why: str, mend: str = "") -> str:
    """Return what is not as fast as it could be, why, and the command that fixes it, if any."""
    return f"{what}: {why}" + f". Fix it: {mend}" * bool(mend)


def devices() -> list[torch.device]:
    """Return the devices of this machine that torch can use."""
    cuda = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return [torch.device(name) for name in ("cpu", *(f"cuda:{index}" for index in cuda), *mps)]


def served_by(device: torch.device) -> str:
    """Return which backend serves a device."""
    compiled = "CUDA kernels" if device.type == "cuda" else "compiled code"
    return compiled if why_fallback(device) is None else "pure Python"


def examine() -> list[str]:
    """Return all findings, the worst first."""
    found = []
    for device in devices():
        lack = why_fallback(device)
        if lack is not None:
            text = f"{device} is served by pure Python, which is slower"
            found.append(_finding(text, lack))
    found += _about_torch()
    for kind in dict.fromkeys(device.type for device in devices() if device.type != "mps"):
        reason = no_speed_reason(kind, "bf16")
        if reason is not None:
            mend = f"train in FP32 there, without torch.autocast({kind!r})"
            found.append(_finding(f"bf16 on {kind}", reason, mend))
    cores = count_cores()
    if torch.get_num_threads() > cores:
        why = f"torch computes on {torch.get_num_threads()} threads, and {cores} cores may be used"
        found.append(_finding("threads", why, f"export OMP_NUM_THREADS={cores}"))
    if importlib.util.find_spec(EXTRA) is None:
        mend = f"{PIP_INSTALL} {EXTRA}"
        found.append(_finding("not installed", f"{EXTRA}, if you need it", mend))
    return found


def _about_torch() -> list[str]:
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
