"""Checkpoints of ranks that are damaged, wrong or hostile: refused, or passed over, by all."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import zlib

import pytest
import torch
from support.parallel_cases import (
    OwnError,
    at_large,
    bits,
    call_for_error,
    call_for_warnings,
    call_with_warnings_as_errors,
    four,
    make_wrongly_on_one,
    run,
    save_and_restore_versions,
    save_what_is_refused,
)
from support.trainable import names
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
)

from fastamp.train import sharded_checkpoint
from fastamp.train.state_file import DamagedError

__all__ = ["four"]  # a fixture
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def pipe(path):
    path.unlink()
    os.mkfifo(path)


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def replace_index(folder, index):
    """Put something in place of where the tensors lie, with the sum that belongs to it."""
    content = pickle.dumps(index)
    (folder / ".metadata").write_bytes(content)
    state = torch.load(folder / "run.pt", weights_only=True)
    state["files"][".metadata"] = zlib.crc32(content)
    torch.save(state, folder / "run.pt")


def of_bytes(folder):
    """Say that what is kept are pickled values, as torch.distributed.checkpoint may have them."""
    kept = pickle.loads((folder / ".metadata").read_bytes())
    names = kept.state_dict_metadata
    return Metadata(dict.fromkeys(names, BytesStorageMetadata()), None, kept.storage_data)


FEW = {
    "/.metadata: names posix.mkdir": lambda folder: replace_index(
        folder, Hostile(folder / "code has run")
    ),
    "is damaged in __1_0.distcp": lambda folder: flip(folder / "__1_0.distcp"),
    "is damaged or no checkpoint: .*regular file": lambda folder: pipe(folder / "run.pt"),
}
MORE = {
    "/.metadata: names .*BytesStorageMetadata": lambda folder: replace_index(
        folder, of_bytes(folder)
    ),
    "is damaged in .metadata": lambda folder: flip(folder / ".metadata"),
    "is damaged in __0_0.distcp": lambda folder: pipe(folder / "__0_0.distcp"),
    "is damaged or no checkpoint": lambda folder: (folder / "run.pt").unlink(),
}


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("name", ["meter", "loader"])
@pytest.mark.parametrize(
    ("problem", "kind", "text"),
    [
        ("not pickled", "CheckpointError", r"nothing is saved: its \['{}'\] .* pickle"),
        ("a lock", "CheckpointError", r"nothing is saved: its \['{}'\] cannot pickle"),
        (KeyError, "KeyError", ""),
        (OwnError, "RuntimeError", "OwnError: of the user's own"),
    ],
    ids=["a function", "a lock", "KeyError", "an error that cannot be sent"],
)
@pytest.mark.pairwise
def test_what_one_rank_cannot_save_is_an_error_on_all(
    four, problem, kind, text, name, ranks, tmp_path
):
    """None waits for another one: the next save of all of them is written."""
    found = four.run(2, save_what_is_refused, tmp_path, name, problem, ranks)
    for rank, (its_kind, its_text) in enumerate(found):
        is_its_own = problem is OwnError and rank == min(ranks)
        assert its_kind == ("OwnError" if is_its_own else kind)
        assert re.search("" if is_its_own else text.format(name), its_text)
    assert names(tmp_path) == ["step-00000002"]


TWO_STEPS = {"parallel": "fsdp", "max_steps": 2, "checkpoint_every": 1}


@pytest.fixture(scope="module")
def two_steps(four, tmp_path_factory):
    """Return a folder with both checkpoints of a run over two ranks, and its result."""
    folder = tmp_path_factory.mktemp("two steps")
    return folder, run(four, 2, folder, **TWO_STEPS)[0]


@pytest.mark.parametrize("problem", [*FEW, *map(at_large, MORE)])
def test_a_damaged_checkpoint_is_passed_over_by_all_with_one_warning(
    four, problem, two_steps, tmp_path
):
    whole, expected = two_steps
    folder = tmp_path / "damaged"
    shutil.copytree(whole, folder)
    (FEW | MORE)[problem](folder / "step-00000002")
    (first, warned), (second, silent) = four.run(2, call_for_warnings, (folder,), TWO_STEPS)
    assert bits(first) == bits(second) == bits(expected)
    assert silent == []
    assert len(warned) == 1
    assert not [*folder.rglob("code has run")]
    text = f"step-00000002(/run.pt: |: )?{problem}.*; resumed from {folder}/step-00000001$"
    assert re.search(text, warned[0])


def test_a_warning_that_is_an_error_is_one_on_all_ranks(four, two_steps, tmp_path):
    shutil.copytree(two_steps[0], tmp_path, dirs_exist_ok=True)
    flip(tmp_path / "step-00000002" / "__1_0.distcp")
    first, second = four.run(2, call_with_warnings_as_errors, tmp_path, TWO_STEPS)
    assert first == second
    assert first.endswith("step-00000001")


def test_a_wrong_argument_on_one_rank_is_an_error_on_all(four, tmp_path):
    for text in four.run(2, make_wrongly_on_one, tmp_path):
        assert text.startswith("loader: expected an object with state_dict and load_state_dict")


def test_the_versions_of_a_models_modules_are_kept(four, tmp_path):
    """A module that migrates older states would migrate its own."""
    for found in four.run(2, save_and_restore_versions, tmp_path):
        assert found == [[[1.0, 1.0]], [[2.0, 2.0]]]


@pytest.fixture(scope="module")
def three_steps(four, tmp_path_factory):
    """Return a folder with the checkpoint of two ranks after their third and last step."""
    folder = tmp_path_factory.mktemp("three steps")
    run(four, 2, folder, parallel="fsdp", max_steps=3)
    return folder


@pytest.mark.parametrize("place", ["run", "rng", "loader", "optimizer", "model", "files", "ranks"])
def test_a_wrong_checkpoint_is_refused_by_all(four, place, three_steps, tmp_path):
    fields = {"parallel": "fsdp", "max_steps": 3}
    shutil.copytree(three_steps, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "step-00000003" / "run.pt"
    state = torch.load(path, weights_only=True)
    for value in (None, {}, -1):
        wrong = {**state, place: value}
        if place in {"loader", "rng"}:  # of the second rank alone
            wrong = {**state, "ranks": [state["ranks"][0], {**state["ranks"][1], place: value}]}
        torch.save(wrong, path)
        for kind, text in four.run(2, call_for_error, (tmp_path,), fields):
            assert (kind, str(path.parent) in text) == ("CheckpointError", True)
            assert place in text or place == "model"


class Attribute:
    """Is pickled as an attribute of something, as enumerations were before Python 3.11.4."""

    def __init__(self, *of):
        self.of = of

    def __reduce__(self):
        return getattr, self.of


def test_an_index_may_name_members_of_an_enumeration_and_no_other_attribute(tmp_path):
    path = tmp_path / ".metadata"
    formats = _MEM_FORMAT_ENCODING
    path.write_bytes(pickle.dumps(Attribute(formats, "TORCH_CONTIGUOUS_FORMAT")))
    sharded_checkpoint._check_index(path)
    for of in ((torch.Size, "numel"), (formats, "mro")):
        path.write_bytes(pickle.dumps(Attribute(*of)))
        with pytest.raises(DamagedError):
            sharded_checkpoint._check_index(path)
