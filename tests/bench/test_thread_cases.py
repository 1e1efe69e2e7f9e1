"""The races of thread workers: each arm gives batches, and does what its name says."""

from __future__ import annotations

import argparse

import pytest

from fastamp.bench import loader, thread_cases


@pytest.mark.parametrize("name", ["waits", "first"])
def test_each_arm_of_a_race_makes_a_pass(name, monkeypatch):
    monkeypatch.setattr(thread_cases, "WORKERS", 1)
    monkeypatch.setattr(thread_cases, "WAITING", 24)
    case = loader.CASES[name](argparse.Namespace(seed=0))
    for arm in (*case.arms, *case.arms):
        case.before(arm)
        case.arms[arm]()
    case.before("")
    assert "batch" in thread_cases.DOCS[name]
