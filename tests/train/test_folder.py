"""The folder of checkpoints: what stands in it at first is the run's own, later files are not."""

import errno
from pathlib import Path

import pytest
from support.trainable import Loop, names, run

from fastamp.train import checkpointer


def test_another_run_that_saves_in_the_folder_is_told_at_the_next_save(tmp_path):
    first, second = Loop(tmp_path).checkpointer, Loop(tmp_path).checkpointer
    first.save(1)
    text = rf"{tmp_path}: step-00000002\.pt cannot be written: another run has saved step-"
    with pytest.raises(FileExistsError, match=text + r"00000001\.pt in this folder"):
        second.save(2)
    first.save(3)
    assert names(tmp_path) == ["step-00000001.pt", "step-00000003.pt"]


def test_two_runs_that_begin_at_once_lose_nothing(tmp_path, monkeypatch):
    """The second one begins while the first one writes, and removes what looks left behind."""
    folder = tmp_path / "new"
    first, write = Loop(folder).checkpointer, checkpointer.write_file

    def write_slowly(*args, **kwargs):
        monkeypatch.undo()
        write(*args, **kwargs)
        Loop(folder).checkpointer.save(2)

    monkeypatch.setattr(checkpointer, "write_file", write_slowly)
    with pytest.raises(FileExistsError, match=r"another run has saved step-00000002\.pt"):
        first.save(1)
    assert names(folder) == ["step-00000002.pt"]
    assert Loop(folder).checkpointer.restore() == 2


def test_all_that_is_there_when_a_run_begins_is_its_own(tmp_path):
    for step in (1, 2, 3):
        Loop(tmp_path).checkpointer.save(step)
    (tmp_path / ".step-1234.part").touch()
    (tmp_path / "notes.txt").touch()
    loop = Loop(tmp_path, keep=1)
    loop.checkpointer.save(4)
    assert names(tmp_path) == ["notes.txt", "step-00000004.pt"]


def test_a_planted_link_is_not_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    saving = Loop(tmp_path / "run").checkpointer
    saving.save(1)
    monkeypatch.setattr("secrets.token_hex", lambda _: "known")
    (tmp_path / "run" / ".step-known.part").symlink_to(victim)
    with pytest.raises(FileExistsError, match="cannot be written: File exists"):
        saving.save(2)
    assert victim.read_text() == "mine"


def refuse(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["torch.nn.Module.state_dict", "os.fsync", "pathlib.Path.replace"])
def test_a_save_that_fails_is_neither_the_newest_nor_the_best(call, tmp_path, monkeypatch):
    loop = Loop(tmp_path, keep=2, best="min")
    loop.checkpointer.save(1, metric=5.0)
    with monkeypatch.context() as patch:
        patch.setattr(call, refuse)
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
