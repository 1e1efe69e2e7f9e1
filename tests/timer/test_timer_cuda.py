"""The timer on a GPU: one that the tests play, on every backend, and a real one where there is."""

from __future__ import annotations

import pytest
import torch
from support.fake_gpu import FakeGpu, install
from support.waits import sync_refused

import fastamp
from fastamp import _ops
from fastamp.timer.regions import Region

MAX_EVENTS = 4096  # fastamp/timer/events.py


@pytest.fixture
def gpu(backend, monkeypatch):
    gpu = FakeGpu()
    install(gpu, monkeypatch)
    return gpu


def test_a_timer_of_a_gpu_without_kernels_has_the_cores_regions_and_no_warning(gpu, monkeypatch):
    def refuse(_, device):
        msg = f"no kernels for {device}"
        raise AssertionError(msg)

    monkeypatch.setattr(type(_ops.choose._handles), "__missing__", refuse)
    region = fastamp.Timer("cuda:0")("x")
    assert (type(region) is Region) == (fastamp.backends() == ["fallback"])


def test_a_thousand_regions_wait_for_nothing_and_a_summary_once(gpu):
    timer = fastamp.Timer("cuda:0")
    for i in range(1000):
        with timer("outer"), timer(f"inner {i % 7}"):
            gpu.work(0.5)
    assert gpu.waits == 0
    assert timer.summary()["outer"].count == 1000
    assert gpu.waits == 1
    timer.table()
    assert gpu.waits == 1  # nothing was timed since


def test_nested_regions_and_the_gaps_before_them(gpu):
    timer = fastamp.Timer("cuda:0")
    for _ in range(10):
        with timer("step"):
            gpu.work(1.0)
            with timer("forward"):
                gpu.work(3.0)
            gpu.work(0.25)
        gpu.host_ms = gpu.busy_ms[1] + 2.0  # the host is late: the device has nothing to do
    step, forward = timer.summary().values()
    assert step[:5] == pytest.approx((10, 0.0425, 0.00425, 0.00425, 0.00425))
    assert forward.total == pytest.approx(10 * 0.003)
    assert (step.gap, forward.gap) == pytest.approx((9 * 0.002, 10 * 0.001))
    assert step.host > 0


def test_each_stream_has_its_own_clock_and_work_on_another_is_not_timed(gpu):
    timer = fastamp.Timer("cuda:0")
    for i in range(100):
        gpu.stream = 1 + i % 3
        with timer(f"stream {gpu.stream}"):
            gpu.work(float(gpu.stream))
            gpu.work(50.0, stream=4)
            gpu.stream = 4  # a region ends on the stream where it began
    summary = timer.summary()
    for stream, count in ((1, 34), (2, 33), (3, 33)):
        assert summary[f"stream {stream}"][:2] == (count, pytest.approx(count * stream / 1e3))


def test_events_in_flight_are_bounded_and_what_is_dropped_is_counted(gpu):
    timer = fastamp.Timer("cuda:0")
    for _ in range(5000):
        with timer("x"):
            gpu.work(1.0)
    stats = timer.summary()["x"]
    assert gpu.num_events == MAX_EVENTS
    assert (stats.count, stats.dropped) == (MAX_EVENTS // 2, 5000 - MAX_EVENTS // 2)
    assert stats.total == pytest.approx(stats.count / 1e3)
    assert "x: 2,952 not timed: too many events in flight, or the" in timer.table()
    with timer("x"):
        gpu.work(1.0)
    assert timer.summary()["x"].count == stats.count + 1


def test_a_graph_capture_is_left_alone(gpu):
    timer = fastamp.Timer("cuda:0")
    with timer("outside"):
        gpu.work(1.0)
        gpu.capturing = True
        with timer("captured"):
            gpu.work(1.0)
        with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
            timer.summary()
        gpu.capturing = False
    summary = timer.summary()
    assert summary["outside"][:2] == (1, pytest.approx(0.002))
    assert summary["outside/captured"][:2] == (0, 0)
    assert summary["outside/captured"].dropped == 1
    timer.start("x")
    gpu.capturing = True
    timer.stop("x")
    gpu.capturing = False
    with timer("x"):
        gpu.work(4.0)
    assert timer.summary()["x"][:2] == (1, pytest.approx(0.004))
    assert timer.summary()["x"].dropped == 1


def test_what_was_recorded_before_a_reset_does_not_count(gpu):
    timer = fastamp.Timer("cuda:0")
    with timer("x"):
        gpu.work(1.0)
    timer.start("open")
    gpu.work(2.0)
    timer.reset()
    timer.stop("open")
    summary = timer.summary()
    assert list(summary) == ["open"]
    assert summary["open"].total == pytest.approx(0.002)


def test_events_are_pooled_and_a_day_is_timed_as_exactly_as_a_second(gpu):
    timer = fastamp.Timer("cuda:0")
    gpu.host_ms = 3.6e6 * 24  # float32 milliseconds of a day's absolute time would be 8 ms apart
    for _ in range(1000):
        with timer("x"):
            gpu.work(0.0625)
        gpu.host_ms = gpu.busy_ms[1] + 3.6e6
        gpu.done_ms = gpu.busy_ms[1]
    assert gpu.num_events < 60
    assert timer.summary()["x"].total == pytest.approx(0.0625, rel=1e-6)


def test_a_forked_child_leaves_the_parent_s_device_alone(gpu, monkeypatch):
    timer = fastamp.Timer("cuda:0")
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: pytest.fail("it was used"))
    with timer("x"):
        pass
    assert timer.summary() == {}


RESOLUTION_S = 2e-6  # of the times between two events


class Between:
    """The time between two events of the current stream, whatever the host does meanwhile."""

    def __enter__(self):
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self.events[0].record()
        return self

    def __exit__(self, *_):
        self.events[1].record()

    def elapsed_s(self):
        self.events[1].synchronize()
        return self.events[0].elapsed_time(self.events[1]) / 1e3


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["cuda", "fallback"])
class TestOnAGpu:
    @pytest.fixture
    def timer(self, name, device):
        torch.ones(1, device=device)  # makes the context before anything is timed
        with _ops.use_only(name):
            yield fastamp.Timer(device)

    def test_a_thousand_regions_do_not_synchronize(self, timer):
        x = torch.ones(1 << 20, device="cuda")
        with sync_refused():
            for _ in range(1000):
                with timer("outer"), timer("inner"):
                    x.mul_(1.0)
        stats = timer.summary()["outer/inner"]
        assert stats.count + stats.dropped == 1000
        assert stats.count > 500
        assert 0 < stats.min <= stats.p50 <= stats.max

    def test_the_time_is_the_device_s(self, timer):
        with sync_refused(), Between() as outer, timer("x"), Between() as inner:
            torch.cuda._sleep(50_000_000)
        total = timer.summary()["x"].total
        assert inner.elapsed_s() - RESOLUTION_S <= total <= outer.elapsed_s() + RESOLUTION_S

    def test_work_on_another_stream_is_not_timed(self, timer):
        other = torch.cuda.Stream()
        torch.cuda.synchronize()
        with Between() as outer, timer("x"), torch.cuda.stream(other):
            torch.cuda._sleep(1_000_000_000)  # half a second, on the other stream
        assert timer.summary()["x"].total <= outer.elapsed_s() + RESOLUTION_S

    def test_a_graph_is_captured_and_replayed(self, timer):
        x = torch.zeros(8, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with timer("before"):
            x.add_(0)
        with torch.cuda.graph(graph), timer("captured"):
            x.add_(1)
        with timer("replay"):
            graph.replay()
        summary = timer.summary()
        assert x.tolist() == [1.0] * 8
        assert (summary["captured"].count, summary["captured"].dropped) == (0, 1)
        assert summary["replay"].count == 1
