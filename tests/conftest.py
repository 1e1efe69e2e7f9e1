"""How the tests run side by side, on every backend; and the count of GPU tests."""

from __future__ import annotations

import gc
import importlib.metadata
import itertools
import os
import signal
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# pip has written no bytecode: the first import of a module writes it, for all processes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Before torch is imported: here and in all processes that tests start, torch computes on one
# thread, unless a test says otherwise. Threads that wait for each other on a busy machine took
# twice as long.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

# An older torch gets the fallback with a warning, which one file tests; all others ask for it.
if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    os.environ.setdefault("FASTAMP_BACKEND", "fallback")

from support.devices import asks_for_gpu, check_allocated, count_allocations, runs_for_cuda
from support.emulated import emulated_table, use_emulated

import fastamp
from fastamp import _ops

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

# Started in the background by a shell, the tests would ignore Ctrl-C, and so would fastamp.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
EMULATED = pytest.param("emulated", marks=pytest.mark.emulated)
COUNTED = {"cuda": "GPU tests", "emulated": "tests of the emulated CUDA kernels"}
"""The marks that are counted, and the names of their tests in the summary."""
AVAILABLE = fastamp.backends()
BEFORE = pytest.StashKey[int]()
"""How many allocations a GPU had made before a test."""
AT_LARGE = "FASTAMP_AT_LARGE" in os.environ
PLAYED = os.environ.get("FASTAMP_GPU") == "emulated"
"""The emulated kernels play the GPU: GPU tests run on them, but for those that need a real one."""
LONGEST = ["test_parallel.py", "test_shards.py", "test_examples.py", "test_train.py"]
LONGEST += ["test_resume.py", "test_loader.py", "test_bench.py", "test_lean.py", "test_faults.py"]
"""The files to start with, so that no worker is left with a long one at the end."""
SKIPPED = os.environ.get("FASTAMP_SKIPPED")
"""A file for the names of tests that are skipped for want of a package: CI runs them next."""

installed = Path(str(importlib.metadata.distribution("fastamp").locate_file("fastamp")))
if (installed / "__init__.py").exists() and installed != Path(fastamp.__file__).parent:
    pytest.exit("these tests import the source tree, not the installed package: run pytest")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers for `-n auto`: one for each core that may be used, up to 4.

    Files are the unit of work, and with 4 workers the longest one already takes most of the time.
    A worker and the processes of its tests take up to 2 GB of memory.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores or 1, 4)


def _to_emulate(items: list[pytest.Item]) -> list[pytest.Item]:
    """Keep of the emulated kernels' tests those of the step: one run of each, or all at large."""
    runs: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("emulated") and item.path.parent.name == "step":
            runs.setdefault(item.nodeid.partition("[")[0], []).append(item)
    if AT_LARGE:
        used = {id(item) for of_test in runs.values() for item in of_test}
    else:  # the parameters that a hash of its name picks
        used = {id(each[zlib.crc32(name.encode()) % len(each)]) for name, each in runs.items()}
    return [i for i in items if id(i) in used or not i.get_closest_marker("emulated")]


def _pairs(item: pytest.Item) -> set[tuple[tuple[str, int], ...]]:
    """Return the pairs of values that the parameters of a test have, or its only value."""
    values = sorted((name, id(value)) for name, value in item.callspec.params.items())
    return {*itertools.combinations(values, min(2, len(values)))}


def _pairwise(items: list[pytest.Item]) -> list[pytest.Item]:
    """Keep of pairwise tests, and of all on a GPU, enough runs for every pair of values.

    At large all run. Runs on a GPU and on the emulated kernels cover all pairs by themselves: they
    may be skipped.
    """
    runs: dict[str, list[pytest.Item]] = {}
    for item in items:
        if (item.get_closest_marker("pairwise") or runs_for_cuda(item)) and not AT_LARGE:
            counted = [name for name in COUNTED if item.get_closest_marker(name)]
            runs.setdefault(f"{item.nodeid.partition('[')[0]} {counted}", []).append(item)
    redundant = set()
    for of_test in runs.values():
        of_test.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))  # the same ones each time
        missing = set().union(*map(_pairs, of_test))
        while missing:
            best = max(of_test, key=lambda item: len(_pairs(item) & missing))
            missing -= _pairs(best)
            of_test.remove(best)
        redundant.update(map(id, of_test))
    return [item for item in items if id(item) not in redundant]


def _is_used(item: pytest.Item) -> bool:
    """Leave out what is for large, and runs for the GPU of tests that do not ask for a device."""
    if item.get_closest_marker("at_large") and not AT_LARGE:
        return False
    return asks_for_gpu(item) or not runs_for_cuda(item)


def _missing_gpu(item: pytest.Item) -> str | None:
    """Say why a GPU test cannot run here."""
    if PLAYED:
        return None if runs_for_cuda(item) else "only a GPU can run it"
    return None if torch.cuda.is_available() else "no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the reports that are counted, and skip GPU tests where there is no GPU."""
    items[:] = _pairwise(_to_emulate([item for item in items if _is_used(item)]))
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    for item in items:
        marks = [name for name in COUNTED if item.get_closest_marker(name)]
        item.user_properties += [("counted", name) for name in marks]
        if "cuda" in marks and (missing := _missing_gpu(item)):
            item.add_marker(pytest.mark.skip(reason=missing))


def pytest_collectreport(report: pytest.CollectReport | pytest.TestReport) -> None:
    """Note what is skipped for want of a package."""
    reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
    if SKIPPED and report.skipped and "could not import" in reason:
        with Path(SKIPPED).open("a") as file:
            file.write(f"{report.nodeid}\n")


pytest_runtest_logreport = pytest_collectreport


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests of the CUDA kernels ran, on a GPU or emulated, and how many did not."""

    def count(name: str, *outcomes: str) -> int:
        reports = [r for outcome in outcomes for r in terminalreporter.stats.get(outcome, [])]
        return sum(("counted", name) in getattr(r, "user_properties", ()) for r in reports)

    counts = [
        f"{title}: {count(name, 'passed', 'failed')} ran, {count(name, 'skipped')} skipped"
        for name, title in COUNTED.items()
    ]
    terminalreporter.write_line("; ".join([f"backends: {', '.join(AVAILABLE)}", *counts]))


def _use(name: str) -> Iterator[str]:
    if PLAYED and name == "cuda":
        name = "emulated"
    if name == "emulated":
        table = emulated_table()
        if table is None:
            pytest.skip("no compiled core, no C++ compiler or no glibc")
        with use_emulated(table):
            yield name
        return
    if name not in AVAILABLE:
        pytest.skip(f"backend {name} is not available")
    with _ops.use_only(name):
        yield name


@pytest.fixture(autouse=True, scope="module")
def old_objects_left_out() -> None:
    """Exclude earlier objects from garbage collection, here and in forked processes.

    The modules that earlier files have imported made each collection 0.15 s longer.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def threads_restored() -> Iterator[None]:
    """Restore torch's number of threads after a test that has changed it."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(params=["fallback", "cpu", EMULATED, CUDA])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once for every backend."""
    yield from _use(request.param)


@pytest.fixture(params=["cpu", EMULATED, CUDA])
def compiled(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once for every compiled backend."""
    yield from _use(request.param)


@pytest.fixture(params=[EMULATED, CUDA])
def apart(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once for every backend with a device apart from the host, real or emulated."""
    yield from _use(request.param)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Return the device that the test's backend serves; a GPU test has to make a tensor on it."""
    if PLAYED or not request.node.get_closest_marker("cuda"):
        return getattr(request, "param", "cpu")
    request.node.stash[BEFORE] = count_allocations()
    return "cuda"


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Fail a GPU test that has passed without a tensor on a GPU."""
    result = yield
    if BEFORE in pyfuncitem.stash:
        check_allocated(pyfuncitem.stash[BEFORE])
    return result


@pytest.fixture
def small(request: pytest.FixtureRequest) -> bool:
    """Return whether the test has to be small: in the suite, on the emulated kernels."""
    is_emulated = PLAYED or request.node.get_closest_marker("emulated") is not None
    return is_emulated and not AT_LARGE
