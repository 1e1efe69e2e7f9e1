"""The tracker: exact statistics in bounded memory, and no wait for the device."""

from __future__ import annotations

import copy
import math
import pickle
import re
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tracking import Collect, logged, overflowing_run
from support.waits import sync_refused
from torch.utils._python_dispatch import TorchDispatchMode

import fastamp
from fastamp.metrics import tracker


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
    assert made.summary()["x"] == fastamp.ScalarStats(
        4, 2.0, 1.0, 3.0, pytest.approx(math.nan, nan_ok=True)
    )
    np.testing.assert_array_equal(made.history("x")[1], [1.0, math.inf, 3.0, math.nan])
    assert math.isnan(logged([math.nan]).summary()["x"].max)


def test_numbers_of_every_kind_are_taken():
    tensors = [torch.tensor([3.0], dtype=torch.bfloat16), torch.tensor(3.0, requires_grad=True)]
    made = logged([3, np.float32(3), np.array([3.0]), Fraction(3), *tensors])
    made.log_scalar("x", 3.0, np.int32(7))
    assert [a.tolist() for a in made.history("x")] == [[0, 1, 2, 3, 4, 5, 7], [3.0] * 7]


def test_what_is_no_scalar_is_refused_and_leaves_nothing():
    made = fastamp.MetricsTracker()
    tensors = [torch.ones(2, 3), torch.tensor(1j), torch.ones((), device="meta")]
    for value in (1j, None, "a", 10**400, np.ones(2), *tensors):
        with pytest.raises(TypeError, match="value of 'loss': expected one real number, got"):
            made.log_scalar("loss", value, 0)
    for name, step in (("loss", 2**63), (b"loss", 1), ("loss", 0.5)):
        text = f"integer of 64 bits, got name={name!r}, step={step!r}"
        with pytest.raises(TypeError, match=re.escape(text)):
            made.log_scalar(name, 1.0, step)
    assert made.summary() == {}
    with pytest.raises(KeyError, match=r"nothing was logged as 'loss', only as \[\]"):
        made.history("loss")


@pytest.mark.parametrize("capacity", [1, 1e4, "9"])  # a state with 1e4 in it could not be loaded
def test_a_capacity_is_an_integer_of_at_least_2(capacity):
    with pytest.raises(ValueError, match=f"capacity: expected an integer.* got {capacity!r}"):
        fastamp.MetricsTracker(capacity)


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
    assert (after - before < 200_000, peak < 3_000_000) == (True, True)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_a_module_has_a_new_tracker_without_sinks(copied):
    sink = Collect()
    module = torch.nn.Linear(1, 1)
    module.tracker = logged([1.0], capacity=2, sinks=[sink])
    other = copied(module).tracker
    for step in range(9):
        other.log_scalar("y", 2.0, step)
    other.close()
    module.tracker.close()
    assert list(other.summary()) == ["y"]
    assert len(other.history("y")[0]) == 2
    assert sink == [("x", 0, 1.0)]


def test_a_state_takes_the_place_of_what_was_logged():
    sink = Collect()
    made = logged([1.0], sinks=[sink], name="a")
    state = made.state_dict()
    made.log_scalar("a", 2.0, 2)
    made.log_scalar("b", 3.0, 2)
    made.load_state_dict(state)
    assert made.state_dict() == state
    assert made.last_step == 0
    assert [name for name, _, _ in sink] == ["a", "a", "b"]
    made.close()


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


def test_asking_waits_keeps_the_order_and_loses_nothing_if_interrupted(far_away, monkeypatch):
    sink = Collect()
    made = fastamp.MetricsTracker(sinks=[sink])
    with torch.inference_mode():
        values = [torch.tensor(float(step)) if step % 2 else float(step) for step in range(30)]
    for step, value in enumerate(values):
        made.log_scalar("x", value, step)

    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(far_away, "synchronize", interrupt)
        with pytest.raises(KeyboardInterrupt):
            made.flush()
    made.log_scalar("x", 30.0, 30)
    made.close()
    assert far_away.n_waits > 0
    assert sink == [("x", step, float(step)) for step in range(31)]


def test_a_device_far_behind_is_waited_for_rather_than_remembered(far_away):
    made = fastamp.MetricsTracker()
    for step in range(tracker.QUEUE * (tracker.BATCHES_IN_FLIGHT + 3)):
        made.log_scalar("a", torch.zeros(()) if step % 100 == 0 else 0.0, step)
    assert len(made._in_flight) == tracker.BATCHES_IN_FLIGHT
    assert far_away.n_waits > 0


def test_watching_a_scaler_reads_nothing(far_away):
    made = fastamp.MetricsTracker()
    scaler = fastamp.GradScaler("cpu", 16.0)
    overflowing_run(fastamp.GradScaler("cpu", 16.0), "cpu", {1})  # torch 2.8's first reads more
    counts = []
    for watching in (False, True):
        if watching:
            made.watch(scaler, first_step=100)
            made.log_scalar("loss", torch.tensor(7.0), 99)
        with CountReads() as reads:
            overflowing_run(scaler, "cpu", {1})
        counts.append(reads.count)
    assert counts[0] == counts[1]
    assert [step for _, step, _, _ in made._queue] == [*range(99, 106)]  # one value a step
    assert made.history("loss")[1].tolist() == [7.0]
    assert made.history("train/gradient_overflow")[0].tolist() == [101]
    assert made.history("train/loss_scale")[1].tolist() == [8.0, 4.0]


@pytest.mark.cuda
def test_nothing_waits_for_the_gpu(device):
    made = fastamp.MetricsTracker()
    scaler = fastamp.GradScaler(device)
    made.watch(scaler)
    parameter = torch.nn.Parameter(torch.ones(8, device=device))
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=True)
    loss = torch.zeros((), device=device)
    scaler.scale(loss)
    made.log_scalar("loss", loss, 0)
    made.flush()  # pinned memory is there from now on
    with sync_refused():
        for step in range(1, 5000):
            made.log_scalar("loss", loss, step)
            loss += 1
            parameter.grad = torch.ones_like(parameter)
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
    summary = made.summary()
    assert summary["loss"].last == 4998.0
    assert summary["loss"].mean == pytest.approx(4998 * 4999 / 2 / 5000)
    assert summary["train/grad_norm"].count == 4999


@pytest.mark.cuda
def test_streams_are_kept_apart_on_the_gpu(device):
    made = fastamp.MetricsTracker()
    side = torch.cuda.Stream()
    value = torch.zeros((), device=device)
    for step in range(50):
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000)
            late = torch.full((), float(step), device=device)
            made.log_scalar("side", late, step)
            late.fill_(-1.0)
        made.log_scalar("main", value, step)
        value += 1
    for name in ("side", "main"):
        np.testing.assert_array_equal(*made.history(name))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value += 1  # torch warns of a graph without work
        with pytest.raises(RuntimeError, match="captured"):
            made.log_scalar("main", value, 0)
