"""Checkpoints of ranks: one file of whole tensors, restored by any number of them."""

from __future__ import annotations

import re

import pytest
import torch
from support import checkpoint_ranks as cases
from support import lean
from support import ranks as started_ranks
from support.trainable import names

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")


@pytest.fixture(scope="module")
def three():
    with started_ranks.start(3) as started:
        yield started


def test_any_number_of_ranks_restores_a_checkpoint_to_the_bit(three, tmp_path):
    """Of DDP, of FSDP2 and of one process; each run is compared with one process's."""
    folder, n_steps = tmp_path / "run", 0
    for kind, count in [("fsdp", 2), ("fsdp", 3), (None, 0), ("ddp", 3), ("fsdp", 1), ("ddp", 2)]:
        n_steps += 2
        expected = cases.train(tmp_path / str(n_steps), None, n_steps)
        if kind is None:
            found = [cases.train(folder, None, 2)]
        else:
            found = three.run(count, cases.train, folder, kind, 2)
        for each in found:
            lean.assert_same(each, expected)
    assert names(folder) == [f"step-{step:08d}.pt" for step in (8, 10, 12)]
    state = torch.load(folder / "step-00000012.pt", weights_only=True)
    assert state["optimizer"]["state"][0]["exp_avg"].shape == (7, 5)


def test_shards_of_a_lean_optimizer_move_to_other_numbers_of_ranks(three, tmp_path):
    whole = lean.checkpointed_run(tmp_path / "whole", 1, 6)
    for count in (2, 3, 2):
        found = three.run(count, lean.checkpointed_run, tmp_path / "parts", count, 2)
    lean.assert_same(found[0], whole)


def test_as_many_ranks_get_their_random_numbers_and_their_batches_back(three, tmp_path):
    whole = three.run(2, cases.draw_and_load, tmp_path / "whole", 3)
    begun = three.run(2, cases.draw_and_load, tmp_path / "run", 2)
    ended = three.run(2, cases.draw_and_load, tmp_path / "run", 9)
    assert [[*one[:1], *other] for one, other in zip(begun, ended, strict=True)] == whole


@pytest.mark.parametrize("who", [[0], [1]])
def test_a_save_that_not_all_ranks_call_is_an_error_after_a_while(three, who, tmp_path):
    found = three.run(2, cases.save_on_some, tmp_path, who)
    kind, text = found[who[0]]
    assert kind == "TimeoutError"
    assert text.startswith("save: every rank has to call it, and another one has not")
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_full_disk_is_the_same_error_on_all_ranks(three, kind, tmp_path):
    text = f"{tmp_path}: step-00000002.pt cannot be written: No space left on device"
    found = three.run(2, cases.save_on_a_full_disk, tmp_path, kind)
    assert found == [("OSError", f"[Errno 28] {text}")] * 2
    assert names(tmp_path) == ["step-00000001.pt", "step-00000003.pt"]


@pytest.mark.parametrize("name", ["meter", "loader"])
@pytest.mark.parametrize(
    ("problem", "who", "text"),
    [
        ("a function", [0], ".*pickle"),
        (KeyError, [1], ""),
        (cases.OwnError, [1], "OwnError: of the user's own"),
    ],
    ids=["a function", "KeyError", "an error that cannot be sent"],
)
def test_what_one_rank_cannot_save_is_an_error_on_all(three, problem, who, text, name, tmp_path):
    """None waits for another one: the next save of all of them is written."""
    found = three.run(2, cases.save_what_is_refused, tmp_path, name, problem, who)
    for rank, (_, its_text) in enumerate(found):
        assert rank in who or re.search(text, its_text)
    assert names(tmp_path) == ["step-00000002.pt"]


def test_a_damaged_checkpoint_is_passed_over_by_all_with_one_warning(three, tmp_path):
    three.run(2, cases.save_on_a_full_disk, tmp_path, "fsdp")
    path = tmp_path / "step-00000003.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    (step, warned), other = three.run(2, cases.restore_with_warnings, tmp_path, "fsdp")
    assert (step, other) == (1, (1, []))
    assert len(warned) == 1
    assert re.search(r"03\.pt: is damaged: .*; resumed from .*/step-00000001\.pt$", warned[0])
