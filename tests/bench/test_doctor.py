"""What the doctor says of an installation, and of a loop by the file of its timer."""

from __future__ import annotations

import json
import shlex
import sys

import pytest
import torch

import fastamp
from fastamp._ops import choose, reinstall
from fastamp.bench import environment, installation
from fastamp.bench.__main__ import main

LOOK = ["doctor", "--device", "cpu"]
PYTHON = shlex.quote(sys.executable)


@pytest.fixture
def look(capsys, monkeypatch):
    """Return what the doctor says of the installation, from the end of the table on."""
    monkeypatch.setattr(choose, "_only", None)
    monkeypatch.setattr(reinstall, "_source", lambda: ["/src/fast amp"])

    def run():
        assert main(LOOK) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def with_units(monkeypatch):
    monkeypatch.setattr(environment, "cpu_features", lambda: {"amx_bf16"})


def test_a_pure_python_install_is_named_with_its_remedy(look, monkeypatch):
    monkeypatch.setattr(choose, "_is_installed", lambda: False)
    monkeypatch.setattr(choose, "_core", choose._core.__wrapped__)
    monkeypatch.setattr(choose, "_tables", dict)
    monkeypatch.setattr(choose, "NO_CUDA", "no C++ compiler was found")
    command = f"{PYTHON} -m pip install --force-reinstall --no-deps --no-cache-dir"
    command += " '/src/fast amp'"
    said = look()
    assert "cpu     pure Python" in said
    assert "fastamp was installed without its compiled code: no C++ compiler was found. " in said
    assert f"Fix it: {command}" in said


def test_compiled_code_that_cannot_be_loaded_is_served_by_python_and_named(look, monkeypatch):
    monkeypatch.setattr(choose, "_is_installed", lambda: True)
    monkeypatch.setattr(choose, "_only", None)
    monkeypatch.delenv("FASTAMP_BACKEND", raising=False)
    monkeypatch.setitem(sys.modules, "fastamp._native", None)
    monkeypatch.delattr("fastamp._native", raising=False)
    for cached in (choose._core, choose._tables):
        cached.cache_clear()
    choose._handles.clear()
    try:
        with pytest.warns(UserWarning, match="the slower pure-Python .* cannot be loaded "):
            assert fastamp.backends() == ["fallback"]
        said = look()
        assert "cpu     pure Python" in said
        assert "fastamp's compiled code cannot be loaded (import of fastamp._native" in said
        assert "Fix it:" in said
    finally:
        for cached in (choose._core, choose._tables):
            cached.cache_clear()
        choose._handles.clear()


@pytest.mark.skipif("cpu" not in fastamp.backends(), reason="needs the compiled core")
def test_a_build_without_cuda_code_is_named_with_its_remedy_beside_a_gpu(look, monkeypatch):
    from fastamp import _native

    monkeypatch.setattr(_native, "built_with_cuda", False)
    monkeypatch.setattr(choose, "NO_CUDA", "no nvcc that works was found; there was no driver")
    monkeypatch.setattr(choose, "_warn_of", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    said = look()
    assert "cpu     compiled code" in said
    assert said.count("pure Python, which is slower: fastamp was built without CUDA") == 2
    assert f"there was no driver. Fix it: FASTAMP_CUDA=ON {PYTHON} -m pip install" in said
    assert "bf16 on cuda: this GPU has no bf16 units. Fix it: train in FP32" in said


def test_a_cpu_without_bf16_units_is_named_with_its_remedy(look, monkeypatch, with_units):
    assert "bf16 on cpu" not in look()
    monkeypatch.setattr(environment, "cpu_features", set)
    mend = "Fix it: train in FP32 there, without torch.autocast('cpu')"
    assert f"has no speed-up to expect. {mend}" in look()


def test_what_else_is_in_the_way_is_named(look, monkeypatch, tmp_path, with_units):
    monkeypatch.setattr(choose, "_only", "fallback")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    monkeypatch.setattr(installation, "EXTRA", "fastamp_no_such_module")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(installation, "DRIVER", tmp_path)
    said = look()
    for each in (
        "FASTAMP_BACKEND=fallback is set. Fix it: unset FASTAMP_BACKEND",
        "cores may be used. Fix it: export OMP_NUM_THREADS=",
        "not installed: fastamp_no_such_module, if you need it. Fix it: ",
        "pip install fastamp_no_such_module",
        "has an NVIDIA driver, and torch finds no GPU: torch",
        "is built without CUDA. Fix it: install torch as",
    ):
        assert each in said
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES='' is set. Fix it: unset CUDA_VISIBLE_DEVICES" in look()


def test_what_was_built_here_comes_again_from_where_it_came(monkeypatch):
    saved = {}

    class Distribution:
        def read_text(self, name):
            assert name == "direct_url.json"
            return saved["text"]

    monkeypatch.setattr(reinstall.importlib.metadata, "distribution", lambda _: Distribution())
    for url, source in (
        ({"url": "file:///a%20b", "dir_info": {"editable": True}}, ["-e", "/a b"]),
        ({"url": "file:///a.tar.gz", "archive_info": {}}, ["/a.tar.gz"]),
        ({"url": "file:///a.whl", "archive_info": {}}, []),
        ({"url": "https://h/r.git", "vcs_info": {"vcs": "git"}}, []),
        (None, []),
    ):
        saved["text"] = url and json.dumps(url)
        assert reinstall._source() == source
    assert reinstall.install_again().endswith("--no-cache-dir FOLDER_OF_ITS_SOURCES")


def fill(timer, **regions_ms):
    """Count visits of the given milliseconds, and a first one of a second."""
    for name, (time_ms, count) in regions_ms.items():
        for value_ms in [1000, *[time_ms] * (count - 1)]:
            timer(name).add(round(value_ms * 1e6))


@pytest.fixture
def show(tmp_path, capsys):
    """Return what the doctor says of a timer's file."""

    def run(timer, elapsed=0.0):  # not the time that the test takes
        path = tmp_path / "timer.json"
        timer.to_json(path)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"elapsed": elapsed}))
        assert main([*LOOK, "--timer", str(path)]) == 0
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    return run


def test_each_part_has_its_share_and_its_limit_and_nothing_is_promised(show):
    timer = fastamp.Timer("cpu")
    fill(timer, data=(2.0, 100), forward=(1.0, 100), backward=(3.0, 100), step=(4.0, 100))
    head, *rows = show(timer)
    assert head == ["part", "ms", "a", "step", "[95", "%]", "share", "without", "it"]
    assert [row[0] for row in rows[:4]] == ["data", "forward", "backward", "step"]
    shares = [row[row.index("at") - 1] for row in rows[:4]]
    assert shares == ["20%", "10%", "30%", "40%"]
    limits = [" ".join(row[row.index("at") :]) for row in rows[:4]]
    assert limits == [f"at most {x} as fast" for x in ("1.25x", "1.11x", "1.43x", "1.67x")]
    assert rows[5] == ["100", "steps", "on", "cpu"]
    assert len(rows) == 6


def test_time_outside_of_regions_is_a_part_of_the_whole_step(show):
    timer = fastamp.Timer("cpu")
    for name, time_ms in (("data", 2), ("forward", 2), ("eval", 50)):
        for _ in range(100):
            timer(name).add(time_ms * 1_000_000)
    said = show(timer, elapsed=5.6)
    assert [row[: row.index("at")] for row in said[1:4]] == [
        ["data", "2.000", "[1.997,", "2.003]", "33%"],
        ["forward", "2.000", "[1.997,", "2.003]", "33%"],
        ["outside", "of", "regions", "2.000", "33%"],
    ]
    assert "outside" not in {row[0] for row in show(timer, elapsed=0.1)}  # regions may overlap


REGION = {"count": 1, "total": 1.0, "mean": 1.0, "min": 1.0, "max": 1.0}
REGION |= {"p50": 1.0, "p90": 1.0, "p99": 1.0, "host": 1.0, "histogram": [[5, 1]]}
UNSEEN = dict.fromkeys(REGION, 0) | {"captured": 20, "histogram": []}
CONTENT = {"schema": 1, "unit": "s", "device": "cpu", "regions": {"forward": REGION}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"", "Expecting value"),
        (b'"\xff', "decode"),
        (b"[" * 100_000, "recursion"),
        ([], "expected an object of schema 1 in seconds, got []"),
        ({}, "it has no 'schema'"),
        (CONTENT | {"schema": 2}, "expected an object of schema 1"),
        (CONTENT | {"regions": 3}, "its regions is 3, expected a dict"),
        (CONTENT | {"regions": {"data": 3}}, "its region 'data' is 3"),
        (CONTENT | {"regions": {}}, "no region is named after a part of a step: 'data', 'forward'"),
        (CONTENT | {"regions": {"mine": REGION}}, "no region is named after a part of a step"),
        (CONTENT | {"regions": {"data": REGION | {"total": -1}}}, "its region 'data' is"),
        (CONTENT | {"regions": {"data": REGION | {"total": float("nan")}}}, "its region 'data' is"),
        (CONTENT | {"regions": {"data": REGION | {"count": 0}}}, "its region 'data' is"),
        (CONTENT | {"regions": {"data": REGION | {"max": 2.0}}}, "its region 'data' is"),
        (CONTENT | {"regions": {"data": REGION | {"x": 0}}}, "unexpected keyword argument 'x'"),
        (
            CONTENT | {"regions": {"data": REGION | {"histogram": [[9999, 1]]}}},
            "its region 'data' is",
        ),
        (CONTENT | {"regions": {"data": REGION | {"histogram": [[5, -1]]}}}, "its count is -1"),
        (CONTENT | {"regions": {"data": UNSEEN}}, "expected some that took any time"),
        (CONTENT | {"elapsed": "1 s"}, "its elapsed is '1 s', expected seconds"),
        (CONTENT | {"device": "tpv"}, "its device is 'tpv', expected cpu or cuda"),
        (CONTENT | {"device": None}, "its device is None, expected a str"),
    ],
)
def test_what_is_no_file_of_a_timer_is_refused_with_status_2(content, said, tmp_path, capsys):
    path = tmp_path / "timer.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(SystemExit) as ended:
        main([*LOOK, "--timer", str(path)])
    assert ended.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"--timer: '{path}' is no file of Timer.to_json with the parts of a step: " in error
    assert said in error


@pytest.mark.parametrize("name", ["timer.json", "timer\udcff.json"])
def test_a_file_of_any_name_is_read_and_the_json_has_the_shares(name, tmp_path):
    path, found = tmp_path / name, tmp_path / "found.json"
    path.write_text(json.dumps(CONTENT | {"regions": {"forward": REGION, "data": REGION}}))
    words = ["--timer", str(path), "--json", str(found), "--report", str(tmp_path / "page.html")]
    assert main([*LOOK, *words]) == 0
    assert json.loads(found.read_text())["details"]["shares"] == {"data": 0.5, "forward": 0.5}
