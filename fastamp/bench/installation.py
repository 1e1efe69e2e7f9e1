"""What this installation does and what it lacks: which backend serves which device, and why."""

import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import torch

from fastamp._ops.choose import why_fallback
from fastamp.bench.environment import count_cores, no_speed_reason

EXTRAS = ("simplejpeg", "matplotlib")  # whose absence is no error but slower, or noticed late
NVCC = Path("/usr/local/cuda/bin/nvcc")  # where it is if not on the PATH
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
        why = why_fallback(device)
        if why is not None:
            text = f"{device} is served by pure Python, which is slower"
            found.append(_finding(text, why, _mend(device, why)))
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
    return found + _about_extras()


def _mend(device: torch.device, why: str) -> str:
    """Return the command that lets compiled code serve a device; "" if there is none.

    The reason names the compilers that it needs.
    """
    if why.startswith("FASTAMP_BACKEND"):
        return "unset FASTAMP_BACKEND"
    if device.type not in {"cpu", "cuda"} or torch.version.hip is not None or "driver" in why:
        return ""
    if "needs torch" in why:
        return f"{_pip()} --upgrade 'torch>=2.10'"
    variables = ""
    if device.type == "cuda":
        variables = "FASTAMP_CUDA=ON "
        if shutil.which(os.environ.get("CUDACXX") or "nvcc") is None and NVCC.exists():
            variables += f"CUDACXX={NVCC} "
    source = shlex.join(_source()) or "FOLDER_OF_ITS_SOURCES"
    return f"{variables}{_pip()} --force-reinstall --no-deps --no-cache-dir {source}"


def _pip() -> str:
    return f"{shlex.quote(sys.executable)} -m pip install"


def _source() -> list[str]:
    """Return the sources here that pip built fastamp from, as its arguments, if it did."""
    try:
        text = importlib.metadata.distribution("fastamp").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        text = None
    saved = json.loads(text or '{"url": ""}')
    url = urlsplit(saved["url"])
    if url.scheme != "file" or url.path.endswith(".whl"):
        return []
    editable = ["-e"] if saved.get("dir_info", {}).get("editable") else []
    return [*editable, url2pathname(url.path)]


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


def _about_extras() -> list[str]:
    missing = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    why, mend = f"{', '.join(missing)}, if you need it", f"{_pip()} {' '.join(missing)}"
    return [_finding("not installed", why, mend)] if missing else []
