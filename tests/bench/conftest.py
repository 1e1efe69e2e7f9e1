"""Races in the tests' own process, where what a test patches is seen, on a quiet machine."""

from __future__ import annotations

import pytest

from fastamp.bench import apart, cores


@pytest.fixture(autouse=True)
def _here(monkeypatch, request):
    """Make no processes, unless a test asks for them, and count no neighbours."""
    monkeypatch.setattr(cores, "_read", dict)
    if "processes" not in request.fixturenames:
        monkeypatch.setattr(apart, "run_apart", lambda work, *args: work(*args))


@pytest.fixture
def processes():
    """Let builds be made in fresh processes."""
