"""A small part of tests/support/loader_kills.py, and that it would find a place that is lost."""

from __future__ import annotations

import pytest
from support.loader_kills import KINDS, try_kind

import fastamp


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_loop_resumes_to_the_bit_with_other_workers(kind):
    assert try_kind(kind, kills=1, seed=1) == []


def test_a_loop_that_resumes_elsewhere_is_found(monkeypatch):
    monkeypatch.setattr(fastamp.DataLoader, "load_state_dict", lambda *_: None)
    assert try_kind("threads", kills=3, seed=0)
