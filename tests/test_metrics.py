"""The tracker: exact statistics in bounded memory, sinks, and no wait for the device."""

from __future__ import annotations

import csv
import json
import math
import pickle
import signal
import sys
import threading
import time
import tracemalloc
import types
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_backend import run_python
from torch.utils._python_dispatch import TorchDispatchMode

import fastamp
from fastamp.metrics import Csv, JsonLines, TensorBoard, tracker, watch

pytestmark = pytest.mark.usefixtures("one_thread")


def logged(values, capacity=4096, sinks=(), name="x"):
    made = fastamp.MetricsTracker(capacity, sinks)
    for step, value in enumerate(values):
        made.log_scalar(name, value, step)
    return made


class Collect(list):
    """A sink that keeps what it gets."""

    def __call__(self, scalars):
        self.extend(scalars)


# --- statistics and histories


@settings(deadline=None, max_examples=60)
@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300),
    capacity=st.integers(2, 40),
    flush_every=st.integers(1, 50),
)
def test_statistics_are_exact_and_the_history_is_an_even_sample(values, capacity, flush_every):
    made = fastamp.MetricsTracker(capacity)
    for step, value in enumerate(values):
        made.log_scalar("x", value, step)
        if step % flush_every == 0:
            made.flush()
    stats = made.summary()["x"]
    assert (stats.count, stats.min, stats.max) == (len(values), min(values), max(values))
    assert stats.last == values[-1]
    assert stats.mean == pytest.approx(math.fsum(values) / len(values), rel=1e-12, abs=1e-9)
    steps, kept = made.history("x")
    assert min(len(values), capacity // 2) <= len(steps) <= capacity
    assert (steps.dtype, kept.dtype) == (np.int64, np.float64)
    assert (steps[0], steps[-1]) == (0, len(values) - 1)
    assert kept.tolist() == [values[step] for step in steps]
    assert len({*np.diff(steps)[:-1].tolist()}) <= 1
    if len(values) <= capacity:
        assert len(steps) == len(values)


def test_values_that_are_not_finite_are_kept_and_leave_the_mean_alone():
    made = logged([1.0, math.inf, 3.0, math.nan])
    stats = made.summary()["x"]
    assert (stats.count, stats.mean, stats.min, stats.max) == (4, 2.0, 1.0, 3.0)
    np.testing.assert_array_equal(made.history("x")[1], [1.0, math.inf, 3.0, math.nan])
    assert math.isnan(stats.last)
    assert math.isnan(logged([math.nan]).summary()["x"].max)


def test_numbers_of_every_kind_are_taken():
    tensors = [torch.tensor([3.0], dtype=torch.bfloat16), torch.tensor(3.0, requires_grad=True)]
    made = logged([3, np.float32(3), np.array([3.0]), Fraction(3), *tensors])
    made.log_scalar("x", 3.0, np.int32(7))
    assert [a.tolist() for a in made.history("x")] == [[0, 1, 2, 3, 4, 5, 7], [3.0] * 7]


def test_what_is_no_scalar_is_refused_and_leaves_nothing():
    made = fastamp.MetricsTracker()
    tensors = [torch.ones(2, 3), torch.tensor(1j), torch.ones((), device="meta")]
    for value in (1j, None, 10**400, np.ones(2), *tensors):
        with pytest.raises(TypeError, match="value of 'loss': expected one real number, got"):
            made.log_scalar("loss", value, 0)
    for name, step in (("loss", 0.5), ("loss", 2**70), (b"loss", 1)):
        with pytest.raises(TypeError, match=f"integer of 64 bits, got name={name!r}, step={step}"):
            made.log_scalar(name, 1.0, step)
    assert made.summary() == {}


def test_arguments_are_checked():
    with pytest.raises(ValueError, match=r"capacity: expected at least 2, .* got 1"):
        fastamp.MetricsTracker(1)
    with pytest.raises(TypeError, match=r"sinks: expected callables, got .*'a'\]"):
        fastamp.MetricsTracker(sinks=[print, "a"])
    made = logged([1.0], name="train/loss")
    with pytest.raises(KeyError, match=r"nothing was logged as 'loss', only as \['train/loss'\]"):
        made.history("loss")
    with pytest.raises(TypeError, match=r"source: expected a GradScaler, .* got 3"):
        made.watch(3)


def test_memory_does_not_grow_with_the_number_of_values():
    tracemalloc.start()
    try:
        made = logged(map(float, range(20_000)))
        before, _ = tracemalloc.get_traced_memory()
        for step in range(100_000):
            made.log_scalar("x", float(step), step)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 200_000
    assert peak < 3_000_000


def test_threads_may_log_at_once(monkeypatch):
    monkeypatch.setattr(tracker, "QUEUE", 64)
    sink, before_s = Collect(), sys.getswitchinterval()
    made = fastamp.MetricsTracker(sinks=[sink])
    sys.setswitchinterval(1e-6)
    with ThreadPoolExecutor(4) as pool:
        for name in "abcd":
            pool.submit(lambda name=name: [made.log_scalar(name, 1.0, i) for i in range(10_000)])
    sys.setswitchinterval(before_s)
    made.flush()
    for name in "abcd":
        assert [step for n, step, _ in sink if n == name] == list(range(10_000))


# --- values on a device


class CountReads(TorchDispatchMode):
    """Counts what brings values to the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.count += func.overloadpacket is torch.ops.aten._local_scalar_dense
        self.count += func.overloadpacket is torch.ops.aten._to_copy and "device" in kwargs
        return func(*args, **kwargs)


class FarAway:
    """An event that comes when the test says so."""

    arrived = False
    n_queries = n_waits = 0

    def query(self):
        self.n_queries += 1
        return self.arrived

    def synchronize(self):
        self.n_waits += not self.arrived


@pytest.fixture
def far_away(monkeypatch):
    """Take every tensor for one on a device that has not computed it yet."""
    event, start = FarAway(), tracker.Transfer.__init__

    def start_far_away(self, *args):
        start(self, *args)
        self._event = event

    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    monkeypatch.setattr(tracker.Transfer, "__init__", start_far_away)
    return event


def test_a_device_tensor_is_not_read_before_it_is_ready(far_away):
    sink = Collect()
    made = fastamp.MetricsTracker(sinks=[sink])
    loss = torch.zeros((), dtype=torch.float64)
    with CountReads() as reads:
        for step in range(2 * tracker.QUEUE):
            made.log_scalar("loss", loss, step)
            loss += 1  # in place: what was logged must not change
        assert far_away.n_queries > 0
        assert (reads.count, far_away.n_waits, sink) == (0, 0, [])
        far_away.arrived = True
        for step in range(tracker.QUEUE):
            made.log_scalar("lr", 0.1, step)
        assert len(sink) == 3 * tracker.QUEUE
        assert (reads.count, far_away.n_waits) == (0, 0)
    steps, values = made.history("loss")
    np.testing.assert_array_equal(steps, values)
    assert made.summary()["loss"].mean == (2 * tracker.QUEUE - 1) / 2


def test_asking_waits_and_keeps_the_order(far_away):
    sink = Collect()
    with torch.inference_mode():
        made = logged([torch.tensor(float(step)) for step in range(9)], sinks=[sink])
    for step in range(9, 3000):
        made.log_scalar("x", float(step) if step % 2 else torch.tensor(float(step)), step)
    made.flush()
    assert far_away.n_waits > 0
    assert sink == [("x", step, float(step)) for step in range(3000)]


def test_a_device_far_behind_is_waited_for_rather_than_remembered(far_away):
    made = fastamp.MetricsTracker()
    for step in range(tracker.QUEUE * (tracker.BATCHES_IN_FLIGHT + 3)):
        made.log_scalar("a", torch.zeros(()) if step % 100 == 0 else 0.0, step)
    assert len(made._in_flight) == tracker.BATCHES_IN_FLIGHT
    assert far_away.n_waits > 0


@pytest.mark.cuda
def test_nothing_waits_for_the_gpu():
    made = fastamp.MetricsTracker()
    scaler = fastamp.GradScaler("cuda")
    made.watch(scaler)
    parameter = torch.nn.Parameter(torch.ones(8, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=True)
    loss = torch.zeros((), device="cuda")
    scaler.scale(loss)
    made.log_scalar("loss", loss, 0)
    made.flush()  # pinned memory is there from now on
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 5000):
            made.log_scalar("loss", loss, step)
            loss += 1
            parameter.grad = torch.ones_like(parameter)
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    summary = made.summary()
    assert summary["loss"].last == 4998.0
    assert summary["loss"].mean == pytest.approx(4998 * 4999 / 2 / 5000)
    assert summary["train/grad_norm"].count == 4999


@pytest.mark.cuda
def test_streams_are_kept_apart_on_the_gpu():
    made = fastamp.MetricsTracker()
    side = torch.cuda.Stream()
    value = torch.zeros((), device="cuda")
    for step in range(50):
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000)
            late = torch.full((), float(step), device="cuda")
            made.log_scalar("side", late, step)
            late.fill_(-1.0)
        made.log_scalar("main", value, step)
        value += 1
    for name in ("side", "main"):
        np.testing.assert_array_equal(*made.history(name))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match="captured"):
        made.log_scalar("main", value, 0)


# --- sinks


def test_sinks_get_every_value_in_order_until_the_tracker_is_closed():
    sink, batches = Collect(), []
    made = logged(map(float, range(10_000)), capacity=2, sinks=[sink, batches.append])
    made.close()
    made.log_scalar("x", 2.0, 1)
    made.close()
    assert made.summary()["x"].count == 10_001
    assert sink == [("x", step, float(step)) for step in range(10_000)]
    assert [len(batch) for batch in batches] == [tracker.QUEUE, tracker.QUEUE, 10_000 % 4096]


def test_a_sink_that_raises_is_reported_once_and_stops_nothing(caplog):
    def full(scalars):
        made.log_scalar("batches", len(scalars), 0)
        made.flush()
        scalars.clear()
        msg = "no space left"
        raise OSError(msg)

    sink = Collect()
    made = fastamp.MetricsTracker(sinks=[full, sink])
    for step in range(20_000):
        made.log_scalar("x", 0.5, step)
    made.close()
    (report,) = caplog.messages
    assert "no space left" in report
    assert sum(name == "x" for name, _, _ in sink) == made.summary()["x"].count == 20_000


@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_files_hold_what_was_logged_and_are_continued(tmp_path, kind):
    path = tmp_path / "new" / "run"
    names, values = ['a "b"', "c,d", "é"], [0.1, math.inf, -math.inf, 1e-300, math.nan, 3]
    expected = []
    for run in range(2):
        for name in names:
            logged(values, sinks=[kind(path)], name=name).close()
            expected += [(name, step, repr(float(value))) for step, value in enumerate(values)]
        if run == 0:
            with path.open("ab") as file:
                file.write(b'{"name": "a", "st')  # killed in the middle of a line
    text = path.read_text(encoding="utf-8")
    if kind is JsonLines:
        rows = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
        rows = [(row["name"], row["step"], row["value"]) for row in rows]
    else:
        header, *rows = csv.reader(text.splitlines())
        assert header == ["name", "step", "value"]
    assert [(name, int(step), repr(float(value))) for name, step, value in rows] == expected


@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_a_file_of_something_else_is_left_alone(tmp_path, kind):
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ValueError, match="path: expected a file that starts with"):
        kind(path)
    assert path.read_text() == "mine"
    with pytest.raises(OSError, match=str(tmp_path)):
        kind(tmp_path)


def test_flushed_values_survive_a_kill(tmp_path):
    code = f"""
import os, signal, fastamp
tracker = fastamp.MetricsTracker(sinks=[fastamp.metrics.JsonLines({str(tmp_path / "run.jsonl")!r})])
for step in range(10_000):
    tracker.log_scalar("loss", step / 2, step)
tracker.flush()
tracker.log_scalar("loss", 1.0, 10_000)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_python(code).returncode == -signal.SIGKILL
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert rows == [{"name": "loss", "step": s, "value": s / 2} for s in range(10_000)]


def test_what_is_left_is_written_at_exit(tmp_path):
    path = tmp_path / "run.csv"
    code = f"""
import fastamp
tracker = fastamp.MetricsTracker(sinks=[fastamp.metrics.Csv({str(path)!r})])
tracker.log_scalar("loss", 0.5, 3)
del tracker
raise SystemExit(0)
"""
    result = run_python(code)
    assert (result.returncode, result.stderr) == (0, "")
    assert path.read_text() == "name,step,value\nloss,3,0.5\n"


def test_tensorboard_gets_every_value(tmp_path):
    pytest.importorskip("tensorboard")
    logged([0.0, 0.5, 1.0], sinks=[TensorBoard(tmp_path)], name="train/loss").close()
    code = f"""
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator({str(tmp_path)!r})
events.Reload()
print([(e.step, e.value) for e in events.Scalars("train/loss")])
"""
    assert run_python(code).stdout.strip() == "[(0, 0.0), (1, 0.5), (2, 1.0)]"


def test_a_plot_is_drawn_without_a_display(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="nothing was logged"):
        fastamp.MetricsTracker().plot(tmp_path / "plot.png")
    made = logged([math.nan, 1.0, 0.5])
    made.log_scalar("y", 1.0, 1)
    made.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


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


def test_importing_fastamp_imports_no_extra():
    code = """
import sys, torch
before = {*sys.modules}  # torch itself imports pynvml
import fastamp
print({"matplotlib", "tensorboard", "pynvml"} & ({*sys.modules} - before))
"""
    assert run_python(code).stdout.strip() == "set()"


# --- what is watched


def overflowing_run(scaler, on_device, bad_steps, n_steps=6, *, fused=True):
    parameter = torch.nn.Parameter(torch.ones(4, device=on_device))
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=fused)
    for step in range(n_steps):
        scale = scaler.scale(torch.ones((), device=on_device))
        value = math.inf if step in bad_steps else 1.0
        parameter.grad = torch.full_like(parameter, value) * scale.detach()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
    return parameter


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


def test_watching_a_scaler_reads_nothing(far_away):
    made = fastamp.MetricsTracker()
    scaler = fastamp.GradScaler("cpu", 16.0)
    counts = []
    for watching in (False, True):
        if watching:
            made.watch(scaler, first_step=100)
        with CountReads() as reads:
            overflowing_run(scaler, "cpu", {1})
        counts.append(reads.count)
    assert counts[0] == counts[1]
    assert made.history("train/gradient_overflow")[0].tolist() == [101]
    assert made.history("train/loss_scale")[1].tolist() == [8.0, 4.0]


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


def test_without_a_gpu_there_is_nothing_to_watch(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = fastamp.MetricsTracker()
    made.watch("cuda")
    made.watch("cpu")
    assert gpu_threads() == []
