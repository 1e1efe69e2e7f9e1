"""Fixtures that run one test body over every backend, and the count of GPU tests."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import fastamp
from fastamp import _ops

if TYPE_CHECKING:
    from collections.abc import Iterator

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
GPU_TEST = ("gpu_test", "yes")
AVAILABLE = fastamp.backends()

installed = Path(str(importlib.metadata.distribution("fastamp").locate_file("fastamp")))
if (installed / "__init__.py").exists() and installed != Path(fastamp.__file__).parent:
    pytest.exit("these tests import the source tree, not the installed package: run pytest")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the reports of GPU tests, and skip those where there is no GPU."""
    for item in items:
        if item.get_closest_marker("cuda"):
            item.user_properties.append(GPU_TEST)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many GPU tests ran and how many were skipped."""

    def count(*outcomes: str) -> int:
        reports = [r for outcome in outcomes for r in terminalreporter.stats.get(outcome, [])]
        return sum(GPU_TEST in r.user_properties for r in reports)

    terminalreporter.write_line(
        f"backends: {', '.join(AVAILABLE)}; "
        f"GPU tests: {count('passed', 'failed')} ran, {count('skipped')} skipped"
    )


def _use(name: str) -> Iterator[str]:
    if name not in AVAILABLE:
        pytest.skip(f"backend {name} is not available")
    with _ops.use_only(name):
        yield name


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run tiny models, here and in subprocesses, without threads that wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture(params=["fallback", "cpu", CUDA])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once for every backend."""
    yield from _use(request.param)


@pytest.fixture(params=["cpu", CUDA])
def compiled(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once for every compiled backend."""
    yield from _use(request.param)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Return the device that the test's backend serves."""
    chosen = [name for name in ("backend", "compiled") if name in request.fixturenames]
    return "cuda" if request.getfixturevalue(chosen[0]) == "cuda" else "cpu"
