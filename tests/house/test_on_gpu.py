"""The command for a machine with a GPU, on one that has none: what it tells, and how it ends."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from support.gpu_soak import main as soak

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "on_gpu.sh"
# bash is all that it finds: neither nvidia-smi nor Python
ALONE = {"PATH": "/usr/bin:/bin", "PYTHON": "/no/python"}


def run(*words):
    done = subprocess.run(["bash", SCRIPT, *words], capture_output=True, text=True, env=ALONE)  # noqa: PLW1510
    return done.returncode, done.stdout, done.stderr


def parts():
    status, out, err = run("--list")
    assert (status, err) == (0, "")
    return [
        re.fullmatch(r"(\w+) +(\d) +(.+?) *\|.*", line).groups() for line in out.splitlines()[1:]
    ]


def test_the_list_needs_nothing_and_tells_parts_of_less_than_eight_minutes():
    found = parts()
    assert [name for name, _, _ in found][:2] == ["tests", "captures"]
    assert all(int(minutes) < 8 for _, minutes, _ in found)
    assert all(len(risk) > 10 for _, _, risk in found)


@pytest.mark.skipif(torch.cuda.is_available() or Path("/dev/nvidia0").exists(), reason="a GPU")
def test_every_part_says_that_it_needs_a_gpu_before_it_builds_anything():
    for words in [[name] for name, _, _ in parts()] + [[]]:
        assert run(*words) == (2, "", "on_gpu.sh: needs a GPU, and finds none\n")


def test_a_part_that_is_not_known_is_refused():
    assert run("tests", "nothing") == (2, "", "on_gpu.sh: nothing is no part; --list tells them\n")


def test_the_soak_runs_on_a_cpu_and_finds_a_wrong_batch(monkeypatch, capsys):
    assert soak(["--device", "cpu", "--batches", "30", "--minutes", "0"]) == 0
    assert "30 batches, 0 wrong" in capsys.readouterr().out
    monkeypatch.setattr("fastamp.prefetch", lambda batches, _: (batch + 1 for batch in batches))
    assert soak(["--device", "cpu", "--batches", "30", "--minutes", "0"]) == 1
    assert "batch 0: the sum is" in capsys.readouterr().out
