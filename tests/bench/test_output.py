"""What the bench writes, and what it says where that cannot be written, or a baseline be read."""

from __future__ import annotations

import io
import json
import os
import resource
import stat
import sys

import pytest
from support.processes import run_python

from fastamp.bench import apart, step
from fastamp.bench.__main__ import main
from fastamp.bench.race import Plan
from fastamp.bench.record import Report

COMMAND = ["step", "--rows", "in-a-loop/adamw", "--device", "cpu"]
PREFIX = "python -m fastamp.bench step: error: cannot write"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(step, "PLAN", Plan(rounds=8, warmup=2, builds=(3,)))


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


@pytest.mark.parametrize("option", ["--json", "--report"])
def test_a_file_that_cannot_grow_stays_as_it_was(option, tmp_path, capsys):
    path = tmp_path / "found"
    path.write_text("older")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        said = refusal([option, str(path)], capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert said == f"{PREFIX} {option} {path}: File too large\n"
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_text() == "older"


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


def test_a_path_that_cannot_be_written_is_refused_before_any_work(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(step, "run_cases", None)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as raised:
        main([*COMMAND, "--json", str(tmp_path / "file" / "x")])
    assert raised.value.code == 2
    assert "is no file that can be written" in capsys.readouterr().err.splitlines()[-1]


def test_what_the_terminals_encoding_lacks_is_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    monkeypatch.setattr(step, "run_cases", lambda *_: Report(table=[{"a": "b\u00e4se"}]))
    assert main(COMMAND) == 0
    assert b"b\\xe4se" in written.getvalue()


def test_check_without_a_target_is_status_3_and_a_line(tmp_path, capsys):
    assert main([*COMMAND, "--check", "--json", str(tmp_path / "found")]) == 3
    assert "no verdict: step has no targets for --check" in capsys.readouterr().err
    assert (tmp_path / "found").exists()


@pytest.mark.parametrize(
    ("target", "reason"),
    [("pipe", "Broken pipe"), ("/dev/full", "No space left on device")],
)
@pytest.mark.parametrize("command", ["step", "train"])
def test_an_output_that_nobody_takes_is_one_line_and_status_2(command, target, reason, tmp_path):
    words = [*COMMAND, "--json", str(tmp_path / "found")]
    if command == "train":
        words = ["rl", "--device", "cpu"]
    code = f"""
import os, sys
from fastamp.bench import step
from fastamp.bench.__main__ import main
from fastamp.bench.race import Plan
step.PLAN = Plan(rounds=8, warmup=2, builds=(1,))
if {target!r} == "pipe":
    reads, writes = os.pipe()
    os.close(reads)
else:
    writes = os.open({target!r}, os.O_WRONLY)
os.dup2(writes, 1)
sys.exit(main({words}))
"""
    done = run_python(code)
    line = f"python -m fastamp.bench {command}: error: cannot write the standard output: {reason}\n"
    assert (done.returncode, done.stderr) == (2, line)
    if command == "step":  # the work is done: what it found is not lost
        assert json.loads((tmp_path / "found").read_text())["command"] == "step"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The record of a baseline, to which a run is held without an error."""
    path = tmp_path_factory.mktemp("saved") / "saved.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "PLAN", Plan(rounds=8, warmup=2, builds=(3,)))
        patch.setattr(apart, "run_apart", lambda work, *args: work(*args))
        assert main([*COMMAND, "--json", str(path)]) == 0
    return json.loads(path.read_text())


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
