"""What streams and threads may do beside a GPU, under a model that finds what nothing orders."""

from __future__ import annotations

import importlib
import os
import types
from pathlib import Path

import pytest
import torch
from support.stream_model import Model
from support.stream_schedules import ALL, PROGRAMS, prefetching, run

import fastamp
from fastamp import _ops
from fastamp.data import making, runners
from fastamp.data.copies import CudaCopies
from fastamp.data.memory import Memory

SOURCE = Path(prefetching.__file__)
SCHEDULES = int(os.environ.get("FASTAMP_EXAMPLES", "40"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_schedules_of_all_kinds_are_in_order(name):
    for seed in range(SCHEDULES):
        assert run(name, seed) == [], seed


@pytest.mark.parametrize("feature", ["nothing", *ALL])
def test_a_pass_is_in_order_with(feature):
    """Each was out of order once: see what the next test breaks."""
    for seed in range(12):
        assert run("prefetch", seed, (feature,)) == [], seed


# What is replaced in copies.py by what, and what the model finds then, with which feature.
BREAKS = {
    "the batch is read while it is copied": (
        "stream.wait_event(copied.done)",
        "copied.done.wait(torch.cuda.current_stream())",
        ("devices",),
        "a read of cuda",
    ),
    "the thread has no device": ("torch.cuda.set_device(self._device)", "", (), "a context"),
    "copies wait for the consumer": (
        "with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(self._side):",
        "self._side.wait_stream(current)\n        with torch.cuda.stream(self._side):",
        (),
        "a copy waits for work",
    ),
    "a buffer is filled while it is copied": (
        "reading.synchronize()",
        "pass",
        ("refilled",),
        "a write of pinned",
    ),
    "memory is used again while it is read": (
        "tensor.record_stream(stream)",
        "pass",
        ("streams",),
        "a write of cuda",
    ),
    "a slice is not pinned": (
        "tensor.stride() != target.stride() or not",
        "not",
        ("slices",),
        "a copy goes through pageable memory",
    ),
    "what the iterable makes there is not waited for": (
        "self._side.wait_stream(current)",
        "pass",
        ("streams", "made there"),
        "a read of cuda",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_the_model_finds_that(name, monkeypatch):
    old, new, features, fault = BREAKS[name]
    source = SOURCE.read_text()
    assert source.count(old) == 1
    broken = types.ModuleType("fastamp.data.copies")
    exec(source.replace(old, new), vars(broken))  # noqa: S102 - our own code, with one line changed
    monkeypatch.setattr(making, "CudaCopies", broken.CudaCopies)
    program = "loader" if name == "the thread has no device" else "prefetch"
    found = (run(program, seed, features, broken) for seed in range(100))
    assert any(each.startswith(fault) for faults in found for each in faults)


def test_a_consumer_far_ahead_of_its_stream_does_not_fill_the_device(monkeypatch):
    model = Model(0)
    monkeypatch.setattr(prefetching, "_LATE", 4)
    monkeypatch.setattr(prefetching, "_sides", {})
    monkeypatch.setattr(model.rng, "random", lambda: 0.8)  # no work is done unless it is waited for
    with model.installed(prefetching):
        data = [torch.ones(3) for _ in range(50)]
        for batch in fastamp.prefetch(data, "cuda:1"):
            model.kernel(batch, writes=[torch.empty(3, device="cuda:1")])
            del batch
    used = {block for pool in model.pools.values() for block in pool if block.device == 1}
    used |= {block for block, _ in model.pending if block.device == 1}
    assert 2 < len(used) < 12


def test_one_batch_is_ahead_beside_a_gpu(monkeypatch):
    made, allocate = [], Memory.allocate
    monkeypatch.setattr(Memory, "allocate", lambda *args: made.append(args) or allocate(*args))
    model = Model(0)
    monkeypatch.setattr(prefetching, "_sides", {})
    with model.installed(prefetching, runners, making), _ops.use_only("fallback"):
        batches = iter(fastamp.DataLoader(torch.arange(100.0), 5, device="cuda:1"))
        for delivered in range(1, 6):
            next(batches)
            model.switch(lambda: not any(t.ready() for t in model.threads[1:]))
            assert len(made) == delivered + 1


def test_all_passes_copy_on_one_stream_of_a_device(monkeypatch):
    """torch hands out 32 in turn, and its allocator keeps memory for each."""
    made, model = [], Model(0)
    monkeypatch.setattr(prefetching, "_sides", {})
    with model.installed(prefetching, runners, making):
        stream = torch.cuda.Stream
        monkeypatch.setattr(torch.cuda, "Stream", lambda *args: made.append(args) or stream(*args))
        for _ in range(5):
            list(fastamp.DataLoader(torch.arange(10.0), 5, device="cuda:1"))
            list(fastamp.prefetch([torch.ones(3)], "cuda:1"))
    assert len(made) == 1


def test_torchs_own_thread_pins_the_batches_of_workers(monkeypatch):
    made, name = [], "torch.utils.data.DataLoader.__iter__"
    monkeypatch.setattr(name, lambda own: made.append(own) or iter(made))
    with Model(0).installed(prefetching, runners, making):
        dataset = [torch.ones(3)] * 8
        iter(fastamp.DataLoader(dataset, 4, num_workers=2, device="cuda:1"))
    assert made[0].pin_memory


class Box(torch.Tensor):
    """A subclass, as torchvision's boxes and masks."""


def test_a_subclass_of_tensor_is_moved_by_its_own_method_to_cuda():
    model = Model(0)
    with model.installed(importlib.import_module("fastamp.data.copies")):
        copies = CudaCopies(torch.device("cuda", 0))
        box, plain = torch.ones(3).as_subclass(Box), torch.ones(3)
        _, copied = copies.start([box, plain])
        assert [type(tensor) for tensor in copied.others] == [Box]
        assert [type(tensor) for tensor in copied.tensors] == [torch.Tensor]
