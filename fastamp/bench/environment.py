"""The machine and the software: what a number depends on, and why a precision may gain no speed."""

import os
import platform
import re
from pathlib import Path

import torch

import fastamp

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# As in /proc/cpuinfo and in torch.cpu.get_capabilities, on x86 and on ARM.
BF16_UNITS = {"avx512_bf16", "amx_bf16", "bf16", "svebf16", "sve_bf16"}


def find(pattern: str, path: str) -> str | None:
    """Return the group of a pattern's first match in a file, if there is one."""
    file = Path(path)
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else None


def cpu_features() -> set[str]:
    """Return the names of the processor's instruction sets; empty where they are not listed."""
    ask = getattr(torch.cpu, "get_capabilities", dict)  # torch >= 2.10
    return {name for name, is_there in ask().items() if is_there is True}


def no_speed_reason(device: str, precision: str) -> str | None:
    """Return why this precision cannot be expected to be faster than FP32 here; None if it can."""
    if device == "cuda":
        emulated = not torch.cuda.is_bf16_supported(including_emulation=False)
        return "this GPU has no bf16 units" if precision == "bf16" and emulated else None
    if precision == "fp16":
        return "fp16 has no speed-up to expect on a CPU"
    return None if cpu_features() & BF16_UNITS else "this CPU names no bf16 units"


def describe(device: str) -> dict[str, object]:
    """Return the facts of machine and software that a reader needs beside a number."""
    cpu = find(r"^model name\s*:\s*(.+)$", "/proc/cpuinfo") or platform.machine()
    cuda = device == "cuda"
    return {
        "torch": torch.__version__,
        "fastamp": fastamp.__version__,
        "backends": fastamp.backends(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device,
        "device_name": torch.cuda.get_device_name() if cuda else cpu,
        "cores": os.cpu_count(),
        "bf16_units": sorted(cpu_features() & BF16_UNITS),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda if cuda else None,
    }
