"""Weights & Biases without a network: what a run's file holds afterwards."""

from __future__ import annotations

import json
import math
import struct
import time

import pytest
import torch
from support.processes import run_python
from support.trainers import MARKS, batches, fit, make_module, make_plugin, pl

import fastamp
from fastamp.integrations.wandb import WandbSink

wandb = pytest.importorskip("wandb")
__all__ = ["batches", "pl"]  # fixtures
pytestmark = MARKS
BLOCK = 32768  # of the LevelDB log in which W&B writes


def read_log(data):
    """Return W&B's records: the whole pieces of its log, or several joined, first to last."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, joined, records = 7, b"", []  # behind the file's own header
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
        _crc, length, kind = struct.unpack_from("<IHB", data, at)
        joined += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in {1, 4}:  # a whole record, or the last piece of one
            records.append(Record.FromString(joined))
            joined = b""
    return records


class Run:
    """An offline run, and what its file says once it is finished."""

    def __init__(self, folder):
        settings = wandb.Settings(mode="offline", silent=True, root_dir=str(folder))
        self.run = wandb.init(project="tests", settings=settings)
        self._folder = folder

    def records(self):
        """Return what the file holds; W&B's own process writes its end after `finish`."""
        self.run.finish()
        (path,) = self._folder.glob("wandb/offline-run-*/*.wandb")
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s:
            records = read_log(path.read_bytes())
            if any(record.HasField("exit") for record in records):
                return records
            time.sleep(0.05)
        pytest.fail("the run's file has no end")

    def rows(self):
        """Return the rows that were logged, in order, as dicts."""
        histories = [record.history for record in self.records() if record.HasField("history")]
        return [
            {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in history.item}
            for history in histories
        ]


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    yield run
    run.run.finish()


def column(rows, name):
    return [(row["fastamp/step"], row[name]) for row in rows if name in row]


def test_the_runs_file_holds_the_loss_scale_and_the_overflows(run):
    tracker = fastamp.MetricsTracker(sinks=[WandbSink()])
    scaler = fastamp.GradScaler("cpu", init_scale=1024.0)
    tracker.watch(scaler)
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], fused=True)
    for step in range(5):
        optimizer.zero_grad()
        loss = (weight * (math.inf if step == 2 else 1.0)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        tracker.log_scalar("train/loss", loss.item(), step)
        run.run.log({"own": step})
    tracker.close()
    rows = run.rows()
    assert column(rows, "train/loss_scale") == [(0, 1024.0), (3, 512.0)]
    assert column(rows, "train/gradient_overflow") == [(2, 1.0)]
    assert column(rows, "train/skipped_steps") == [(2, 1.0)]
    assert [value for _, value in column(rows, "train/grad_norm")] == [2, 2, math.inf, 2, 2]
    assert [step for step, _ in column(rows, "train/loss")] == list(range(5))
    assert [row["own"] for row in rows if "own" in row] == list(range(5))


def test_the_steps_of_the_tracker_are_the_x_axis_of_its_names_alone(run):
    sink = WandbSink(run.run)
    sink([("loss", 7, 1.0), ("norm", 7, 2.0)])
    sink([("loss", 8, 3.0), ("attn*mlp", 8, 4.0)])  # which W&B does not define
    run.run.log({"own": 1})
    metrics = [r.metric for r in run.records() if r.HasField("metric")]
    assert {m.name: m.step_metric for m in metrics} == {
        "fastamp/step": "",
        "loss": "fastamp/step",
        "norm": "fastamp/step",
    }


def test_a_batch_is_one_row_for_each_step_without_wandbs_own_step():
    class Stub:
        def __init__(self):
            self.rows = []

        def define_metric(self, *args, **kwargs):
            pass

        def log(self, row):
            self.rows.append(row)

    stub = Stub()
    WandbSink(stub)([("a", 1, 0.0), ("b", 1, math.inf), ("a", 2, 1.0)])
    assert stub.rows == [
        {"fastamp/step": 1, "a": 0.0, "b": math.inf},
        {"fastamp/step": 2, "a": 1.0},
    ]


def test_the_time_of_a_row_is_when_its_values_were_logged(run):
    tracker = fastamp.MetricsTracker(sinks=[WandbSink(run.run)])
    for step in range(3):
        tracker.log_scalar("loss", 1.0, step, time_s=100.0 + step)
    tracker.close()
    assert [row["_timestamp"] for row in run.rows() if "loss" in row] == [100.0, 101.0, 102.0]


def test_without_a_run_the_sink_is_refused():
    with pytest.raises(ValueError, match=r"no run of W&B is active; call wandb\.init"):
        WandbSink()


def test_without_wandb_an_error_names_the_extra():
    code = (
        "import sys; sys.modules['wandb'] = None\n"
        "from fastamp.integrations.wandb import WandbSink\n"
        "WandbSink()"
    )
    assert "pip install 'fastamp[wandb]'" in run_python(code).stderr


@pytest.fixture
def callback(pl):
    from fastamp.integrations.wandb import AmpWandbCallback

    return AmpWandbCallback()


def trainer_of(precision):
    if precision.endswith("mixed"):
        return {"plugins": [make_plugin(precision)]}
    return {"precision": precision}


@pytest.mark.parametrize(
    ("precision", "is_enabled", "scales"),
    [
        ("16-mixed", True, [2048.0, 4096.0]),
        ("bf16-mixed", True, [None, None]),
        ("bf16-true", False, [None, None]),
        ("32-true", False, [None, None]),
    ],
)
def test_a_trainers_precision_is_logged_at_each_epochs_end(
    pl, batches, run, callback, precision, is_enabled, scales
):
    data = [(x.to(torch.bfloat16), y) for x, y in batches] if precision == "bf16-true" else batches
    options = {"callbacks": callback, "max_epochs": 2, **trainer_of(precision)}
    fit(pl, make_module(pl), data, **options)
    rows = run.rows()
    assert [row["amp/precision"] for row in rows] == [precision] * 2
    assert [row["amp/enabled"] for row in rows] == [is_enabled] * 2
    assert [row["amp/loss_scale"] for row in rows] == scales


def test_without_a_run_the_callback_is_silent(pl, batches, callback, capfd):
    fit(pl, make_module(pl), batches[:2], callbacks=callback, precision="32-true")
    assert wandb.run is None
    assert "wandb" not in capfd.readouterr().err
