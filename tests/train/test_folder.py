"""The folder of checkpoints: one process saves in it, and what others left there stays."""

import errno
import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest
from support.processes import CONTEXT
from support.trainable import Loop, names, run, save_and_stay

from fastamp.train import lock
from fastamp.train.checkpoint import Checkpoints
from fastamp.train.ranks import Ranks


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
    monkeypatch.setattr(lock, "WAIT_S", 0.5)
    with pytest.raises(OSError, match="another process saves in"):
        run(tmp_path, resume=False, checkpoint_every=4)
    assert names(tmp_path) == before
    assert len(caplog.messages) == 1
    assert Checkpoints(tmp_path, keep=3, ranks=Ranks()).load(lambda _: None)
    neighbour[0].kill()
    monkeypatch.setattr(lock, "WAIT_S", 60)
    run(tmp_path, checkpoint_every=4)
    assert names(tmp_path)[-1] == "step-00000040.pt"


@pytest.mark.parametrize("resume", [True, False])
def test_what_the_other_process_saves_meanwhile_is_kept(tmp_path, neighbour, caplog, resume):
    threading.Timer(0.5, neighbour[1].set).start()
    with pytest.raises(OSError, match="another process has saved step-000000"):
        run(tmp_path, resume=resume, checkpoint_every=16)
    assert len(caplog.messages) == 1
    assert "step-00000040.pt" in names(tmp_path)
    _, result = run(tmp_path, checkpoint_every=4)
    assert result.steps == 40


@pytest.mark.parametrize(
    ("holder", "is_free"),
    [
        ({"host": socket.gethostname(), "pid": 2**22 + 1, "start": 1}, True),
        ({"host": socket.gethostname(), "pid": os.getppid(), "start": -1}, True),
        ({"host": socket.gethostname(), **lock._describe(os.getppid())}, False),
        ({"host": "elsewhere", "pid": 1, "start": 1}, False),
        (None, True),
    ],
    ids=["ended", "another with its number", "alive", "of another host", "none"],
)
def test_a_file_stands_for_a_lock_where_there_are_none(tmp_path, monkeypatch, holder, is_free):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    monkeypatch.setattr(lock, "WAIT_S", 0.5)
    if holder is not None:
        (tmp_path / ".lease").write_text(json.dumps(holder))
    if is_free:
        lock.lock(tmp_path)
        lock.lock(tmp_path)  # it is this process's
        assert json.loads((tmp_path / ".lease").read_text())["pid"] == os.getpid()
    else:
        with pytest.raises(OSError, match="another process"):
            lock.lock(tmp_path)
        assert json.loads((tmp_path / ".lease").read_text()) == holder


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_not_hold_the_lock(tmp_path, monkeypatch):
    """Nor does it have it: the lock is its parent's, and ends with that."""
    monkeypatch.setattr(lock, "WAIT_S", -1)
    lock.lock(tmp_path)
    pid = os.fork()
    if not pid:
        try:
            lock.lock(tmp_path)
        except OSError:
            os._exit(len(lock._held))
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


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
