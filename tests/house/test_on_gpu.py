"""The command for a machine with a GPU, on one that has none: what it tells, and what it leaves.

Whole runs have stubs of nvidia-smi, compute-sanitizer and Python; the record is made by Python.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.emulated import count_launches, emulated_table, use_emulated

import fastamp
from fastamp.step import native

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks"
SCRIPT = SCRIPTS / "on_gpu.sh"
# bash is all that it finds: neither nvidia-smi nor Python
ALONE = {"PATH": "/usr/bin:/bin", "PYTHON": "/no/python"}
NAME = "nvidia_stub.json"
ILLEGAL = "an illegal memory access"
AT_LARGE = "FASTAMP_AT_LARGE" in os.environ
# A stub of Python: the record is real, and each program leaves a line. What $BREAKS matches fails,
# what $HANGS matches hangs.
PYTHON = f"""#!/bin/bash
case "$*" in
*gpu_record.py*) exec {shlex.quote(sys.executable)} "$@" ;;
*"gpu_parts.py check"*) echo NVIDIA Stub; exit ;;
*device_count*) echo 1; exit ;;
*"gpu_parts.py built"*) exit ;;
esac
case "$*" in
*gpu_tests.py*) echo '{{"file": "tests/a.py", "test": "test_one", "outcome": "passed"}}' ;;
*gpu_bits.py*) echo '{{"case": "a step", "ok": true}}' ;;
*) echo '{{"row": 1}}' ;;
esac
echo "the log of $*" >&2
[[ $BREAKS && "$*" =~ $BREAKS ]] && exit 3
[[ $HANGS && "$*" =~ $HANGS ]] || exit 0
printf '{{"half": '
echo $$ >"$RESULTS/pid.new"
mv "$RESULTS"/pid{{.new,}}
sleep 60
"""


def run(*words):
    done = subprocess.run(["bash", SCRIPT, *words], capture_output=True, text=True, env=ALONE)  # noqa: PLW1510
    return done.returncode, done.stdout, done.stderr


def parts():
    """Return the name, the call and the minutes of each part."""
    status, out, err = run("--list")
    assert (status, err) == (0, "")
    return [tuple(line.split()[:3]) for line in out.splitlines()[1:]]


@pytest.fixture
def script(monkeypatch):
    """Return a function that imports a script, as `python benchmarks/NAME.py` does."""
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    return importlib.import_module


@pytest.fixture
def machine(tmp_path):
    """Return the environment of a machine with stubs, whose results are in `results`."""
    tools = tmp_path / "tools"
    tools.mkdir()
    stubs = {"python": PYTHON, "nvidia-smi": "", "compute-sanitizer": 'exec "${@: -3}"\n'}
    for name, text in stubs.items():
        (tools / name).write_text(text if name == "python" else f"#!/bin/bash\n{text}")
        (tools / name).chmod(0o755)
    return {
        "PATH": f"{tools}:/usr/bin:/bin",
        "PYTHON": str(tools / "python"),
        "RESULTS": str(tmp_path / "results"),
        "COMMIT": "c0ffee",
    }


def wait_until(process, is_true):
    while not is_true():
        assert process.poll() is None
        time.sleep(0.02)


def run_all(machine, *words, stop_at=None, **more):
    """Run the script; return its status, what it printed, and the parts of the record.

    It is stopped when `stop_at`, a file of the results, is there.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    env = {**machine, **more}
    process = subprocess.Popen(["bash", SCRIPT, *words], env=env, text=True, **pipes)
    if stop_at:
        wait_until(process, Path(machine["RESULTS"], stop_at).exists)
        process.terminate()
    out = process.communicate(timeout=60)[0]
    record = json.loads(Path(machine["RESULTS"], NAME).read_text())
    assert record["device"] == "NVIDIA Stub"
    return process.returncode, out, record["parts"]


def statuses(record):
    return {name: part["status"] for name, part in record.items()}


def test_the_list_needs_nothing_and_tells_parts_of_two_calls():
    listed = parts()
    names = [name for name, *_ in listed]
    assert names[:4] == ["build", "facts", "bits", "launches"]
    assert {call for _, call, _ in listed} == {"first", "second"}
    assert all(float(minutes) < 9.5 for _, _, minutes in listed)


@pytest.mark.skipif(torch.cuda.is_available() or Path("/dev/nvidia0").exists(), reason="a GPU")
def test_every_part_says_that_it_needs_a_gpu_before_it_builds_anything():
    for words in [[name] for name, *_ in parts()] + [["first"], ["second"], []]:
        assert run(*words) == (2, "", "on_gpu.sh: needs a GPU, and finds none\n")
    assert run("tests", "no") == (2, "", "on_gpu.sh: no is no part; --list tells them\n")


PIECES = {"nccl": {"nccl-ddp", "nccl-fsdp"}, "shipped": {"shipped", "shipped-bits"}}
"""Parts of several pieces, which stand in the record."""


def test_both_calls_leave_the_lines_of_every_part_in_one_record(machine):
    assert run_all(machine, "first")[0] == 0
    status, _, record = run_all(machine, "second")
    assert status == 0
    for name, *_ in parts():
        assert PIECES.get(name, {name}) <= record.keys()
    assert {part["status"] for part in record.values()} == {"passed"}
    assert {part["commit"] for part in record.values()} == {"c0ffee"}
    assert record["facts"]["rows"] == [{"row": 1}]
    assert record["bits"]["cases"] == {"count": 1, "wrong": []}
    assert "the log of" in Path(machine["RESULTS"], "on_gpu.log").read_text()


@pytest.mark.parametrize(
    ("call", "how", "which"),
    [
        ("first", "BREAKS", "gpu[_.]|distributed"),  # all but the builds
        ("second", "BREAKS", "gpu[_.]|distributed"),
        ("first", "HANGS", "gpu_tests|gpu_bits"),
    ],
)
def test_every_part_that_fails_or_is_cut_short_leaves_its_lines(call, how, which, machine):
    status, out, record = run_all(machine, call, **{how: which, "PART_S": "1"})
    assert status == 1
    wrong = {name for name, part in record.items() if part["status"] != "passed"}
    if how == "BREAKS":
        built = {"build", "build-works"} if call == "first" else {"shipped", "shipped-works"}
        assert record.keys() - wrong == built
    for name in wrong:
        assert record[name]["status"] == ("failed" if how == "BREAKS" else "cut short")
        assert f"\n{name} " in out
        assert name.startswith("nccl") or record[name].keys() & {"rows", "cases", "files"}
    for name, of_call, _ in parts():
        assert of_call != call or PIECES.get(name, {name}) & record.keys()
    assert "the log of" in out  # the end of the log, of each part
    if "tests" in wrong:
        assert record["tests"]["files"]["tests/a.py"]["ran"] == ["test_one"]


def test_a_script_that_is_stopped_leaves_the_record_of_what_had_run(machine):
    status, _, record = run_all(machine, "first", stop_at="pid", HANGS="captures")
    assert status == 143
    assert record.pop("captures")["status"] == "cut short"
    assert record.keys() >= {"build", "facts", "bits", "launches"}
    assert {*statuses(record).values()} == {"passed"}


def test_a_build_that_fails_leaves_its_log_and_a_record(machine):
    status, out, record = run_all(machine, "first", BREAKS="pip.install")
    assert (status, statuses(record)) == (1, {"build": "failed"})
    assert "pip install" in Path(machine["RESULTS"], "on_gpu.log").read_text()
    assert "pip install" in out


def test_a_call_leaves_out_what_it_has_no_time_or_tool_for_and_says_so(machine):
    Path(machine["PATH"].partition(":")[0], "compute-sanitizer").unlink()
    # the last 75 s are not the tests'
    *_, record = run_all(machine, "first", LIMIT_S="60")
    assert statuses(record)["tests"] == "left out: no time"
    assert statuses(record)["memcheck"] == "left out: there is no compute-sanitizer here"


# The programs that it runs

TESTS = """
import pathlib, time, warnings
import pytest
pytestmark = pytest.mark.cuda
def test_first(): warnings.warn("another package's")
def test_wrong(): assert [1] == [2]
def test_endless():
    pathlib.Path(__file__ + ".begun").touch()
    time.sleep(60)
def test_last(): pass
"""


def test_each_test_leaves_a_line_and_a_file_that_is_cut_short_says_so(tmp_path, script):
    file = tmp_path / "test_one.py"
    file.write_text(TESTS)
    command = [sys.executable, SCRIPTS / "gpu_tests.py", file]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    wait_until(process, Path(f"{file}.begun").exists)
    process.terminate()
    out = process.communicate(timeout=60)[0]
    assert (process.returncode, json.loads(out.splitlines()[-1])["end"]) == (1, "cut short")
    record = script("gpu_record")
    lines = json.dumps({"part": "tests", "device": "D"}) + "\n" + out
    [of_file] = record.shorten(record.read(lines)["tests"])["files"].values()
    assert (of_file["passed"], of_file["ran"]) == (1, ["test_first", "test_wrong"])
    assert "assert [1] == [2]" in of_file["failures"][0]["why"]


@pytest.fixture
def emulated():
    table = emulated_table()
    if table is None:
        pytest.skip("no compiled core, no C++ compiler or no glibc")
    return lambda: use_emulated(table)


def test_the_limits_of_launches_are_those_of_the_emulated_kernels(script, emulated):
    parts = script("gpu_parts")
    for tensors, groups, fused, most in parts.LAUNCHES:
        with emulated():
            step = parts.make_step(tensors, groups, fused, "cpu")
            assert count_launches(step).kernels == most


def test_the_emulated_kernels_have_the_bits_of_the_cpu_in_every_case(script, emulated):
    first, *lines = script("gpu_bits").run("cpu", small=not AT_LARGE, using=emulated)
    assert not [line for line in lines if not line["ok"]]
    declared = {name.rpartition(".")[2] for name in native.RULES}
    if not hasattr(torch.optim, "Muon"):
        declared.discard("Muon")
    assert {*first["rules"]} == declared - {"Lean"} | {"AdamW", "Lion"}
    names = " ".join(line["case"] for line in lines)
    assert all(f"moments={each}" in names for each in ("float32", "bfloat16", "8bit"))


@pytest.mark.skipif("cpu" not in fastamp.backends(), reason="needs the compiled core")
def test_a_wrong_bit_and_an_error_are_lines_and_the_next_case_runs(script, monkeypatch):
    bits, on_device = script("gpu_bits"), []
    real = bits.draw

    @contextmanager
    def using():
        on_device.append(True)
        yield
        on_device.clear()

    def draw(sizes, dtype, *where, **options):
        made = real(sizes, dtype, *where, **options)
        if on_device and dtype is torch.float16:
            raise RuntimeError(ILLEGAL)
        if on_device and dtype is torch.bfloat16:
            made[-1].view(-1)[:1].view(torch.int16).bitwise_xor_(1)
        return made

    monkeypatch.setattr(bits, "draw", draw)
    _, *lines = bits.run("cpu", using=using, only="aligned")
    wrong = {line["case"]: line["wrong"] for line in lines if not line["ok"]}
    assert "norm, float32, aligned" not in wrong
    assert "1 of 140000 elements, from 0" in " ".join(wrong["norm, bfloat16, aligned"])
    assert wrong["norm, float16, misaligned"] == [f"RuntimeError: {ILLEGAL}"]
