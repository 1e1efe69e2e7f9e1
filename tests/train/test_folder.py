"""The folder of checkpoints: one process saves in it, and what others left there stays."""

import errno
import fcntl
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from support.processes import CONTEXT
from support.trainable import Loop, act_at, names, run, save_and_stay, take_lock

import fastamp
from fastamp.train import store


@pytest.fixture
def neighbour(tmp_path):
    """A process that saves in a folder, and the event that lets it go on."""
    ends = CONTEXT.Event()
    process = CONTEXT.Process(target=save_and_stay, args=(tmp_path, ends), daemon=True)
    process.start()
    while not (tmp_path / "saved").exists():
        assert process.is_alive()
        time.sleep(0.05)
    yield process, ends
    process.kill()
    process.join()


def test_another_process_that_saves_is_waited_for_and_then_respected(
    tmp_path, neighbour, monkeypatch, caplog
):
    before = names(tmp_path)
    monkeypatch.setattr(store, "WAIT_S", 0.5)
    with pytest.raises(OSError, match="another process saves in"):
        run(tmp_path, resume=False, checkpoint_every=4)
    assert names(tmp_path) == before
    assert len(caplog.messages) == 1
    assert torch.load(tmp_path / names(tmp_path)[-1], weights_only=True)["step"] == 8
    neighbour[0].kill()
    monkeypatch.setattr(store, "WAIT_S", 60)
    run(tmp_path, checkpoint_every=4)
    assert names(tmp_path)[-1] == "step-00000040.pt"


@pytest.mark.parametrize("resume", [True, False])
def test_what_the_other_process_saves_meanwhile_is_kept(tmp_path, neighbour, caplog, resume):
    threading.Timer(0.5, neighbour[1].set).start()
    with pytest.raises(OSError, match="another process has saved step-000000"):
        run(tmp_path, resume=resume, checkpoint_every=16)
    waits = [message for message in caplog.messages if "resumed at step" not in message]
    assert len(waits) == 1
    assert "step-00000040.pt" in names(tmp_path)
    with pytest.raises(ValueError, match="nothing is left to train at step 40 of 40"):
        run(tmp_path, checkpoint_every=4)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP])
def test_a_file_system_without_locks_is_refused_by_name(tmp_path, monkeypatch, number):
    """And no file stands for a lock: one that a killed process has left would never be stale."""

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    problem = f"cannot be written: its file system has no locks: {os.strerror(number)}"
    with pytest.raises(OSError, match=f"checkpoint_dir={tmp_path}: step-00000003.pt {problem}"):
        run(tmp_path)
    assert names(tmp_path) == []


def test_the_lock_is_a_file_that_stays(tmp_path):
    """A lock of the folder itself would hold on one host only, where several share it by NFS."""
    with pytest.MonkeyPatch.context() as patch:
        locked, flock = set(), fcntl.flock
        patch.setattr(
            fcntl, "flock", lambda fd, how: locked.add(os.fstat(fd).st_ino) or flock(fd, how)
        )
        run(tmp_path, max_steps=3)
    assert locked == {(tmp_path / ".lock").stat().st_ino}
    before = (tmp_path / ".lock").stat().st_ino
    store._locks.clear()
    run(tmp_path, max_steps=6)
    assert (tmp_path / ".lock").stat().st_ino == before


def in_a_fork(action):
    """Call a function in a forked process, and return its exit status."""
    pid = os.fork()
    if not pid:
        try:
            sys.exit(action())  # as a process that ends by itself
        except SystemExit as end:
            store._locks.clear()
            os._exit(end.code)
        finally:
            os._exit(9)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_neither_has_the_lock_nor_ends_it(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "WAIT_S", 0)
    store._lock(tmp_path)
    assert in_a_fork(lambda: take_lock(tmp_path)) == 0
    with CONTEXT.Pool(1) as pool:
        assert pool.apply(take_lock, (tmp_path,)) == 0  # after the fork's end


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_that_lives_longer_does_not_hold_the_lock(tmp_path):
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:  # takes the lock, and ends after it has forked
        store._lock(tmp_path)
        if not os.fork():
            os.close(writer)
            os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    os.waitpid(pid, 0)
    store._lock(tmp_path)
    os.close(writer)


def test_a_folder_that_was_removed_and_made_anew_is_locked_anew(tmp_path):
    folder = tmp_path / "run"
    run(folder, max_steps=3)
    shutil.rmtree(folder)
    run(folder, max_steps=3)
    assert (folder / ".lock").exists()


def test_what_others_have_left_in_the_folder_stays(tmp_path):
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "results").write_text("mine")
    for name in ("step-00000002.pt", "step-\u0661\u0662\u0663\u0664\u0665\u0666\u0667\u0668.pt"):
        (tmp_path / name).write_text("mine")
    os.mkfifo(tmp_path / "step-00000003.pt")
    before = names(tmp_path)
    run(tmp_path, resume=False, checkpoint_every=4, keep=1)
    assert names(tmp_path) == sorted([*before, "step-00000040.pt"])
    assert (tmp_path / "step-00000001" / "results").read_text() == "mine"


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_others_have_written_is_not_replaced(tmp_path, kind):
    path, victim = tmp_path / "run" / "step-00000008.pt", tmp_path / "victim"
    path.parent.mkdir()
    victim.write_text("mine")
    {"file": path.touch, "folder": path.mkdir, "link": lambda: path.symlink_to(victim)}[kind]()
    with pytest.raises(OSError, match=r"step-00000008\.pt cannot be written: there is something"):
        run(path.parent, resume=False, checkpoint_every=8)
    assert os.path.lexists(path)
    assert victim.read_text() == "mine"


def test_a_planted_link_is_not_followed(tmp_path, monkeypatch):
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.write_text("mine")
    folder.mkdir()
    monkeypatch.setattr("secrets.token_hex", lambda _: "known")
    for step in (8, 40):
        (folder / f".step-{step:08d}.pt.part").symlink_to(victim)
        (folder / f".step-{step:08d}.pt.known.part").symlink_to(victim)
    run(folder, checkpoint_every=8)
    assert victim.read_text() == "mine"
    assert "step-00000040.pt" in names(folder)


def test_a_file_system_without_renames_is_refused_before_training(tmp_path, monkeypatch):
    """As some that stand for object stores: a checkpoint could be seen while it is written."""

    def refuse_all(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(Path, "replace", refuse_all)
    begun = act_at(1, lambda: pytest.fail("training has begun"))
    text = f"checkpoint_dir={tmp_path}: cannot be written to: Function not implemented"
    with pytest.raises(OSError, match=text):
        run(tmp_path, loss_fn=begun)
    assert names(tmp_path) == []


def test_what_a_kill_leaves_of_a_replaced_folder_goes(tmp_path, monkeypatch):
    """A step of ranks that was saved anew, and its former folder was half removed."""

    def save(step):
        one = store.Store(tmp_path, keep=3, suffix="", argument="folder")
        one.paths = one.open()
        part = one.begin(step)
        part.mkdir()
        (part / "run.pt").write_bytes(b"fastamp.train 4")
        one.publish(part, step, None)

    save(1)
    with monkeypatch.context() as patch:
        patch.setattr(store, "_remove", lambda _: None)
        save(1)
    save(2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def refuse(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("fails", ["the state", "the renaming"])
def test_a_save_that_fails_is_neither_the_newest_nor_the_best(fails, tmp_path, monkeypatch):
    loop = Loop(tmp_path, keep=2, best="min")
    loop.checkpointer.save(1, metric=5.0)
    with monkeypatch.context() as patch:
        if fails == "the state":
            patch.setattr(loop.model, "state_dict", refuse)
        else:
            patch.setattr(Path, "replace", refuse)
        with pytest.raises(OSError, match="No space left"):
            loop.checkpointer.save(3, metric=1.0)
    loop.checkpointer.save(2, metric=2.0)
    for step in (4, 5):
        loop.checkpointer.save(step, metric=3.0)
    assert names(tmp_path) == [f"step-{step:08d}.pt" for step in (2, 4, 5)]
    assert Loop(tmp_path, keep=2, best="min").checkpointer.restore(best=True) == 2


@pytest.mark.parametrize("kind", [str, Path])
def test_a_tilde_is_the_home_folder(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run(kind("~/runs/a"), max_steps=3)
    assert names(tmp_path / "runs" / "a") == ["step-00000003.pt"]
    assert fastamp.Checkpointer(kind("~/runs/b"), model=torch.nn.Linear(1, 1)).save(1) is None
    assert names(tmp_path / "runs" / "b") == ["step-00000001.pt"]
