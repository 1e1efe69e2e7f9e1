"""Each test for a GPU asks for the fixture that fails a test without a tensor there."""

from __future__ import annotations

import pytest
import torch
from support.devices import asks_for_gpu, check_allocated, count_allocations

ALLOCATED = "allocation.all.allocated"


def test_every_test_that_is_marked_cuda_asks_for_the_device(request):
    marked = [item for item in request.session.items if item.get_closest_marker("cuda")]
    assert [item.nodeid for item in marked if not asks_for_gpu(item)] == []


def test_a_test_that_makes_no_tensor_on_a_gpu_fails(monkeypatch):
    made = {0: 5, 1: 0}
    stats = {"device_count": lambda: 2, "memory_stats": lambda i: {ALLOCATED: made[i]}}
    for name, fake in stats.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    before = count_allocations()
    with pytest.raises(pytest.fail.Exception, match="made no tensor on a GPU"):
        check_allocated(before)
    made[1] += 1
    check_allocated(before)
