"""The backends of a timer on the host."""

from __future__ import annotations

import pytest

import fastamp
from fastamp import Timer, _ops


@pytest.fixture(params=["fallback", "cpu"])
def backend(request):
    if request.param not in fastamp.backends():
        pytest.skip(f"backend {request.param} is not available")
    with _ops.use_only(request.param):
        yield request.param


@pytest.fixture
def timer(backend):
    return Timer("cpu")
