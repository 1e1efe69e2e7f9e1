"""Checkpoints: whole or not there, resumed to the bit, refused by name."""

from __future__ import annotations

import errno
import functools
import os
import random
import re
import signal

import numpy as np
import pytest
import torch
from support import trainable as training
from support.streams import NoisyStream, StatefulLoader
from support.trainable import (
    CrashError,
    act_at,
    crash,
    make_data,
    make_model,
    names,
    newest,
    outcome,
    outcome_of_finished,
    run,
)
from torch.utils.data import DataLoader, TensorDataset

import fastamp
from fastamp.train import CheckpointError

DATASET = TensorDataset(*make_data())
DATA = {
    "tensors": make_data,
    "dataset": lambda: DATASET,
    "loader of fastamp": lambda: fastamp.DataLoader(DATASET, 8, shuffle=True),
    "stream that draws": lambda: NoisyStream([*zip(*make_data(), strict=True)]),
    "loader of another library": lambda: StatefulLoader([*DataLoader(DATASET, 8)]),
    "list of samples": lambda: list(DATASET),
}
WITHOUT_STATE = {
    "loader of torch": lambda: DataLoader(DATASET, 8, shuffle=True),
    "batches": lambda: DataLoader(list(DataLoader(DATASET, 7)), batch_size=None),
}


@functools.cache
def uninterrupted(kind, backend, **fields):
    return outcome(*run(data=DATA[kind](), **fields))


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", DATA)
@pytest.mark.parametrize("step", [2, 6, 7, 15])  # an epoch has 6 or 7 steps
def test_a_run_that_crashed_goes_on_to_the_bit(kind, step, tmp_path, backend):
    fields = {"max_steps": 16, "checkpoint_every": 1}
    expected = uninterrupted(kind, backend, **fields)
    with pytest.raises(CrashError):
        run(tmp_path, DATA[kind](), loss_fn=act_at(step, crash), **fields)
    assert newest(tmp_path) == step - 1
    random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002 - what the program draws between
    assert outcome(*run(tmp_path, DATA[kind](), **fields)) == expected


@pytest.mark.parametrize("accumulate", [2, 5])  # of 12 batches: the last step has 2
def test_an_epoch_is_counted_once_and_a_finished_run_stays(accumulate, tmp_path):
    fields = {"max_steps": None, "epochs": 3, "checkpoint_every": None, "keep": 9}
    fields |= {"accumulate": accumulate}
    expected = outcome(*run(**fields))
    n = -(-12 // accumulate)
    loss_fn = act_at(2 * n + 1, crash) if accumulate == 2 else act_at(7, crash, accumulate=4)
    with pytest.raises(CrashError):
        run(tmp_path, loss_fn=loss_fn, **fields)
    assert names(tmp_path) == [f"step-{step:08d}.pt" for step in (n, 2 * n)]
    assert outcome(*run(tmp_path, **fields)) == expected
    written = (tmp_path / f"step-{3 * n:08d}.pt").stat().st_mtime_ns
    assert outcome_of_finished(tmp_path, fields) == expected
    assert (tmp_path / f"step-{3 * n:08d}.pt").stat().st_mtime_ns == written


@pytest.mark.parametrize("fields", [{"max_steps": 6}, {"max_steps": None, "epochs": 1}], ids=str)
@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_a_run_says_where_it_resumes_and_a_finished_one_is_refused(
    schedule, fields, tmp_path, caplog
):
    fields = {"schedule": schedule, "checkpoint_every": 2, "eval_every": 4, **fields}
    with pytest.raises(CrashError):
        run(tmp_path, loss_fn=act_at(6, crash), **fields)
    assert caplog.messages == []
    run(tmp_path, **fields)
    (said,) = caplog.messages
    assert said.startswith(f"{tmp_path}: resumed at step 4 of 6, its next learning rate is ")
    remedies = f"more {[*fields][-1]} resumes, another folder starts anew"
    with pytest.raises(ValueError, match=f"{tmp_path}: nothing .* at step 6 of 6: {remedies}"):
        run(tmp_path, **fields)


def test_a_run_says_how_it_begins_and_how_it_ends(tmp_path, caplog):
    fields = {"schedule": "constant", "precision": "32-true", "progress": True, "device": "cpu"}
    for steps in (3, 5):
        run(tmp_path, max_steps=steps, **fields)
    begins, ends, resumes, _ = caplog.messages
    assert begins == "fine_tune: begins at step 0 of 3, on cpu in 32-true"
    assert re.match(r"fine_tune: 3 steps in 32-true, 0 skipped; train_loss: [\d.]+ to", ends)
    text = "resumed at step 3 of 5, its next learning rate is 0.008, on cpu in 32-true"
    assert resumes == f"{tmp_path}: {text}"
    caplog.clear()
    run(max_steps=3, **(fields | {"progress": False}))
    assert caplog.messages == []


def test_a_run_that_was_ended_before_its_last_evaluation_makes_it(tmp_path, caplog):
    """Its last step has a checkpoint."""
    fields = {"max_steps": 4, "checkpoint_every": 2, "epochs": 9}
    expected = outcome(*run(**fields))

    def crash_in_evaluation(output, target):
        if not torch.is_grad_enabled():
            crash()
        return training.loud(output, target)

    with pytest.raises(CrashError):
        run(tmp_path, loss_fn=crash_in_evaluation, **fields)
    assert newest(tmp_path) == 4
    assert outcome(*run(tmp_path, **fields)) == expected
    assert "resumed at step 4 of 4" in caplog.text


@pytest.mark.parametrize("kind", WITHOUT_STATE)
def test_a_run_that_crashed_after_an_epoch_goes_on_to_the_bit(kind, tmp_path):
    make = WITHOUT_STATE[kind]
    fields = {"epochs": 2, "checkpoint_every": None, "schedule": "constant"}
    fields |= {"max_steps": None, "warmup_steps": 0}
    expected = outcome(*run(data=make(), **fields))
    with pytest.raises(CrashError):
        run(tmp_path, make(), loss_fn=act_at(8, crash), **fields)
    assert len(names(tmp_path)) == 1
    assert outcome(*run(tmp_path, make(), **fields)) == expected


@pytest.mark.parametrize(
    "fields", [{"checkpoint_every": 3}, {"eval_every": 3, "keep_best": True}], ids=str
)
def test_checkpoints_within_an_epoch_of_data_without_a_state_are_refused(fields, tmp_path):
    data, fields = WITHOUT_STATE["loader of torch"], {"checkpoint_every": None, **fields}
    with pytest.raises(ValueError, match=r"as train_data has no state_dict: .*; got 3"):
        run(tmp_path, data(), **fields)
    assert names(tmp_path) == []


def test_a_signal_within_an_epoch_of_data_without_a_state_acts_at_once(tmp_path):
    fields = {"max_steps": 16, "checkpoint_every": None}
    loss_fn = act_at(8, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, WITHOUT_STATE["loader of torch"](), loss_fn=loss_fn, **fields)
    assert names(tmp_path) == ["step-00000006.pt"]


def test_a_run_that_ended_within_an_epoch_of_data_without_a_state_begins_the_next_one(tmp_path):
    seen = []

    class Told(TensorDataset):
        def set_epoch(self, epoch):
            seen.append(epoch)

    for steps in (8, 13):  # an epoch has 6
        fields = {"max_steps": steps, "schedule": "constant", "checkpoint_every": None}
        run(tmp_path, DataLoader(Told(*make_data()), 8), **fields)
    assert seen == [0, 1, 2]
    assert names(tmp_path) == [f"step-{step:08d}.pt" for step in (6, 8, 13)]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize(("field", "short", "long"), [("max_steps", 8, 20), ("epochs", 1, 3)])
def test_a_run_that_has_ended_goes_on_at_the_rate_of_the_longer_one(
    schedule, field, short, long, tmp_path, caplog
):
    fields = {"schedule": schedule, "max_steps": None, "warmup_steps": 2, "checkpoint_every": 1}
    fields["precision"] = "32-true"  # in which no step is skipped
    _, ended = run(tmp_path, **(fields | {field: short}))
    fields["warmup_steps"] = 3  # as where it is a share of the steps
    _, whole = run(**(fields | {field: long}))
    _, longer = run(tmp_path, **(fields | {field: long}))
    assert longer.steps == whole.steps == (20 if field == "max_steps" else 18)
    assert np.array_equal(longer.lr.values[: ended.steps], ended.lr.values)
    assert np.array_equal(longer.lr.values[ended.steps :], whole.lr.values[ended.steps :])
    said = f"its next learning rate is {whole.lr.values[ended.steps]:g}"
    assert f"resumed at step {ended.steps} of {longer.steps}, {said}" in caplog.text
    with pytest.raises(CheckpointError, match=f"it has total_steps={longer.steps}, this run "):
        run(tmp_path, **(fields | {field: short}))


def test_starting_anew_over_checkpoints_is_refused_at_the_start(tmp_path):
    run(tmp_path, max_steps=3)
    begun = act_at(1, lambda: pytest.fail("training has begun"))
    has = f"{tmp_path} has the checkpoint of step 3"
    with pytest.raises(ValueError, match=f"resume: expected True, as {has}"):
        run(tmp_path, max_steps=9, resume=False, loss_fn=begun)
    assert run(tmp_path / "new", max_steps=3, resume=False)[1].steps == 3


def test_another_run_is_refused_and_nothing_changes(tmp_path):
    run(tmp_path, max_steps=9)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(CheckpointError, match=r"09\.pt: its model is another one: missing keys: 1"):
        run(tmp_path, max_steps=9, model=model)
    assert all(map(torch.equal, model.parameters(), before))
    for fields, problem in [
        ({"lr": 0.02}, r"it has lr=0\.01, this run 0\.02"),
        ({"optimizer": "sgd"}, "it has optimizer='AdamW', this run 'SGD'"),
        ({"max_steps": 6}, "it has total_steps=9, this run 6"),
        ({"use_amp": False}, "precision='16-mixed', this run '32-true'"),
        ({"seed": 5}, "it has seed=0, this run 5; another folder starts anew"),
    ]:
        with pytest.raises(CheckpointError, match=problem):
            run(tmp_path, **{"max_steps": 9, **fields})
    assert names(tmp_path) == [f"step-{step:08d}.pt" for step in (3, 6, 9)]


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[content.index(torch.load(path, weights_only=True)["model"]["0.bias"].numpy())] ^= 1
    path.write_bytes(content)


class Runs:
    """What a hostile file would have called."""

    def __reduce__(self):
        return os.mkdir, ("owned",)


def hostile(path):
    torch.save({"format": "fastamp.train 7", "model": Runs()}, path)


DAMAGE = {
    "is damaged": cut_short,
    "the sum of .* is wrong": flip_a_bit,
    "is damaged: File is not": lambda path: path.write_text("text"),
    "holds an object of .*mkdir": hostile,
}


@pytest.mark.parametrize("problem", DAMAGE)
def test_damaged_checkpoints_are_passed_over_with_one_warning(problem, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    expected = outcome(*run(tmp_path, max_steps=9, keep=9))
    for step in (9, 6):
        DAMAGE[problem](tmp_path / f"step-{step:08d}.pt")
    text = rf"(?s)step-00000009\.pt: .*{problem}.*step-00000006\.pt: .*{problem}.*; resumed from "
    with pytest.warns(UserWarning, match=text + r".*/step-00000003\.pt$") as warned:
        assert outcome(*run(tmp_path, max_steps=9)) == expected
    assert len(warned) == 1
    assert {"step-00000006.pt", "step-00000009.pt"} < {*names(tmp_path)}
    assert outcome_of_finished(tmp_path, {"max_steps": 9}) == expected
    assert names("") == []


def test_what_was_passed_over_is_not_kept_and_where_all_are_damaged_nothing_starts(tmp_path):
    run(tmp_path, max_steps=9, keep=9)
    (tmp_path / "step-00000012.pt").touch()
    flip_a_bit(tmp_path / "step-00000009.pt")
    (tmp_path / "step-00000006.pt").write_text("text")
    with pytest.warns(UserWarning, match="resumed from"), pytest.raises(CrashError):
        run(tmp_path, max_steps=9, keep=2, checkpoint_every=1, loss_fn=act_at(4, crash))
    assert names(tmp_path) == ["step-00000005.pt", "step-00000006.pt"]
    for name in names(tmp_path):
        cut_short(tmp_path / name)
    text = r"(?s)06\.pt: .*05\.pt: .*; there is no whole one; another folder starts"
    with pytest.raises(CheckpointError, match=text):
        run(tmp_path, max_steps=9)


@pytest.mark.parametrize("kind", [PermissionError, MemoryError])
def test_what_the_machine_cannot_read_is_not_passed_over(kind, tmp_path, monkeypatch):
    run(tmp_path, max_steps=9)

    def refuse(*_, **__):
        raise kind(errno.EACCES, "not now")

    monkeypatch.setattr(torch, "load", refuse)
    with pytest.raises(CheckpointError, match=r"09\.pt: cannot be read: .*not now"):
        run(tmp_path, max_steps=9)


def test_a_checkpoint_of_another_version_is_not_passed_over(tmp_path):
    run(tmp_path, max_steps=9)
    torch.save({"format": "fastamp.train 0"}, tmp_path / "step-00000009.pt")
    with pytest.raises(CheckpointError, match=r"09\.pt: expected .*, got 'fastamp.train 0'"):
        run(tmp_path, max_steps=9)


def test_the_folder_is_the_one_that_it_was_at_the_start(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run("run", loss_fn=act_at(4, lambda: os.chdir(tmp_path / "elsewhere")), max_steps=6)
    assert names(tmp_path / "run") == ["step-00000003.pt", "step-00000006.pt"]


def test_a_folder_that_cannot_be_read_is_an_error_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    model = make_model()
    with pytest.raises(OSError, match=f"{tmp_path}/file/run: cannot be read: Not a"):
        run(tmp_path / "file" / "run", model=model)
    assert all(map(torch.equal, model.parameters(), make_model().parameters()))
