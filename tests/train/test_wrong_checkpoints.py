"""Checkpoints that are whole and wrong: refused by name and entry, before anything is loaded."""

from __future__ import annotations

import copy
import os
import random
import zipfile

import numpy as np
import pytest
import torch
from support.trainable import make_data, make_model, run
from torch.utils.data import DataLoader, TensorDataset

from fastamp.train import CheckpointError

FIELDS = {"max_steps": 6, "keep": 9, "loss_fn": torch.nn.functional.cross_entropy}
GONE = object()
WRONG = [GONE, None, 5, -1, 2.5, float("nan"), "x", [], {}, torch.zeros(3), 2**70]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with a finished run, and the state of its newest checkpoint."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, **FIELDS)
    return folder, torch.load(folder / "step-00000006.pt", weights_only=True)


def places(tree, at=()):
    """Yield the path of every entry, but of long lists the first and the last one only."""
    items = tree.items() if isinstance(tree, dict) else ()
    if isinstance(tree, (list, tuple)):
        items = {i: tree[i] for i in {0, len(tree) - 1} if tree}.items()
    for key, value in items:
        yield (*at, key)
        yield from places(value, (*at, key))


def changed(tree, at, value):
    """Return a copy of a tree with another value, or with none, at a place."""
    if not at:
        return value
    key, *rest = at
    new = copy.copy(tree) if isinstance(tree, dict) else list(tree)
    if rest or value is not GONE:
        new[key] = changed(tree[key] if rest else None, rest, value)
    else:
        del new[key]
    return tuple(new) if isinstance(tree, tuple) else new


def refusal(folder, state, step=6, **fields):
    """Resume from a state; return the error, after a look at all that must be as it was."""
    path, model, made = folder / f"step-{step:08d}.pt", make_model(), []
    torch.save(state, path)

    def optimizer(parameters):
        made.append(torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.01, fused=True))
        return made[0]

    before = generators()
    try:
        run(folder, model=model, optimizer=optimizer, **FIELDS | fields)
    except CheckpointError as raised:
        error = str(raised)
    except ValueError as raised:  # all of it was taken, and the run had finished
        assert "nothing is left to train at step 6" in str(raised)  # noqa: PT017
        return None
    else:
        return None
    assert str(path) in error
    assert all(map(torch.equal, model.parameters(), make_model().parameters()))
    assert not made[0].state
    assert generators() == before
    return error


def generators():
    numpy = np.random.get_state()[1].tobytes()  # noqa: NPY002 - the program's generator
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy


def is_same_kind(old, new):
    """Say whether a value may stand in the place of another: a number, or a flag."""
    if old is None or isinstance(old, bool):
        return new is None or new is GONE
    return type(new) in (int, float) and isinstance(old, (int, float))


ENTRIES = ["best", "kinds", "loader", "model", "n_with_state", "optimizer", "rng", "run", "scaler"]
ENTRIES += ["scheduler", "step", "tracker"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_is_checked_before_anything_is_loaded(entry, whole, tmp_path):
    _, state = whole
    assert sorted(state) == sorted([*ENTRIES, "format"])
    assert refusal(tmp_path, state) is None
    for i, at in enumerate([(entry,), *places(state[entry], (entry,))]):
        old = state
        for key in at:
            old = old[key]
        n_shared = (1, 6, 18)[min(len(at), 3) - 1]  # neighbours share the values, but at large
        n_shared = 1 if "FASTAMP_AT_LARGE" in os.environ else n_shared
        for value in WRONG[i % n_shared :: n_shared]:
            error = refusal(tmp_path, changed(state, at, value))
            may_stand = at[:2] == ("loader", "loader") or is_same_kind(old, value)
            may_stand |= entry == "tracker" and value in (GONE, {})  # shorter curves are curves
            may_stand |= at == ("loader", "rng") and value is None  # of an older checkpoint
            may_stand |= at[-3:] == ("rng", "python", 2) and isinstance(
                value, float
            )  # for the next draw
            may_stand |= at[-1] == "devices" and isinstance(value, list)
            assert may_stand or error, (at, value)
            names_it = [entry, str(at[-1])]
            names_it += ["it has"] if entry in {"kinds", "model", "run"} else []
            assert error is None or any(map(error.__contains__, names_it)), error
            assert error is None or error.endswith("; resume=False starts anew")
        may_have_more = entry == "tracker" or at[:2] == ("loader", "loader")
        may_have_more |= at[1:2] == ("param_groups",)  # of another version of torch
        if isinstance(old, dict) and not may_have_more:
            place = "another" if at[-1] != "state" else "state"
            assert place in refusal(tmp_path, changed(state, at, {**old, "another": 3}))


def test_the_position_of_a_loader_of_torch_is_checked(tmp_path):
    data = DataLoader(TensorDataset(*make_data()), 8)
    run(tmp_path, data, **FIELDS)
    state = torch.load(tmp_path / "step-00000006.pt", weights_only=True)
    for name, value in [("n_consumed", -1), ("rng", None), ("rng", {}), ("loader", {}), ("rng", 5)]:
        error = refusal(tmp_path, changed(state, ("loader", name), value), data=data)
        assert name in error or name == "loader"
    for own in (torch.zeros(3), [state["rng"]["torch"]]):
        error = refusal(tmp_path, changed(state, ("loader", "rng", "own"), own), data=data)
        assert "['own'] is" in error
    error = refusal(tmp_path, state)  # with tensors, whose loader has a state
    assert "train_data resumes by itself" in error


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", torch.optim.RMSprop])
def test_what_other_optimizers_keep_is_checked(optimizer, tmp_path):
    fields = {**FIELDS, "optimizer": optimizer}
    run(tmp_path, **fields)
    path = tmp_path / "step-00000006.pt"
    state = torch.load(path, weights_only=True)
    with pytest.raises(ValueError, match="nothing is left to train"):  # so it was restored
        run(tmp_path, **fields)
    for place, value in [(("state",), {7: {}}), (("state", 9), {}), (("state", 0), 5)]:
        torch.save(changed(state, ("optimizer", *place), value), path)
        with pytest.raises(CheckpointError, match=r"\['optimizer'\]\['state'\]"):
            run(tmp_path, **fields)


def test_a_run_is_at_the_step_of_its_checkpoint(whole, tmp_path):
    """Else it would save steps before that one, which is an error."""
    assert refusal(tmp_path, changed(whole[1], ("run", "place", 0), 1)) is None
    error = refusal(tmp_path, changed(whole[1], ("step",), 1))
    assert "its ['step'] is 1, expected that of its name" in error


def test_a_part_that_refuses_its_state_is_named(tmp_path):
    class Picky(torch.nn.Sequential):
        def get_extra_state(self):
            return 1

        def set_extra_state(self, state):
            raise LookupError(state)

    run(tmp_path, model=Picky(*make_model()), **FIELDS)
    with pytest.raises(CheckpointError, match=r"06\.pt: its \['model'\] .* LookupError: 1; resume"):
        run(tmp_path, model=Picky(*make_model()), **FIELDS)


@pytest.mark.parametrize("copies", [1, 20_000])
def test_a_hostile_archive_costs_no_time(copies, tmp_path):
    """Of 100 MB in one entry, and of one entry under many names."""
    path = tmp_path / "step-00000006.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(100_000_000 // copies))
        archive.filelist *= copies
    with pytest.raises(CheckpointError, match="would be larger than the file"):
        run(tmp_path, **FIELDS)
