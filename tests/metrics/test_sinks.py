"""Where scalars go: files, TensorBoard, plots, and callables that fail."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading

import pytest
from support.loading import ends
from support.processes import run_python
from support.tracking import Collect, logged

import fastamp
from fastamp.metrics import Csv, JsonLines, TensorBoard, tracker, writer


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


def test_a_sink_that_blocks_is_waited_for_once_and_what_it_misses_is_counted(monkeypatch, caplog):
    monkeypatch.setattr(writer, "WAIT_S", 0.05)
    goes_on, got, other = threading.Event(), Collect(), Collect()

    def blocks(scalars):
        assert goes_on.wait(60)
        got(scalars)

    made = fastamp.MetricsTracker(sinks=[blocks, other])
    kept = writer.WAITING * tracker.QUEUE
    threads = [
        threading.Thread(target=lambda: [made.log_scalar("x", 0.5, 0) for _ in range(kept)])
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    made.flush()
    assert not any(thread.is_alive() for thread in threads)
    assert made.dropped > 0
    assert len(other) == made.summary()["x"].count == 2 * kept
    (report,) = caplog.messages
    assert "has blocked for 0.05 s" in report
    monkeypatch.setattr(writer, "WAIT_S", 60)
    goes_on.set()
    made.close()
    assert len(got) + made.dropped == 2 * kept


def test_a_thread_of_a_sink_ends_with_its_tracker_and_a_forked_child_has_its_own():
    before, sink = {*threading.enumerate()}, Collect()
    made = fastamp.MetricsTracker(sinks=[sink])
    made.log_scalar("x", 1.0, 0)
    made.flush()
    assert {*threading.enumerate()} - before
    pid = os.fork()
    if pid == 0:
        made.log_scalar("x", 2.0, 1)
        made.flush()
        os._exit(len(sink))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    made.close()
    assert sink == [("x", 0, 1.0)]
    assert ends(lambda: not {*threading.enumerate()} - before)


def test_a_forked_child_leaves_to_its_parent_what_was_logged_before():
    sink = Collect()
    made = fastamp.MetricsTracker(sinks=[sink])
    made.log_scalar("x", 1.0, 0)
    pid = os.fork()
    if pid == 0:
        made.close()  # as at exit
        os._exit(len(sink))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    made.close()
    assert sink == [("x", 0, 1.0)]


def test_a_forked_child_waits_for_no_thread_of_its_parent(monkeypatch):
    sink, has_begun, goes_on = Collect(), threading.Event(), threading.Event()
    made = fastamp.MetricsTracker(sinks=[sink])
    made.log_scalar("x", 1.0, 0)

    def read_slowly(_transfers):
        with made._writers[0]._changed:
            has_begun.set()
            goes_on.wait()
        return {}

    monkeypatch.setattr(tracker, "_read", read_slowly)
    flushing = threading.Thread(target=made.flush)
    flushing.start()
    has_begun.wait()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # instead of a hang
        goes_on.set()
        made.log_scalar("x", 2.0, 1)
        made.close()
        os._exit(len(sink))
    exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    goes_on.set()
    flushing.join()
    made.close()
    assert (exit_code, sink) == (1, [("x", 0, 1.0)])


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


@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_files_hold_what_was_logged_and_are_continued(tmp_path, kind):
    path = tmp_path / "new" / "run"
    names, values = (
        ['a "b"', "c,d", "é", "e\rf", "g\nh"],
        [0.1, math.inf, -math.inf, 1e-300, math.nan, 3],
    )
    expected = []
    for run in range(2):
        for name in names:
            logged(values, sinks=[kind(path)], name=name).close()
            expected += [(name, step, repr(float(value))) for step, value in enumerate(values)]
        if run == 0:
            with path.open("ab") as file:
                file.write(b'{"name": "a", "st')  # killed in the middle of a line
    text = path.read_bytes().decode()
    if kind is JsonLines:
        rows = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
        rows = [(row["name"], row["step"], row["value"]) for row in rows]
    else:
        header, *rows = csv.reader(io.StringIO(text, newline=""))
        assert header == ["name", "step", "value"]
    assert [(name, int(step), repr(float(value))) for name, step, value in rows] == expected


@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_a_file_of_something_else_is_left_alone(tmp_path, kind):
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.txt is not a file that"):
        kind(path)
    assert path.read_text() == "mine"
    with pytest.raises(OSError, match=str(tmp_path)):
        kind(tmp_path)


FOREIGN = [
    b'{"name": "x", "port": 8080}',
    b'{"name": "x", "port": 8080}\n',
    b"{",
    b"nam",
    b"name,step,value",
    b"name,step,value\nx,1,2.0\nnotes: none\n",
    b"name,age,value\n",
    b'{"name": "a", "step": 1, "value": 2.0}\n{"port": 8080}\n',
    b'{"name": "a", "step": 1, "value": 2.0}\nport',
    b"\n",
]


@pytest.mark.parametrize("content", FOREIGN, ids=str)
@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_a_file_that_only_begins_like_ours_is_left_alone(tmp_path, kind, content):
    path = tmp_path / "config"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="config is not a file that"):
        kind(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_half_a_row_is_cut_off_and_odd_names_are_whole_rows(tmp_path, kind):
    names = ["x", 'a"b', "two\nlines", "comma, and more", "\udc80", "é"]
    path = tmp_path / "log"
    kind(path)([(name, -3, value) for name in names for value in (1e-5, math.inf, math.nan)])
    whole = path.read_bytes()
    kind(path)
    assert path.read_bytes() == whole
    path.write_bytes(whole[:-4])
    kind(path)
    rows = whole.splitlines(keepends=True)
    assert path.read_bytes() == b"".join(rows[:-1])


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


NO_MORE_THREADS = """
import _thread, atexit
def refuse(*args):
    raise RuntimeError("can't create new thread at interpreter shutdown")
atexit.register(lambda: setattr(_thread, "start_new_thread", refuse))
"""


@pytest.mark.parametrize("then", ["", NO_MORE_THREADS], ids=["", "as_python_3.12"])
def test_what_is_left_is_written_at_exit(tmp_path, then):
    path = tmp_path / "run.csv"
    code = f"""
import fastamp
tracker = fastamp.MetricsTracker(sinks=[fastamp.metrics.Csv({str(path)!r})])
tracker.log_scalar("loss", 0.5, 3)
del tracker
{then}
raise SystemExit(0)
"""
    command = [sys.executable, "-c", code]  # an interpreter of its own, which ends as users' do
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert result.stderr == ""
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
    with pytest.raises(ValueError, match="Format 'xyz' is not supported"):
        made.plot(tmp_path / "plot.xyz")
    made.plot(tmp_path / "other")  # as savefig names it
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            made.plot(tmp_path / "plot.png")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.png", "plot.png"]
    assert (tmp_path / "plot.png").read_bytes() == (tmp_path / "other.png").read_bytes()


@pytest.mark.parametrize("kind", [Csv, JsonLines])
def test_a_file_stays_where_it_began_and_one_that_was_removed_begins_anew(
    kind, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    sink, expected = kind("run/metrics"), kind("expected")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    for made in (sink, expected):
        made([("x", 0, 1.0)])
    assert (tmp_path / "run/metrics").read_bytes() == (tmp_path / "expected").read_bytes()
    (tmp_path / "run/metrics").unlink()
    sink([("x", 0, 1.0)])
    assert (tmp_path / "run/metrics").read_bytes() == (tmp_path / "expected").read_bytes()


@pytest.mark.parametrize("name", ["cost_$_in_$", r"$\foo$", "a\udcffb"])
def test_a_plot_shows_every_name_as_it_is(name, tmp_path):
    pytest.importorskip("matplotlib")
    logged([1.0], name=name).plot(tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_bytes().startswith(b"<?xml")
