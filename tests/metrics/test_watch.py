"""What a tracker watches: scalers and GPUs."""

from __future__ import annotations

import gc
import json
import math
import pickle
import sys
import threading
import time
import types

import numpy as np
import pytest
import torch
from support.tracking import Collect, overflowing_run

import fastamp
from fastamp.metrics import watch


@pytest.mark.parametrize("fused", [True, False])
def test_a_scaler_tells_its_overflows_norms_and_scales(backend, device, fused):
    sink = Collect()
    made = fastamp.MetricsTracker(sinks=[sink])
    scaler = fastamp.GradScaler(device, 16.0, growth_interval=2)
    made.watch(scaler)
    made.watch(scaler)
    watched = overflowing_run(scaler, device, {1, 2}, fused=fused)
    histories = {name: [a.tolist() for a in made.history(name)] for name in made.summary()}
    assert histories == {
        "train/grad_norm": [[0, 1, 2, 3, 4, 5], [2.0, math.inf, math.inf, 2.0, 2.0, 2.0]],
        "train/loss_scale": [[0, 2, 3, 5], [16.0, 8.0, 4.0, 8.0]],
        "train/gradient_overflow": [[1, 2], [1.0, 1.0]],
        "train/skipped_steps": [[1, 2], [1.0, 2.0]],
    }
    plain = overflowing_run(fastamp.GradScaler(device, 16.0, growth_interval=2), device, {1, 2})
    assert torch.equal(watched, plain)


def test_a_tracker_goes_on_where_another_stopped():
    """Its sample, its statistics and its scaler, as if nothing had been in between."""
    whole, first, second = (fastamp.MetricsTracker(capacity=9) for _ in range(3))
    scalers = [fastamp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    whole.watch(scalers[0], first_step=1)
    first.watch(scalers[1], first_step=1)
    for made, scaler in zip((whole, first), scalers, strict=True):
        overflowing_run(scaler, "cpu", {1, 3}, 20)
        for step in range(50):
            made.log_scalar("x", step * 0.5, step)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    again = fastamp.GradScaler("cpu")
    again.load_state_dict(scalers[1].state_dict())
    first.close()
    second.watch(again, first_step=21)
    for made, scaler in ((whole, scalers[0]), (second, again)):
        overflowing_run(scaler, "cpu", {5}, 10)
        made.log_scalar("x", 9.0, 50)
    assert [*second.summary()] == [*whole.summary()]
    for name in whole.summary():
        assert np.array_equal(second.history(name), whole.history(name), equal_nan=True)
    assert second.summary()["x"] == whole.summary()["x"]
    assert second.history("train/skipped_steps")[1].tolist() == [1, 2, 3]
    assert second.history("train/loss_scale")[1].tolist() == [8.0, 4.0, 2.0, 1.0]


def test_a_scaler_forgets_trackers_that_are_gone():
    scaler = fastamp.GradScaler("cpu")
    for _ in range(10):
        fastamp.MetricsTracker().watch(scaler)
    gc.collect()
    assert scaler._observers == []


def test_a_scaler_without_scaling_tells_its_norms_until_the_tracker_is_closed():
    scaler = fastamp.GradScaler("cpu", enabled=False)
    made = fastamp.MetricsTracker()
    made.watch(scaler)
    overflowing_run(scaler, "cpu", {1}, 3)
    assert pickle.loads(pickle.dumps(scaler))._observers == []
    made.close()
    overflowing_run(scaler, "cpu", {1}, 3)
    assert made.history("train/grad_norm")[1].tolist() == [2.0, math.inf, 2.0]
    assert made.history("train/gradient_overflow")[0].tolist() == [1]
    assert "train/loss_scale" not in made.summary()


class NVMLError(Exception):
    """What a stand-in of pynvml raises."""


@pytest.fixture
def nvml(monkeypatch):
    """Stand in for pynvml and for torch's view of two GPUs, of which the second tells no power."""

    def power(handle):
        if handle == "GPU-b":
            raise NVMLError
        return 123_456

    fake = types.SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetUtilizationRates=lambda _: types.SimpleNamespace(gpu=87),
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(used=len(handle) * 1000),
        nvmlDeviceGetPowerUsage=power,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(watch, "GPU_INTERVAL_S", 0.005)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    uuids = [types.SimpleNamespace(uuid=uuid) for uuid in "ab"]
    monkeypatch.setattr(torch.cuda, "get_device_properties", uuids.__getitem__)
    return fake


def gpu_threads():
    return [t for t in threading.enumerate() if t.name == "fastamp-gpu"]


def test_each_gpu_is_asked_in_one_thread_by_uuid_until_the_tracker_is_closed(nvml):
    made = fastamp.MetricsTracker()
    made.log_scalar("x", 0.0, 42)
    for name in ("cuda", "cuda:1", "cuda", torch.device("cuda:0"), "cpu"):
        made.watch(name)
    end_s = time.monotonic() + 20
    while len(made.summary()) < 6:
        assert time.monotonic() < end_s
        time.sleep(0.005)
    assert len(gpu_threads()) == 2
    assert [a[0].item() for a in made.history("gpu0/utilization_pct")] == [42, 87.0]
    assert made.history("gpu0/power_w")[1][0] == 123.456
    assert made.history("gpu1/memory_nbytes")[1][0] == 5000
    assert "gpu1/power_w" not in made.summary()
    made.close()
    assert gpu_threads() == []


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_a_driver_that_refuses_is_told_of_in_the_log(nvml, monkeypatch, caplog, broken):
    def refuse(*_):
        msg = "Driver/library version mismatch"
        raise NVMLError(msg)

    monkeypatch.setattr(nvml, broken, refuse)
    made = fastamp.MetricsTracker()
    made.watch("cuda:1")
    assert caplog.messages == ["cuda:1 is not watched: Driver/library version mismatch"]
    made.close()


def test_what_cannot_be_watched_is_an_error_unless_there_is_no_gpu(nvml, monkeypatch):
    made = fastamp.MetricsTracker()
    with pytest.raises(RuntimeError, match="gpu0"):
        made.watch("gpu0")
    with pytest.raises(TypeError, match=r"source: expected a GradScaler .* got .*Linear'"):
        made.watch(torch.nn.Linear(2, 2))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ImportError, match=r"pip install 'fastamp\[gpu\]'"):
        made.watch("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made.watch("cuda")
    assert gpu_threads() == []
