"""What several files of loader tests share."""

from __future__ import annotations

import gc

import pytest
from support.loading import ends
from support.thread_workers import workers


@pytest.fixture
def no_thread_is_left():
    yield
    gc.collect()
    assert ends(lambda: not workers())
