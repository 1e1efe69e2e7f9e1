"""What a tracker watches: scalers, timers, loaders and GPUs."""

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
from support.tracking import Collect, logged, overflowing_run

import fastamp
from fastamp.metrics import TensorBoard, watch


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


def test_skipped_steps_that_are_no_number_are_counted_from_0():
    tracker, scaler = fastamp.MetricsTracker(), fastamp.GradScaler("cpu")
    tracker.log_scalar("train/skipped_steps", math.inf, 3)
    tracker.watch(scaler, first_step=4)
    overflowing_run(scaler, "cpu", {1})
    assert tracker.history("train/skipped_steps")[1].tolist() == [math.inf, 1.0]


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


def test_a_timer_tells_means_since_the_last_flush():
    stats = types.SimpleNamespace(count=0, total=0.0)
    made = logged([0.0] * 6)
    made.watch(types.SimpleNamespace(summary=lambda: {"step/forward": stats}))
    for stats.count, stats.total in [(4, 8.0), (4, 8.0), (6, 9.0), (2, 6.0), (3, 7.0)]:
        made.flush()  # the last but one comes after a reset
    assert [a.tolist() for a in made.history("timer/step/forward")] == [[5] * 3, [2.0, 0.5, 1.0]]


def test_a_timer_that_is_reset_at_every_epoch_tells_the_means_of_each():
    timer, made = fastamp.Timer("cpu"), fastamp.MetricsTracker()
    made.watch(timer)
    for epoch in range(3):
        for _ in range(4 + epoch):
            with timer("step"):
                pass
        made.log_scalar("epoch", 0.0, epoch)
        made.flush()
        mean = timer.summary()["step"].mean
        assert made.history("timer/step")[0].tolist() == [*range(epoch + 1)]
        assert made.history("timer/step")[1][-1] == pytest.approx(mean)
        timer.reset()


def test_a_timer_of_a_resumed_run_is_logged_at_its_last_step():
    timer, made = fastamp.Timer("cpu"), fastamp.MetricsTracker()
    made.watch(timer)
    made.load_state_dict(logged([0.0] * 6).state_dict())
    with timer("step"):
        pass
    made.flush()
    assert made.history("timer/step")[0].tolist() == [5]


def test_a_loader_tells_means_of_its_batches():
    stats = types.SimpleNamespace(batches=10, nbytes=5000, wait_s=1.0, getitem_s=2.0)
    made = fastamp.MetricsTracker()
    made.watch(types.SimpleNamespace(stats=lambda: stats))
    made.flush()
    stats.batches, stats.wait_s = 20, 4.0
    made.flush()
    assert made.history("loader/wait_s")[1].tolist() == [0.1, pytest.approx(0.3)]
    assert set(made.summary()) == {"loader/wait_s", "loader/getitem_s"}


class NVMLError(Exception):
    """What a stand-in of pynvml raises."""


@pytest.fixture
def nvml(monkeypatch):
    """Stand in for pynvml and for torch's view of two GPUs."""

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
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda i: types.SimpleNamespace(uuid="ab"[i])
    )


@pytest.mark.parametrize("module", ["matplotlib", "tensorboard", "pynvml"])
def test_a_missing_package_is_named_with_its_extra(nvml, monkeypatch, module):
    for name in [name for name in sys.modules if module in name.split(".")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    extra, use = {
        "matplotlib": ("plot", lambda: logged([1.0]).plot("x.png")),
        "tensorboard": ("tensorboard", lambda: TensorBoard("x")),
        "pynvml": ("gpu", lambda: logged([1.0]).watch("cuda")),
    }[module]
    with pytest.raises(ImportError, match=rf"pip install 'fastamp\[{extra}\]'"):
        use()


def gpu_threads():
    return [t for t in threading.enumerate() if t.name == "fastamp-gpu"]


def test_gpus_are_asked_in_one_thread_by_uuid(nvml):
    made = fastamp.MetricsTracker()
    made.log_scalar("x", 0.0, 42)
    for name in ("cuda", "cuda:1", "cuda", "cpu"):
        made.watch(name)
    end_s = time.monotonic() + 20
    while len(made.summary()) < 6:
        assert time.monotonic() < end_s
        time.sleep(0.005)
    assert len(gpu_threads()) == 1
    assert [a[0].item() for a in made.history("gpu0/utilization_pct")] == [42, 87.0]
    assert made.history("gpu0/power_w")[1][0] == 123.456
    assert made.history("gpu1/memory_nbytes")[1][0] == 5000
    assert "gpu1/power_w" not in made.summary()
    made.close()
    assert gpu_threads() == []


@pytest.mark.parametrize("uuid", ["b", "MIG-b"])
def test_a_part_of_a_gpu_is_asked_by_its_own_uuid(nvml, monkeypatch, uuid):
    def find(uuid):
        if not uuid.startswith("MIG-b"):
            raise NVMLError
        return uuid

    monkeypatch.setattr(sys.modules["pynvml"], "nvmlDeviceGetHandleByUUID", find)
    properties = types.SimpleNamespace(uuid=uuid)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    made = fastamp.MetricsTracker()
    made.watch("cuda")
    end_s = time.monotonic() + 20
    while len(made.summary()) < 3:
        assert time.monotonic() < end_s
        time.sleep(0.005)
    made.close()
    assert made.history("gpu0/memory_nbytes")[1][0] == 5000


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_a_driver_that_refuses_is_told_of_in_the_log(nvml, monkeypatch, caplog, broken):
    def refuse(*_):
        msg = "Driver/library version mismatch"
        raise NVMLError(msg)

    monkeypatch.setattr(sys.modules["pynvml"], broken, refuse)
    made = fastamp.MetricsTracker()
    made.watch("cuda:1")
    assert caplog.messages == ["cuda:1 is not watched: Driver/library version mismatch"]
    assert gpu_threads() == []
    made.close()


def test_what_is_no_device_is_refused_by_name():
    with pytest.raises(TypeError, match="source: expected a CUDA device, got 'gpu0'"):
        fastamp.MetricsTracker().watch("gpu0")


def test_without_a_gpu_there_is_nothing_to_watch(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = fastamp.MetricsTracker()
    made.watch("cuda")
    made.watch("cpu")
    assert gpu_threads() == []
