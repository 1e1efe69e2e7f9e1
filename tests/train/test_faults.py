"""Kills, signals and a disk that refuses: some of the trials of `nox -s faults`."""

from __future__ import annotations

import os
import shutil
import signal
import sys

import pytest
from support.fault_trials import FILES, GROUPS, PRELOADED, SUBJECTS, History, Trials
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


def run(server, name, folder, *faults):
    """Run a program through faults, then in peace."""
    history = History(folder, None)
    for fault in (*faults, Fault()):
        history.faults.append(fault)
        history.rans.append(SUBJECTS[name].run(server, folder, fault))
    return history


@pytest.fixture(scope="module")
def two_ranks(server, tmp_path_factory):
    """Return what becomes of two ranks without a fault."""
    return run(server, "fine_tune, 2 ranks", tmp_path_factory.mktemp("two") / "expected").last


@pytest.mark.parametrize(
    ("last", "call"), [(1, "remove"), pytest.param(11, "rename", marks=pytest.mark.at_large)]
)
def test_a_checkpoint_of_ranks_outlives_a_loss_of_power(last, call, server, two_ranks, tmp_path):
    """At the end, and after the step's former checkpoint has been moved out of the way."""
    expected = two_ranks
    fault = Fault("power", at=expected.calls_of(0) + 1 - last)
    history = run(server, "fine_tune, 2 ranks", tmp_path / "run", fault)
    assert history.rans[0].codes == [-signal.SIGKILL] * 2
    assert history.rans[0].struck == call
    assert history.last.said("resumed") == [12, 12], history.last.err
    assert set(history.last.said("outcome")) == set(expected.said("outcome"))


@pytest.mark.parametrize("contents", [False, True])
def test_files_of_ranks_are_on_the_disk_before_they_have_their_names(contents, server, tmp_path):
    """torch up to 2.13 syncs what is still in a buffer: of the small ones nothing."""
    program = "support.fault_programs:save_a_small_model"
    n_calls = server.run(program, tmp_path / "peace", ranks=2).calls_of(0)
    for seed in range(4):
        folder = tmp_path / str(seed)
        folder.mkdir()
        fault = Fault("power", at=n_calls - 8 * seed, delay_s=seed, cut=contents)
        struck = server.run(program, folder, fault=fault, ranks=2)
        assert struck.struck
        again = server.run(program, folder, ranks=2)
        assert again.codes == [0, 0], again.err
        assert min(again.said("resumed")) >= max(struck.said("saved")), again.err
        assert "damaged" not in again.err


def test_a_checkpoint_that_cannot_be_removed_is_told_as_the_folders_error(server, tmp_path):
    n_calls = run(server, "fine_tune", tmp_path / "peace").last.calls_of(0)
    for at in range(n_calls - 5, n_calls + 1):
        fault = Fault("fail", at=at, number=5)
        ran = SUBJECTS["fine_tune"].run(server, tmp_path / str(at), fault)
        assert ran.codes == [0] or f"OSError: [Errno 5] {tmp_path / str(at)}: " in ran.err


def make_folder(folder):
    """Make a folder with older files, which a program then replaces."""
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def test_a_program_that_does_not_sync_is_found_out(server, tmp_path):
    found = set()
    for seed in range(12):
        folder = make_folder(tmp_path / str(seed))
        # The last call removes another file; the name and what is in it may be on the disk or not.
        fault = Fault("power", at=4, delay_s=seed)
        ran = server.run("support.fault_programs:write_carelessly", folder, fault=fault)
        assert ran.struck == "remove"
        text = (folder / "record").read_text()
        assert text in FILES["record"] or set(text) <= {"x"}
        found.add(len(text))
    assert {0, 10_000, len(FILES["record"])} <= found
