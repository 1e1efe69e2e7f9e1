"""What the doctor says of an installation, and of a loop by the file of its timer."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

import fastamp
from fastamp._ops import choose
from fastamp.bench import doctor, environment
from fastamp.bench.__main__ import main

LOOK = ["doctor", "--device", "cpu"]


@pytest.fixture
def look(capsys, monkeypatch):
    """Return what the doctor says of the installation, from the end of the table on."""
    monkeypatch.setattr(choose, "_only", None)

    def run():
        assert main(LOOK) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def with_units(monkeypatch):
    monkeypatch.setattr(environment, "cpu_features", lambda: {"amx_bf16"})


def forget():
    """Let the next look load the compiled code anew."""
    choose._core.cache_clear()
    choose._tables.cache_clear()
    choose._handles.clear()


def test_compiled_code_that_cannot_be_loaded_is_served_by_python_and_named(look, monkeypatch):
    monkeypatch.setattr(choose, "_is_installed", lambda: True)
    monkeypatch.setattr(choose, "_only", None)
    monkeypatch.delenv("FASTAMP_BACKEND", raising=False)
    monkeypatch.setitem(sys.modules, "fastamp._native", None)
    monkeypatch.delattr("fastamp._native", raising=False)
    forget()
    try:
        with pytest.warns(UserWarning, match="the slower pure-Python .* cannot be loaded "):
            assert fastamp.backends() == ["fallback"]
        said = look()
        assert "cpu     pure Python" in said
        assert "fastamp's compiled code cannot be loaded (import of fastamp._native" in said
        assert "Fix it:" in said
    finally:
        forget()


def test_a_cpu_without_bf16_units_is_named_with_its_remedy(look, monkeypatch, with_units):
    assert "bf16 on cpu" not in look()
    monkeypatch.setattr(environment, "cpu_features", set)
    mend = "Fix it: train in FP32 there, without torch.autocast('cpu')"
    assert f"bf16 has no speed-up to expect on cpu: this CPU names no bf16 units. {mend}" in look()


def test_what_else_is_in_the_way_is_named(look, monkeypatch, tmp_path, with_units):
    monkeypatch.setattr(choose, "_only", "fallback")
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(doctor, "DRIVER", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said = look()
    for each in (
        "FASTAMP_BACKEND=fallback is set. Fix it: unset FASTAMP_BACKEND",
        f"not installed: pillow, for ImageFolder. Fix it: {choose.PIP_INSTALL} pillow",
        f"not installed: simplejpeg, for ImageFolder. Fix it: {choose.PIP_INSTALL} simplejpeg",
        "has an NVIDIA driver, and torch finds no GPU: torch",
        "is built for CUDA None, and CUDA_VISIBLE_DEVICES is ''",
    ):
        assert each in said


# The regions of a user's own loop


@pytest.fixture
def show(tmp_path, capsys):
    """Return what the doctor says of regions, given by their names and seconds."""

    def run(elapsed=0.0, **regions):
        path = tmp_path / "timer.json"
        totals = {name.replace("__", "/"): {"total": time_s} for name, time_s in regions.items()}
        path.write_text(json.dumps({"elapsed": elapsed, "regions": totals}))
        assert main([*LOOK, "--timer", str(path)]) == 0
        rows = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()[1:-1]]
        return [[cell for cell in row if cell] for row in rows]

    return run


def test_each_region_has_its_share_and_its_limit_and_nothing_is_promised(show):
    assert show(data=2.0, train=6.0, train__forward=3.0, elapsed=10.0) == [
        ["data", "2.000", "20%", "at most 1.25x as fast"],
        ["train", "6.000", "60%", "at most 2.50x as fast"],
        ["train/forward", "3.000", "30%", "at most 1.43x as fast"],
        ["outside of regions", "2.000", "20%", "at most 1.25x as fast"],
    ]
    assert show(elapsed=1.0, data=2.0)[0][2] == "100%"  # regions may overlap


def test_a_real_timers_file_is_read(tmp_path, capsys):
    timer, path = fastamp.Timer("cpu"), tmp_path / "timer\udcff.json"
    for name in ("data", "forward"):
        for _ in range(3):
            timer(name).add(10**9)
    timer.to_json(path)
    found = tmp_path / "found.json"
    words = ["--timer", str(path), "--json", str(found), "--report", str(tmp_path / "page.html")]
    assert main([*LOOK, *words]) == 0
    shares = json.loads(found.read_text())["details"]["shares"]
    assert shares == {"data": 0.5, "forward": 0.5, "outside of regions": 0.0}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"", "Expecting value"),
        (b'{"regions": {"data": {}}}', "KeyError('total')"),
        (b'{"elapsed": 1, "regions": {}}', "no region was timed"),
    ],
)
def test_what_is_no_file_of_a_timer_is_refused_with_status_2(content, said, tmp_path, capsys):
    path = tmp_path / "timer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        main([*LOOK, "--timer", str(path)])
    assert ended.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"--timer: '{path}' is no file of Timer.to_json with a region's time: " in error
    assert said in error


def test_the_documentation_shows_what_the_command_prints(tmp_path, capsys):
    text = (Path(__file__).parents[2] / "docs" / "start" / "five-minutes.md").read_text()
    shown = text.partition("doctor --timer timer.json\n```\n\n```text\n")[2].partition("```")[0]
    rows = [re.split("  +", line) for line in shown.splitlines()[1:]]
    times_s = {part: float(seconds) for part, seconds, *_ in rows}
    between_s = times_s.pop("outside of regions")
    regions = {part: {"total": time_s} for part, time_s in times_s.items()}
    content = {"elapsed": between_s + math.fsum(times_s.values()), "regions": regions}
    path = tmp_path / "timer.json"
    path.write_text(json.dumps(content))
    assert main([*LOOK, "--timer", str(path)]) == 0
    assert capsys.readouterr().out.startswith(shown)
    assert len(times_s) == 4
