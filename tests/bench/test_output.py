"""What the bench writes, and what it says where that cannot be written."""

from __future__ import annotations

import json
import os
import stat

import pytest

from fastamp.bench import step
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
