"""Where scalars go: callables, which may fail, and TensorBoard's writer."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
import threading
import time

import pytest
from support.processes import run_python
from support.tracking import Collect, logged, overflowing_run

import fastamp
from fastamp.metrics import tracker


def test_sinks_get_every_value_in_order_until_the_tracker_is_closed():
    sink, batches, threads = Collect(), [], set()
    sinks = [sink, batches.append, lambda _: threads.add(threading.get_ident())]
    made = logged(map(float, range(10_000)), capacity=2, sinks=iter(sinks))
    made.close()
    made.log_scalar("x", 2.0, 1)
    made.close()
    assert made.summary()["x"].count == 10_001
    assert sink == [("x", step, float(step)) for step in range(10_000)]
    assert threads == {threading.get_ident()}
    assert [len(batch) for batch in batches] == [tracker.QUEUE, tracker.QUEUE, 10_000 % 4096]
    with pytest.raises(TypeError, match="sinks: expected callables or SummaryWriters, got 'a'"):
        fastamp.MetricsTracker(sinks=[print, "a"])
    with pytest.raises(TypeError, match=r"sinks: expected a list, such as sinks=\[print\]"):
        fastamp.MetricsTracker(sinks=print)


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


def test_only_the_first_rank_has_sinks(monkeypatch):
    sink = Collect()
    made = fastamp.MetricsTracker(sinks=[sink])
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for rank in (1, 0):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        made.log_scalar("x", rank, 7)
        made.flush()
    assert sink == [("x", 7, 0.0)]
    assert made.history("x")[1].tolist() == [1.0, 0.0]


def test_what_is_left_is_written_at_exit():
    code = """
import fastamp
tracker = fastamp.MetricsTracker(sinks=[print])
tracker.log_scalar("loss", 0.5, 3)
del tracker
raise SystemExit(0)
"""
    command = [sys.executable, "-c", code]  # an interpreter of its own, which ends as users' do
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[('loss', 3, 0.5)]\n", "")


def test_tensorboard_gets_every_value(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    start_s = time.time()
    made = logged([0.0, 0.5, 1.0], sinks=[SummaryWriter(tmp_path)], name="train/loss")
    logged_s = time.time()
    time.sleep(0.1)
    made.close()
    code = f"""
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator({str(tmp_path)!r})
events.Reload()
print([(e.step, e.value, e.wall_time) for e in events.Scalars("train/loss")])
"""
    events = ast.literal_eval(run_python(code).stdout)
    assert [event[:2] for event in events] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert all(start_s <= event[2] <= logged_s for event in events)


def test_a_sink_is_told_when_a_value_was_logged():
    sink, scaler = Collect(), fastamp.GradScaler("cpu")
    made = fastamp.MetricsTracker(sinks=[sink])
    made.watch(scaler)
    made.log_scalar("earlier", 1.0, 0, time_s=5.0)
    start_s = time.time()
    overflowing_run(scaler, "cpu", {}, 1)
    logged_s = time.time()
    time.sleep(0.01)
    made.close()
    assert sink[0] == ("earlier", 0, 1.0)
    assert pickle.loads(pickle.dumps(sink[0])).time_s == sink[0].time_s == 5.0
    assert [name for name, _, _ in sink[1:]] == ["train/grad_norm", "train/loss_scale"]
    assert all(start_s <= scalar.time_s <= logged_s for scalar in sink[1:])
