"""The record: how it is written, and how a later run is held to it by `--baseline`."""

from __future__ import annotations

import argparse
import json
import math
import os
import stat

import pytest

from fastamp.bench import apart, step
from fastamp.bench.__main__ import main
from fastamp.bench.race import Interval, Plan
from fastamp.bench.record import SCHEMA_VERSION, Measurement, Report, hold, read_bound

COMMAND = ["step", "--rows", "in-a-loop/adamw", "--device", "cpu"]
NAME = "speedup/in-a-loop/adamw"  # the second measurement
PREFIX = "python -m fastamp.bench step: error: cannot write"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(step, "PLAN", Plan(rounds=8, warmup=2, builds=(3,)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The record of a baseline, to which a run is held without an error."""
    path = tmp_path_factory.mktemp("saved") / "saved.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "PLAN", Plan(rounds=8, warmup=2, builds=(3,)))
        patch.setattr(apart, "run_apart", lambda work, *args: work(*args))
        assert main([*COMMAND, "--json", str(path)]) == 0
    return json.loads(path.read_text())


# What is written


def refusal(words, capsys):
    """Return the one line that a command says with status 2."""
    assert main([*COMMAND, *words]) == 2
    shown, said = capsys.readouterr()
    assert "speed-up" in shown
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize("option", ["--json", "--report"])
def test_a_full_device_is_one_line_and_status_2(option, capsys):
    said = refusal([option, "/dev/full"], capsys)
    assert said == f"{PREFIX} {option} /dev/full: No space left on device\n"


def test_a_file_is_replaced_at_the_end_of_links_and_keeps_its_mode(tmp_path, monkeypatch, capsys):
    path, link = tmp_path / "found", tmp_path / "link"
    path.write_text("older")
    path.chmod(0o640)
    link.symlink_to("found")
    monkeypatch.setattr(os, "fsync", lambda _: os.open("/dev/full/x", 0))  # fails on the way
    assert "cannot write --json" in refusal(["--json", str(link)], capsys)
    assert ({*tmp_path.iterdir()}, path.read_text()) == ({path, link}, "older")
    monkeypatch.undo()
    monkeypatch.setattr(step, "run_cases", lambda *_: Report(table=[{"a": "b"}]))
    assert main([*COMMAND, "--json", str(link)]) == 0
    assert link.is_symlink()
    assert json.loads(path.read_text())["command"] == "step"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


# A baseline


def metric(value, spread):
    return Interval(value=value, low=value * (1 - spread), high=value * (1 + spread))


@pytest.mark.parametrize(
    ("new", "spread", "bound_", "verdict"),
    [
        (1.0, 0.01, "m:-5%", "pass"),
        (0.97, 0.04, "m:-5%", "inconclusive"),  # a pass is the whole interval
        (0.9, 0.01, "m:-5%", "fail"),
        (0.94, 0.03, "m:-5%", "inconclusive"),
        (0.94, 0.06, "m:-5%", "inconclusive"),
        (1.2, 0.01, "m:-5%", "pass"),
        (1.2, 0.01, "m:+10%", "fail"),
        (0.5, 0.01, "m:+10%", "pass"),
        (math.nan, 0.01, "m:-5%", "inconclusive"),
        (-2.0, 0.01, "m:-5%", "inconclusive"),  # its change is no percentage
    ],
)
def test_a_regression_is_beyond_the_bound_and_no_chance(new, spread, bound_, verdict):
    name, most = read_bound(bound_)
    found = Measurement(name=name, interval=metric(new, spread))
    assert hold(found, {"metrics": {name: metric(1.0, spread)}}, most).verdict == verdict
    unknown = Interval(value=1.0, low=0.0, high=math.nan)  # proves nothing
    assert hold(found, {"metrics": {name: unknown}}, most).verdict == "inconclusive"


@pytest.mark.parametrize(
    "text", ["speedup", "speedup:5%", "speedup:-5", "speedup:-0%", ":-5%", "a:-100%"]
)
def test_a_bound_is_a_metric_and_a_signed_change(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a metric and a change"):
        read_bound(text)


def changed(record, place, value):
    """Return a copy of a record with another value at a place."""
    inside = copied = json.loads(json.dumps(record))
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    return json.dumps(copied)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("schema_version",), 2, f"schema_version is 2, not {SCHEMA_VERSION}"),
        (("command",), "amp", "command is amp, not step"),
        (("job", "seed"), 7, "seed is 7, not 0"),
        (("environment", "device_name"), "a toaster", "device_name is a toaster, not "),
    ],
)
def test_a_baseline_of_something_else_is_refused_before_any_work(
    saved, tmp_path, place, value, message, monkeypatch, capsys
):
    monkeypatch.setattr(step, "run_cases", None)
    path = tmp_path / "other.json"
    path.write_text(changed(saved, place, value))
    held = ["--fail-on", "of_old:-5%"] * (place == ("schema_version",))
    assert main([*COMMAND, "--baseline", str(path), *held]) == 3
    assert f"no verdict: the baseline cannot be compared: {message}" in capsys.readouterr().err


def test_a_metric_that_the_baseline_lacks_is_a_bad_argument(saved, tmp_path, capsys):
    path = tmp_path / "saved.json"
    path.write_text(json.dumps(saved))
    assert main([*COMMAND, "--baseline", str(path), "--fail-on", "speed:-5%"]) == 2
    message = "argument --fail-on: 'speed' is no metric of the baseline, which has speedup"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("value", [None, "x", [], {}])
@pytest.mark.parametrize(
    "place",
    [
        *(("job",), ("environment",), ("measurements",), ("environment", "threads")),
        *(("measurements", 1, "name"), ("measurements", 1, "interval", "low")),
    ],
)
def test_a_baseline_of_wrong_content_is_refused(place, value, saved, tmp_path, capsys):
    path = tmp_path / "wrong.json"
    path.write_text(changed(saved, place, value))
    try:
        status = main([*COMMAND, "--baseline", str(path), "--fail-on", f"{NAME}:-5%"])
    except SystemExit as raised:
        status = raised.code
    is_end = place[-1] == "low" and value is None  # one that was not finite
    assert status in ({0, 1, 3} if is_end else {2, 3})
    assert status != 2 or "error: argument --" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("content", [b"", b"5", b"[" * 100_000, b"\xff", b"{}", b"[1]"])
def test_a_baseline_that_is_no_record_is_a_bad_argument(content, tmp_path, capsys):
    path = tmp_path / "wrong.json"
    path.write_bytes(content)
    with pytest.raises(SystemExit) as raised:
        main([*COMMAND, "--baseline", str(path)])
    assert raised.value.code == 2
    assert "wrong.json' cannot be read" in capsys.readouterr().err.splitlines()[-1]


def test_a_metric_that_this_run_lacks_is_no_verdict_and_all_else_is_written(
    saved, tmp_path, capsys
):
    path, now, name = tmp_path / "saved.json", tmp_path / "now.json", "speedup/peer"
    more = [saved["measurements"][0] | {"name": name}]
    path.write_text(json.dumps(saved | {"measurements": saved["measurements"] + more}))
    held = ["--baseline", str(path), "--fail-on", f"{name}:-5%", "--json", str(now)]
    held += ["--report", str(tmp_path / "now.html")]
    assert main([*COMMAND, *held]) == 3
    said = (
        f"{name} since the baseline - (target >= -5 %): inconclusive, this run has no such metric"
    )
    assert said in capsys.readouterr().out
    assert said in (tmp_path / "now.html").read_text().replace("&gt;", ">")
    assert said in [each["text"] for each in json.loads(now.read_text())["measurements"]]
