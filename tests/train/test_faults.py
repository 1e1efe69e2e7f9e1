"""Kills, signals and a disk that refuses: some of the trials of `nox -s faults`."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
from support.fault_trials import FILES, GROUPS, PRELOADED, Trials
from support.faults import Fault, Server

WANTED = {"loops": 4}  # that strike, else 2; `nox -s faults` wants hundreds

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which(os.environ.get("CXX") or "g++") is None,
    reason="the shim needs Linux and a C++ compiler",
)


@pytest.fixture(scope="module")
def server():
    with Server(*PRELOADED) as started:
        yield started


@pytest.fixture(scope="module")
def trials(server):
    return Trials(server, seed=1)


@pytest.mark.parametrize("group", GROUPS)
def test_nothing_is_lost_that_was_reported_as_saved(group, trials):
    assert trials.run_until(group, WANTED.get(group, 2)) == []


def test_a_program_that_does_not_sync_is_found_out(server, tmp_path):
    found = set()
    for seed in range(12):
        folder = tmp_path / str(seed)
        folder.mkdir()
        for name, text in FILES.items():
            (folder / name).write_text(text)
        # The last call removes another file; the name and what is in it may be on the disk or not.
        fault = Fault("power", at=4, delay_s=seed)
        ran = server.run("support.fault_programs:write_carelessly", folder, fault=fault)
        assert ran.struck == "remove"
        text = (folder / "record").read_text()
        assert text in FILES["record"] or set(text) <= {"x"}
        found.add(len(text))
    assert {0, 10_000, len(FILES["record"])} <= found
