"""The laboratory: each script of benchmarks/ starts, and prints its table."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.fake_clock import FakeClock

import fastamp
from fastamp.bench import gpt, race

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
QUICK = ["--rounds", "8"]  # three blocks
COLLECT = race.collect  # of as many builds as a plan has


@pytest.fixture
def script(monkeypatch):
    """Return a function that imports a script, as `python benchmarks/NAME.py` does."""
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    collect = race.collect

    def collect_once(build, names, plan, **options):
        return collect(build, names, replace(plan, builds=(1,)), **options)

    monkeypatch.setattr(race, "collect", collect_once)
    return importlib.import_module


def read_table(printed):
    """Return the first column of a table, without its head; each line has a figure."""
    lines = printed.splitlines()[1:]
    assert all(any(letter.isdigit() for letter in line) for line in lines)
    return [line.split("  ")[0].strip() for line in lines]


# The optimizers


def test_a_loss_in_less_memory_is_held_to_the_spread_of_seeds(
    script, monkeypatch, tmp_path, capsys
):
    lean_quality = script("lean_quality")
    tiny = gpt.Shape(layers=1, heads=1, width=8, block_size=8)
    monkeypatch.setattr(lean_quality, "JOBS", {"gpt": lean_quality.Work(tiny, 8, autocast=True)})
    monkeypatch.setattr(lean_quality, "RESULTS", tmp_path / "losses.json")
    lean_quality.main(["--seeds", "2", "--steps", "20"])
    _, _, judged = capsys.readouterr().out.partition("job gpt, 20 steps\n")
    table, _, _ = judged.partition("two seeds")
    assert read_table(table) == [*lean_quality.ARMS]
    lean_quality.main(["--seeds", "2", "--steps", "20", "--arms", "lean"])
    table, _, _ = capsys.readouterr().out.partition("job gpt, 20 steps\n")[2].partition("two seeds")
    assert read_table(table) == ["float32", "lean"]
    worse = 2.2
    for lean, nothing, is_fine in (
        (2.04, worse, True),
        (1.90, worse, True),
        (2.06, worse, False),
        (2.04, 2.03, False),
    ):
        last = {"float32": 2.0, "lean": lean, "nothing kept": nothing}
        losses = {arm: [[9.0, loss], [9.0, loss + 0.05]] for arm, loss in last.items()}
        assert lean_quality.judge(losses)[0] is is_fine


@pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")
def test_ranks_start_compare_and_leave_none_behind(script, monkeypatch, capsys):
    ranks = script("ranks")
    if "FASTAMP_AT_LARGE" not in os.environ:
        # Ranks of this server have torch, which takes seconds to import.
        start = functools.partial(torch.multiprocessing.start_processes, start_method="forkserver")
        monkeypatch.setattr(ranks, "spawn", start)
    before = set(multiprocessing.active_children())
    ranks.main(["--shapes", "network", *QUICK])
    assert set(multiprocessing.active_children()) == before
    # The arm, its median, and the collectives of its step.
    rows = re.findall(r"  +(torch|all-reduce|fastamp) +[\d.]+ +(\d) ", capsys.readouterr().out)
    assert rows == [("torch", "2"), ("all-reduce", "1"), ("fastamp", "1")]


# The bench measures itself


@pytest.mark.parametrize(("works", "status"), [(True, 0), (False, 1)])
def test_the_selftest_finds_a_known_slowdown_and_fails_without_one(
    works, status, script, monkeypatch, capsys
):
    selftest, clock = script("selftest"), FakeClock(monkeypatch, noise=0.005, seed=1)
    monkeypatch.setattr(selftest, "collect", COLLECT)
    monkeypatch.setattr(selftest, "work", lambda units: clock.spend(units * 6e-6 if works else 1.0))
    assert selftest.main(["--slowdown", "10"]) == status
    same, slowed = capsys.readouterr().out.splitlines()
    assert same.startswith("identical arms ")
    assert "(target 0.98x to 1.02x): pass" in same
    assert f"(target 1.08x to 1.12x): {['pass', 'fail'][status]}" in slowed
    assert "the true ratio, 1.1000, is " in slowed


# The view of a GPU, from events as the profiler tells them

NAMES = {
    "void fastamp::(anonymous namespace)::reduce_kernel<fastamp::L2, (Sums)0, 16>(Table)": 2,
    "void fastamp::(anonymous namespace)::finish_kernel<fastamp::L2, (Sums)0>(double*)": 2,
    "void fastamp::(anonymous namespace)::rescale_kernel<16>(Table, float const*)": 1,
    "void fastamp::(anonymous namespace)::update_kernel<16>(Table, float const*)": 1,
    "Memcpy DtoD (Device -> Device)": 1,
    "void at::native::vectorized_elementwise_kernel<4>(int)": 3,
}


@pytest.mark.skipif("cpu" not in fastamp.backends(), reason="needs the compiled core")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernels_share_is_its_bytes_over_its_time_against_the_copys(dtype, script, monkeypatch):
    gpu = script("gpu")

    def trace(call, count):
        call()  # on the CPU
        return [gpu.Event(name, (0.0, 4.0)) for name, n in NAMES.items() for _ in range(n * count)]

    monkeypatch.setattr(gpu, "trace", trace)
    found = {row[0]: row[1:] for row in gpu.time_kernels("cpu", [(300, 7), (5,)], dtype, 1)}
    # All take 4 us; the copy moves two elements in it, the update eight.
    shares = {"reduce": 0.5, "finish": 0.0, "rescale": 1.0, "update": 4.0}
    assert found == {kernel: pytest.approx((4e-6, share)) for kernel, share in shares.items()}


def test_the_table_of_a_gpu_has_its_kernels_or_the_script_needs_a_gpu(
    script, monkeypatch, tmp_path, capsys
):
    gpu = script("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        gpu.main([])
    assert ended.value.code == 2
    assert "it needs a GPU, and torch finds none" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "time_kernels", lambda *_: [("reduce", 4e-6, 0.5)])
    monkeypatch.setattr(gpu, "time_lean", lambda *_: (4e-6, 0.5))
    monkeypatch.setattr(gpu, "find_overlap", lambda *_: 1.0)
    gpu.main(["--json", str(tmp_path / "gpu.json")])
    assert len(read_table(capsys.readouterr().out)) == 9 + 6 + 3
    assert '"kernel": "reduce"' in (tmp_path / "gpu.json").read_text()
