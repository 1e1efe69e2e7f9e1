"""Compiles the CUDA kernels as C++ for the CPU, into a library that tests load.

They are compiled once for all workers, and again when a source changes.
`python tests/support/emulated_build.py FOLDER SANITIZER` compiles those of another folder, with a
sanitizer or OFF, and prints the library's path; FASTAMP_EMULATED makes tests load that one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Products and sums are contracted where this machine can, as nvcc does.
FLAGS = ["-std=c++17", "-O2", "-march=native", "-ffp-contract=fast", "-DFASTAMP_EMULATE"]
FLAGS += ["-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Wno-unknown-pragmas"]
FLAGS += ["-Werror=missing-field-initializers", "-Itests/emulate", "-Itests", "-Icsrc", "-x", "c++"]
# Undefined behaviour, such as a misaligned vector, ends the process.
CHECKS = {
    "OFF": ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"],
    "address": ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    "thread": ["-g", "-fsanitize=thread"],
}


def compiler() -> list[str] | None:
    """Return the command of the C++ compiler, if there is one; fibers need glibc."""
    command = shlex.split(os.environ.get("CXX", "c++"))
    glibc = platform.libc_ver()[0] == "glibc"
    return command if glibc and shutil.which(command[0]) else None


def library(root: Path = ROOT, sanitizer: str = "OFF") -> Path | None:
    """Compile the library if needed, and return its path; None without a compiler."""
    if "FASTAMP_EMULATED" in os.environ:
        return Path(os.environ["FASTAMP_EMULATED"])
    command = compiler()
    if command is None:
        return None
    grid = "fibers" if sanitizer == "OFF" else "threads"  # a sanitizer sees threads of its own
    sources = [*sorted(root.glob("csrc/step/*.cu")), root / "tests/emulate/export.cpp"]
    sources.append(root / f"tests/emulate/{grid}.cpp")
    headers = [path for glob in ("csrc/*/*.h", "csrc/*/*.cuh") for path in root.glob(glob)]
    headers += root.glob("tests/emulate/*.h")
    flags = [*FLAGS, *CHECKS[sanitizer]]
    content = hashlib.sha256(repr((platform.node(), command, flags)).encode())
    for path in sorted([*headers, *sources]):
        content.update(path.read_bytes())
    folder = root / "build" / "emulated"
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{content.hexdigest()[:16]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            with tempfile.TemporaryDirectory(dir=folder) as new:
                built = Path(new, made.name)
                subprocess.run([*command, *flags, "-o", built, *sources], cwd=root, check=True)
                built.rename(made)
    return made


if __name__ == "__main__":
    sys.stdout.write(f"{library(Path(sys.argv[1]).absolute(), sys.argv[2])}\n")
