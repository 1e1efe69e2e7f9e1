"""Hypothesis' settings: the same examples each time, 60 or as many as FASTAMP_EXAMPLES says."""

import os

import pytest

hypothesis = pytest.importorskip("hypothesis")

EXAMPLES = hypothesis.settings(
    max_examples=int(os.environ.get("FASTAMP_EXAMPLES", "60")),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
