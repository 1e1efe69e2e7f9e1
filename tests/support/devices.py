"""The device that the tests' tensors are made on."""

from __future__ import annotations

import pytest
import torch

from fastamp._ops import choose

HAS_CORE = "cpu" in choose.backends()
needs_core = pytest.mark.skipif(not HAS_CORE, reason="needs the compiled core")
NATIVE = "native" if HAS_CORE else "torch's: no compiled code for cpu"
"""The way of a step that compiled code makes on the CPU where there is any, as with torch 2.10."""
BACKENDS = ("backend", "compiled", "apart")
"""The fixtures that run a test for several backends."""


def device_in_use() -> str:
    """Return the device that the backend in use serves."""
    return "cuda" if choose._only == "cuda" else "cpu"


def parameters_of(item: pytest.Item) -> dict[str, object]:
    """Return the values of a test's parameters."""
    return item.callspec.params if hasattr(item, "callspec") else {}


def runs_for_cuda(item: pytest.Item) -> bool:
    """Say whether a test is one of several runs, a run for each backend, and on the GPU's."""
    parameters = parameters_of(item)
    return any(parameters.get(name) == "cuda" for name in BACKENDS)


def asks_for_gpu(item: pytest.Item) -> bool:
    """Say whether a test that is marked `cuda` has the fixture `device`, which is the GPU."""
    return "device" in item.fixturenames and parameters_of(item).get("device", "cuda") == "cuda"


def count_allocations() -> int:
    """Return how often memory on a GPU was given to a tensor since the process began."""
    stats = [torch.cuda.memory_stats(index) for index in range(torch.cuda.device_count())]
    return sum(each.get("allocation.all.allocated", 0) for each in stats)


def check_allocated(before: int) -> None:
    """Fail a test that has made no tensor on a GPU since the count was `before`."""
    if count_allocations() == before:
        pytest.fail("this test is marked cuda, and made no tensor on a GPU")
