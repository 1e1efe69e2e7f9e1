"""A run that is held to an earlier one: `--baseline`, `--fail-on`."""

from __future__ import annotations

import argparse
import json
import math

import pytest

from fastamp.bench import apart, step
from fastamp.bench.__main__ import main
from fastamp.bench.race import Interval, Plan
from fastamp.bench.record import SCHEMA_VERSION, Measurement, hold, read_bound

COMMAND = ["step", "--rows", "in-a-loop/adamw", "--device", "cpu"]


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


def metric(value, spread):
    return Interval(value=value, low=value * (1 - spread), high=value * (1 + spread))


def hold_to(saved, new, most, name="m"):
    return hold(Measurement(name=name, interval=new), {"metrics": {name: saved}}, most)


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
    ],
)
def test_a_regression_is_beyond_the_bound_and_no_chance(new, spread, bound_, verdict):
    name, most = read_bound(bound_)
    assert hold_to(metric(1.0, spread), metric(new, spread), most, name).verdict == verdict


def test_a_baseline_without_an_interval_proves_nothing():
    saved = Interval(value=1.0, low=0.0, high=math.nan)
    assert hold_to(saved, metric(0.5, 0.01), -0.05).verdict == "inconclusive"
    assert hold_to(saved, metric(1.0, 0.01), -0.05).verdict == "inconclusive"  # no loss is seen


def test_a_change_of_a_metric_below_0_is_no_percentage():
    saved = Interval(value=-2.3, low=-2.4, high=-2.2)
    assert hold_to(saved, metric(-2.0, 0.01), -0.05).verdict == "inconclusive"


@pytest.mark.parametrize(
    "text", ["speedup", "speedup:5%", "speedup:-5", "speedup:-0%", ":-5%", "a:-100%"]
)
def test_a_bound_is_a_metric_and_a_signed_change(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a metric and a change"):
        read_bound(text)


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
    record = json.loads(json.dumps(saved))
    inside = record
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    other = tmp_path / "other.json"
    other.write_text(json.dumps(record))
    held = ["--fail-on", "of_old:-5%"] * (place == ("schema_version",))
    assert main([*COMMAND, "--baseline", str(other), *held]) == 3
    assert f"no verdict: the baseline cannot be compared: {message}" in capsys.readouterr().err


def test_a_metric_that_the_baseline_lacks_is_a_bad_argument(saved, tmp_path, capsys):
    path = tmp_path / "saved.json"
    path.write_text(json.dumps(saved))
    assert main([*COMMAND, "--baseline", str(path), "--fail-on", "speed:-5%"]) == 2
    message = "argument --fail-on: 'speed' is no metric of the baseline, which has speedup"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("value", [None, 5, "x", [], {}])
def test_a_baseline_of_wrong_content_is_a_bad_argument(value, saved, tmp_path, capsys):
    path, name = tmp_path / "wrong.json", "speedup/in-a-loop/adamw"
    held = [*COMMAND, "--baseline", str(path), "--fail-on", f"{name}:-5%"]
    place = [each["name"] for each in saved["measurements"]].index(name)
    for at in (
        *(("job",), ("environment",), ("measurements",), ("environment", "threads")),
        *(("measurements", place, "name"), ("measurements", place, "interval", "low")),
    ):
        record = json.loads(json.dumps(saved))
        inside = record
        for key in at[:-1]:
            inside = inside[key]
        inside[at[-1]] = value
        path.write_text(json.dumps(record))
        try:
            status = main(held)
        except SystemExit as raised:
            status = raised.code
        said = capsys.readouterr().err.splitlines()
        is_number = at[-1] == "low" and (value is None or type(value) is int)
        assert status in ({0, 1, 3} if is_number else {2, 3}), (at, said)
        assert status != 2 or "error: argument --" in said[-1]


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
