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

# pip has compiled nothing: what is imported is compiled once, and kept for all processes.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Before torch is imported: here and in all processes that tests start, torch computes on one
# thread, unless a test says otherwise. Threads that wait for each other in a busy machine took
# twice as long.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

# That an older torch gets the fallback is a warning, and the test of one file.
if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    os.environ.setdefault("FASTAMP_BACKEND", "fallback")

from support.emulated import emulated_ops, use_emulated

import fastamp
from fastamp import _ops

if TYPE_CHECKING:
    from collections.abc import Iterator

# A shell that starts the tests in the background has them ignore Ctrl-C, and fastamp with them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
EMULATED = pytest.param("emulated", marks=pytest.mark.emulated)
COUNTED = {"cuda": "GPU tests", "emulated": "tests of the emulated CUDA kernels"}
"""What marks are counted, and how the summary calls their tests."""
AVAILABLE = fastamp.backends()
AT_LARGE = "FASTAMP_AT_LARGE" in os.environ
LONGEST = ["test_parallel.py", "test_shards.py", "test_examples.py", "test_train.py"]
LONGEST += ["test_resume.py", "test_loader.py", "test_bench.py", "test_slots.py", "test_faults.py"]
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


def pytest_collection_finish() -> None:
    """Leave modules and tests out of the collections of garbage, here and in forked processes."""
    gc.collect()
    gc.freeze()


def _to_emulate(items: list[pytest.Item]) -> list[pytest.Item]:
    """Leave the emulated kernels what tests the step: one run of each test, or all at large."""
    runs: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("emulated") and item.path.parent.name == "step":
            runs.setdefault(item.nodeid.partition("[")[0], []).append(item)
    if AT_LARGE:
        kept = {id(item) for found in runs.values() for item in found}
    else:  # of the parameters that its name picks
        kept = {id(found[zlib.crc32(name.encode()) % len(found)]) for name, found in runs.items()}
    return [i for i in items if id(i) in kept or not i.get_closest_marker("emulated")]


def _pairs(item: pytest.Item) -> set[tuple[tuple[str, int], ...]]:
    """Return the pairs of values that the parameters of a test have."""
    values = sorted((name, id(value)) for name, value in item.callspec.params.items())
    return {*itertools.combinations(values, 2)}


def _pairwise(items: list[pytest.Item]) -> list[pytest.Item]:
    """Leave tests that are marked so enough runs for every pair of values, or all at large.

    Of what needs a GPU or the emulated kernels, as many as of the rest: it may be skipped.
    """
    runs: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("pairwise") and not AT_LARGE:
            counted = [name for name in COUNTED if item.get_closest_marker(name)]
            runs.setdefault(f"{item.nodeid.partition('[')[0]} {counted}", []).append(item)
    left_out = set()
    for found in runs.values():
        found.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))  # the same ones each time
        missing = set().union(*map(_pairs, found))
        while missing:
            best = max(found, key=lambda item: len(_pairs(item) & missing))
            missing -= _pairs(best)
            found.remove(best)
        left_out.update(map(id, found))
    return [item for item in items if id(item) not in left_out]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the reports that are counted, and skip GPU tests where there is no GPU."""
    items[:] = [item for item in items if AT_LARGE or not item.get_closest_marker("at_large")]
    items[:] = _pairwise(_to_emulate(items))
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    for item in items:
        marks = [name for name in COUNTED if item.get_closest_marker(name)]
        item.user_properties += [("counted", name) for name in marks]
        if "cuda" in marks and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


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
    if name == "emulated":
        ops = emulated_ops()
        if ops is None:
            pytest.skip("no compiled core, no C++ compiler or no glibc")
        with use_emulated(ops):
            yield name
        return
    if name not in AVAILABLE:
        pytest.skip(f"backend {name} is not available")
    with _ops.use_only(name):
        yield name


@pytest.fixture(autouse=True, scope="module")
def old_objects_left_out() -> None:
    """Leave what came before this file out of the collections of garbage that its tests ask for.

    Each looked through the modules that earlier files have imported, for 0.15 s.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def threads_put_back() -> Iterator[None]:
    """Put torch's number of threads back after a test that has changed it."""
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
    """Run the test once for every backend whose device the host waits for, if only in play."""
    yield from _use(request.param)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Return the device that the test's backend serves."""
    chosen = [name for name in ("backend", "compiled", "apart") if name in request.fixturenames]
    return "cuda" if request.getfixturevalue(chosen[0]) == "cuda" else "cpu"


@pytest.fixture
def small(request: pytest.FixtureRequest) -> bool:
    """Return whether the test has to be small: in the suite, on the emulated kernels."""
    return not AT_LARGE and request.node.get_closest_marker("emulated") is not None
