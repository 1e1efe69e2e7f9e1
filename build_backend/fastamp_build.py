"""The build backend: scikit-build-core, with nvcc from PyPI where a GPU has a driver but no nvcc.

pip installs what `get_requires_for_build_wheel` returns, then calls `build_wheel`. Both ask the
driver, without torch. CMake reads the decision in environment variables: CUDACXX, CUDAARCHS,
LIBRARY_PATH, and FASTAMP_NOTE, which says why no nvcc is used.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

from scikit_build_core import build
from scikit_build_core.build import (  # noqa: F401 - the hooks that need nothing more
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

NAMES = "cuda-nvcc nvvm cuda-crt cuda-runtime cuda-cccl"
PACKAGES = [f"nvidia-{name}==13.0.*" for name in NAMES.split()]
"""nvcc and the static runtime: 100 MB to download, 270 MB unpacked."""
PARTS = (
    "bin/nvcc",
    "nvvm/bin/cicc",
    "include/crt/host_config.h",
    "lib/libcudart_static.a",
    "include/cccl/nv/target",
)
"""What one folder holds when all of them are installed."""
OLDEST_NVCC, OLDEST_CARD, OLDEST_DRIVER = (12, 8), (7, 5), (13, 0)  # the driver: for PACKAGES

Version = tuple[int, int]


class Driver(NamedTuple):
    """The NVIDIA driver: the newest CUDA that it runs, and its cards' compute capabilities."""

    cuda: Version
    cards: list[Version]


class Nvcc(NamedTuple):
    """An nvcc: as CUDACXX, its version, and the architectures that it knows, as "86"."""

    command: str
    version: Version
    known: list[str]


class Plan(NamedTuple):
    """The packages to install for the build, CUDAARCHS or "", and why no nvcc is used."""

    packages: list[str]
    archs: str
    note: str


def decide(setting: str, driver: Driver | None, nvcc: Nvcc | None, archs: str = "") -> Plan:
    """Decide by FASTAMP_CUDA, by what this machine has, and by CUDAARCHS.

    Without CUDAARCHS the code is for this machine's cards. It is for all cards, by CMakeLists.txt,
    where there is no driver or nvcc does not know a card.
    """
    if setting not in {"AUTO", "ON"}:
        return Plan([], archs, "")
    cards = sorted({card for card in driver.cards if card >= OLDEST_CARD}) if driver else []
    names = ["{}{}".format(*card) for card in cards]
    if nvcc is None or set(names) <= set(nvcc.known):
        archs = archs or ";".join(f"{name}-real" for name in names)
    if nvcc is not None:
        return Plan([], archs, f"{nvcc.command} failed: `pip install -v` shows why")
    note = _why_not_from_pypi(driver, cards)
    if note:
        return Plan([], archs, note)
    return Plan(PACKAGES, archs, f"the build could not install {' '.join(PACKAGES)}")


def _why_not_from_pypi(driver: Driver | None, cards: list[Version]) -> str:
    if driver is None:
        return "there was no NVIDIA driver"
    if not driver.cards:
        return "the NVIDIA driver found no GPU"
    if not cards:
        needed, capability = _dotted(OLDEST_CARD), _dotted(max(driver.cards))
        return f"the GPU's compute capability is {capability}, and the kernels need {needed}"
    if driver.cuda < OLDEST_DRIVER:
        needed, cuda = _dotted(OLDEST_DRIVER), _dotted(driver.cuda)
        return (
            f"the NVIDIA driver was for CUDA {cuda}, and nvcc from PyPI needs one for {needed}: "
            "update the driver, or install nvcc 12.8 or 12.9"
        )
    return ""


def _dotted(version: Version) -> str:
    return "{}.{}".format(*version)


def read_driver() -> Driver | None:
    """Ask the driver for its version and its cards; None without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None

    def ask(name: str, *arguments: int) -> int:
        value = ctypes.c_int()
        return 0 if getattr(library, name)(ctypes.byref(value), *arguments) else value.value

    cuda = ask("cuDriverGetVersion")
    count = 0 if library.cuInit(0) else ask("cuDeviceGetCount")
    attributes = (75, 76)  # the compute capability, major and minor
    devices = [ask("cuDeviceGet", index) for index in range(count)]
    cards = [tuple(ask("cuDeviceGetAttribute", a, each) for a in attributes) for each in devices]
    return Driver((cuda // 1000, cuda % 1000 // 10), cards)


def find_nvcc(has_driver: bool) -> Nvcc | None:  # noqa: FBT001
    """Return the first nvcc that is new enough: CUDACXX, on the PATH, in CUDA's folder, PyPI's."""
    commands = [os.environ.get("CUDACXX"), shutil.which("nvcc")]
    if has_driver:  # the folder is often off the PATH
        commands.append(f"{os.environ.get('CUDA_HOME') or '/usr/local/cuda'}/bin/nvcc")
    asked = (_ask(command) for command in [*commands, packaged_nvcc()] if command)
    return next((nvcc for nvcc in asked if nvcc and nvcc.version >= OLDEST_NVCC), None)


def packaged_nvcc() -> str | None:
    """Return the nvcc of PACKAGES, if all of them are installed."""
    try:
        folder = Path(str(distribution("nvidia-cuda-nvcc").locate_file("nvidia/cu13")))
    except PackageNotFoundError:
        return None
    return f"{folder}/bin/nvcc" if all((folder / part).exists() for part in PARTS) else None


def _ask(command: str) -> Nvcc | None:
    words = [command] if shutil.which(command) else shlex.split(command)  # CUDACXX may have options
    try:
        version, known = (
            subprocess.run([*words, option], capture_output=True, text=True, check=False).stdout
            for option in ("--version", "--list-gpu-arch")
        )
    except OSError:
        return None
    release = re.search(r"release (\d+)\.(\d+)", version)
    known_archs = re.findall(r"compute_(\d+)", known)
    return release and Nvcc(command, (int(release[1]), int(release[2])), known_archs)


def _look(settings: dict[str, Any] | None) -> tuple[Plan, Nvcc | None]:
    """Return the decision for this machine, and the nvcc to build with."""
    setting = (settings or {}).get("cmake.define.FASTAMP_CUDA") or os.environ.get("FASTAMP_CUDA")
    setting = str(setting or "AUTO").upper()
    is_off = setting not in {"AUTO", "ON"}
    driver = None if is_off else read_driver()
    nvcc = None if is_off else find_nvcc(driver is not None)
    return decide(setting, driver, nvcc, os.environ.get("CUDAARCHS", "")), nvcc


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Return scikit-build-core's requirements, and PACKAGES where they are needed."""
    requirements = build.get_requires_for_build_wheel(config_settings)
    return requirements + _look(config_settings)[0].packages


get_requires_for_build_editable = get_requires_for_build_wheel


def _prepare(settings: dict[str, Any] | None) -> None:
    plan, nvcc = _look(settings)
    os.environ["FASTAMP_NOTE"] = plan.note
    if plan.archs:
        os.environ["CUDAARCHS"] = plan.archs
    if nvcc is not None:
        os.environ["CUDACXX"] = nvcc.command
        if nvcc.command == packaged_nvcc():  # which looks for its libraries in lib64
            paths = [f"{Path(nvcc.command).parents[1]}/lib", os.environ.get("LIBRARY_PATH")]
            os.environ["LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))


def _with_nvcc(hook: Callable[..., str]) -> Callable[..., str]:
    def build_with_nvcc(
        wheel_directory: str,
        config_settings: dict[str, Any] | None = None,
        metadata_directory: str | None = None,
    ) -> str:
        _prepare(config_settings)
        return hook(wheel_directory, config_settings, metadata_directory)

    return build_with_nvcc


build_wheel = _with_nvcc(build.build_wheel)
build_editable = _with_nvcc(build.build_editable)
