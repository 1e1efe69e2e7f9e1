"""Races in the tests' own process, where what a test patches is seen, on a quiet machine."""

from __future__ import annotations

import sys

import pytest

from fastamp.bench import apart, cores, measure
from fastamp.bench.race import Plan


@pytest.fixture(autouse=True)
def _here(monkeypatch, request):
    """Make no processes, unless a test asks for them, few builds, and count no neighbours.

    The folders of tasks stay out of other tests' processes: one has a json.py.
    """
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(cores, "_read", dict)
    monkeypatch.setattr(measure, "SHARES_BLOCKS", 3)
    monkeypatch.setattr(measure, "PLAN", Plan(rounds=8, build_s=0.01, builds=(3,)))
    if "processes" not in request.fixturenames:
        monkeypatch.setattr(apart, "run_apart", lambda work, *args: work(*args))


@pytest.fixture
def processes():
    """Let builds be made in fresh processes."""
