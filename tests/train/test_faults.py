"""Kills, signals and a disk that refuses: some of the trials of `nox -s faults`."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
from support.fault_trials import (
    BENCH_FILES,
    PRELOADED,
    SUBJECTS,
    History,
    flushed_lines_stay,
)
from support.faults import Fault, Server

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which(os.environ.get("CXX") or "g++") is None,
    reason="the shim needs Linux and a C++ compiler",
)


@pytest.fixture(scope="module")
def server():
    with Server(*PRELOADED) as started:
        yield started


def run(server, name, folder, *faults):
    """Run a program through faults, then in peace."""
    history = History(folder, None)
    for fault in (*faults, Fault()):
        history.faults.append(fault)
        history.rans.append(SUBJECTS[name].run(server, folder, fault))
    return history


@pytest.mark.parametrize("name", ["JsonLines", "Csv"])
@pytest.mark.parametrize("kind", ["full", "fail"])
def test_half_a_batch_on_a_full_disk_is_removed_from_a_sinks_file(name, kind, server, tmp_path):
    n_calls = run(server, name, tmp_path / "peace").last.calls_of(0)
    for at in range(n_calls // 2, n_calls // 2 + 8):
        fault = Fault(kind, at=at, number=28, length=4, cut=True)
        assert flushed_lines_stay(run(server, name, tmp_path / str(at), fault)) is None


def test_a_program_that_does_not_sync_is_found_out(server, tmp_path):
    found = set()
    for seed in range(12):
        folder = tmp_path / str(seed)
        folder.mkdir()
        for name, text in BENCH_FILES.items():
            (folder / name).write_text(text)
        # The last call removes another file; the name and what is in it may be on the disk or not.
        fault = Fault("power", at=4, delay_s=seed)
        ran = server.run("support.fault_programs:write_carelessly", folder, fault=fault)
        assert ran.struck == "remove"
        text = (folder / "record").read_text()
        assert text in BENCH_FILES["record"] or set(text) <= {"x"}
        found.add(len(text))
    assert {0, 10_000, len(BENCH_FILES["record"])} <= found
