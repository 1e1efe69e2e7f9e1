"""The CUDA kernels, compiled as C++ and run on the CPU, as a backend of the tests.

They are compiled once for all workers, and again when a source changes. FASTAMP_EMULATED names a
library that is compiled already, as `nox -s emulated` does.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

from fastamp import _ops
from fastamp._ops import choose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
HEADERS = [*ROOT.glob("csrc/*/*.h"), *ROOT.glob("csrc/*/*.cuh"), *ROOT.glob("tests/emulate/*.h")]
SOURCES = [
    *sorted(ROOT.glob("csrc/step/*.cu")),
    ROOT / "tests/emulate/export.cpp",
    ROOT / "tests/emulate/fibers.cpp",
]
# As CMakeLists.txt has them. Undefined behaviour, such as a misaligned vector, ends the process.
# Products and sums are contracted where this machine can, as nvcc does.
FLAGS = ["-std=c++17", "-O2", "-march=native", "-ffp-contract=fast", "-DFASTAMP_EMULATE"]
FLAGS += ["-fPIC", "-shared", "-pthread", "-Werror=missing-field-initializers"]
FLAGS += ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]
FLAGS += ["-Itests/emulate", "-Itests", "-Icsrc", "-x", "c++"]


def compiler() -> list[str] | None:
    """Return the command of the C++ compiler, if there is one; fibers need glibc."""
    command = shlex.split(os.environ.get("CXX", "c++"))
    glibc = platform.libc_ver()[0] == "glibc"
    return command if glibc and shutil.which(command[0]) else None


def library() -> Path | None:
    """Compile the library if needed, and return its path; None without a compiler."""
    if "FASTAMP_EMULATED" in os.environ:
        return Path(os.environ["FASTAMP_EMULATED"])
    command = compiler()
    if command is None:
        return None
    content = hashlib.sha256(repr((platform.node(), command, FLAGS)).encode())
    for path in sorted([*HEADERS, *SOURCES]):
        content.update(path.read_bytes())
    folder = ROOT / "build" / "emulated"
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{content.hexdigest()[:16]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            with tempfile.TemporaryDirectory(dir=folder) as new:
                built = Path(new, made.name)
                subprocess.run([*command, *FLAGS, "-o", built, *SOURCES], cwd=ROOT, check=True)
                built.rename(made)
    return made


@cache
def _loaded() -> ctypes.CDLL | None:
    path = library() if "cpu" in choose._tables() else None
    return None if path is None else ctypes.CDLL(str(path))


@cache
def emulated_table() -> choose.Table | None:
    """Return the ops of the emulated kernels; None where they cannot be made."""
    loaded = _loaded()
    if loaded is None:
        return None
    size = ctypes.c_size_t()
    find = loaded.fastamp_emulated_ops
    find.restype = ctypes.c_void_p
    address = find(ctypes.byref(size))
    return _ops.core().OpTable(address, size.value), True


class Launches(NamedTuple):
    """What a call launches."""

    kernels: int
    blocks: int
    nbytes: int
    """Of the arguments of the last kernel."""


def count_launches(call: Callable[[], object]) -> Launches:
    """Return what a call launches."""
    found = []
    for each in (lambda: None, call):
        each()
        numbers = (ctypes.c_uint * 3)()
        ctypes.CDLL(str(library())).fastamp_emulated_launches(numbers)
        found.append([*numbers])
    (kernels, blocks, _), after = found
    return Launches(after[0] - kernels, after[1] - blocks, after[2])


@contextmanager
def use_emulated(table: choose.Table) -> Iterator[None]:
    """Let the emulated kernels, and else the fallback, serve the CPU's tensors."""
    with mock.patch.object(choose, "_tables", return_value={"cpu": table}), _ops.use_only("cpu"):
        yield
