"""Weights & Biases without a network: what a run's file holds afterwards."""

from __future__ import annotations

import json
import math
import struct
import time

import pytest
from support.processes import run_python
from support.tracking import overflowing_run
from support.trainers import MARKS, batches, fit, make_module, make_plugin, pl

import fastamp
from fastamp.integrations.wandb import WandbSink

wandb = pytest.importorskip("wandb")
__all__ = ["batches", "pl"]  # fixtures
pytestmark = MARKS
BLOCK = 32768  # of the LevelDB log in which W&B writes


def read_log(data):
    """Return W&B's records: the pieces of its log, joined up to each last one."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, joined, records = 7, b"", []  # behind the file's own header
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
        _crc, length, kind = struct.unpack_from("<IHB", data, at)
        joined += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in {1, 4}:  # a whole record, or its last piece
            records.append(Record.FromString(joined))
            joined = b""
    return records


class Run:
    """An offline run, and what its file says once it is finished."""

    def __init__(self, folder):
        settings = wandb.Settings(mode="offline", silent=True, root_dir=str(folder))
        self.run = wandb.init(project="tests", settings=settings)
        self._folder = folder

    def read(self):
        """Return the rows that were logged, as dicts, and the names with their x axis."""
        self.run.finish()
        (path,) = self._folder.glob("wandb/offline-run-*/*.wandb")
        records, deadline_s = [], time.monotonic() + 30
        while not any(record.HasField("exit") for record in records):  # of W&B's own process
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
            records = read_log(path.read_bytes())
        rows = [
            {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
            for r in records
            if r.HasField("history")
        ]
        metrics = [r.metric for r in records if r.HasField("metric")]
        return rows, {metric.name: metric.step_metric for metric in metrics}


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    yield run
    run.run.finish()


def column(rows, name):
    return [(row["fastamp/step"], row[name]) for row in rows if name in row]


def test_the_runs_file_holds_the_loss_scale_and_the_overflows_by_the_trackers_steps(run):
    tracker = fastamp.MetricsTracker(sinks=[WandbSink()])
    scaler = fastamp.GradScaler("cpu", init_scale=16.0)
    tracker.watch(scaler)
    for step in range(5):
        run.run.log({"own": step})
        for name in ("train/loss", "a*b"):  # W&B cannot define the second one
            tracker.log_scalar(name, step / 2, step, time_s=100.0 + step)
        overflowing_run(scaler, "cpu", {0} if step == 2 else {}, 1)
    tracker.close()
    rows, axes = run.read()
    assert column(rows, "train/loss_scale") == [(0, 16.0), (3, 8.0)]
    assert column(rows, "train/gradient_overflow") == [(2, 1.0)]
    assert column(rows, "train/skipped_steps") == [(2, 1.0)]
    assert [value for _, value in column(rows, "train/grad_norm")] == [2, 2, math.inf, 2, 2]
    assert column(rows, "train/loss") == column(rows, "a*b") == [(i, i / 2) for i in range(5)]
    assert [row["_timestamp"] for row in rows if "a*b" in row] == [100.0 + i for i in range(5)]
    assert [row["own"] for row in rows if "own" in row] == list(range(5))
    assert len(rows) == 10  # one of each step, and the loop's own
    assert axes.pop("fastamp/step") == ""
    names = ["loss", "grad_norm", "loss_scale", "gradient_overflow", "skipped_steps"]
    assert axes == {f"train/{name}": "fastamp/step" for name in names}


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


@pytest.mark.parametrize(
    ("precision", "is_enabled", "scales"),
    [
        ("16-mixed", True, [2048.0, 4096.0]),
        ("bf16-mixed", True, [None, None]),
        ("32-true", False, [None, None]),
    ],
)
def test_a_trainers_precision_is_logged_at_each_epochs_end(
    pl, batches, run, precision, is_enabled, scales
):
    from fastamp.integrations.wandb import AmpWandbCallback

    options = {"callbacks": AmpWandbCallback(), "max_epochs": 2}
    fit(pl, make_module(pl), batches, plugins=[make_plugin(precision)], **options)
    rows, _ = run.read()
    assert [row["amp/precision"] for row in rows] == [precision] * 2
    assert [row["amp/enabled"] for row in rows] == [is_enabled] * 2
    assert [row["amp/loss_scale"] for row in rows] == scales


def test_without_a_run_the_callback_is_silent(pl, batches, capfd):
    from fastamp.integrations.wandb import AmpWandbCallback

    fit(pl, make_module(pl), batches[:2], callbacks=AmpWandbCallback(), precision="32-true")
    assert wandb.run is None
    assert "wandb" not in capfd.readouterr().err
