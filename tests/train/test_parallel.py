"""Training over ranks, in real processes over gloo: as one process, and resumed by any number."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch
from support.parallel_cases import (
    N,
    at_large,
    bits,
    draws_and_pauses,
    four,
    run,
    train,
    train_and_overflow_on_one,
    train_by_hand,
    train_from_a_list,
    train_on_fewer_batches,
    train_without_sharing,
)
from support.processes import run_python
from support.trainable import CURVES, names

__all__ = ["four"]  # a fixture
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")

adds_up = pytest.mark.skipif(
    torch.__version__ < (2, 10), reason="torch 2.8's FSDP2 over gloo adds gradients up"
)
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
MODES = pytest.mark.parametrize("mode", ["ddp", "fsdp"])


def assert_alike(ours, expected):
    """Compare runs that add the parts of a batch in another order; Adam divides by the sum."""
    assert ours["steps"] == expected["steps"]
    for name in CURVES:
        assert ours["curves"][name][0] == expected["curves"][name][0], name
        torch.testing.assert_close(
            *(torch.tensor(side["curves"][name][1]) for side in (ours, expected)),
            rtol=1e-4,
            atol=1e-6,
        )
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(
            torch.tensor(ours["weights"][name]), torch.tensor(weight), rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize(  # 1 or 5 of the 12 batches of an epoch
    ("mode", "accumulate"),
    [at_large("ddp", 1), ("ddp", 5), pytest.param("fsdp", 1, marks=adds_up), at_large("fsdp", 5)],
)
def test_ranks_train_as_one_process_with_all_their_batches(four, mode, accumulate):
    ours, seen = run(four, 2, parallel=mode, batch_size=4, accumulate=accumulate)
    expected = train(batch_size=8, accumulate=accumulate)
    assert_alike(ours, expected)
    for parts, whole in zip(zip(*seen, strict=True), expected["seen"], strict=True):
        assert sorted(itertools.chain(*parts)) == sorted(whole)


@adds_up
@pytest.mark.parametrize(("optimizer", "max_norm"), [("sgd", None), ("adagrad", 1.0)])
def test_every_optimizer_takes_shards(four, optimizer, max_norm, tmp_path):
    fields = {"optimizer": optimizer, "max_norm": max_norm, "max_steps": 5}
    ours, _ = run(four, 2, parallel="fsdp", batch_size=4, **fields)
    assert_alike(ours, train(batch_size=8, **fields))
    run(four, 2, tmp_path, parallel="fsdp", batch_size=4, stop_at=5, **fields)
    assert bits(run(four, 2, tmp_path, parallel="fsdp", batch_size=4, **fields)[0]) == bits(ours)


@pytest.mark.parametrize(("mode", "count"), [("ddp", 2), at_large("ddp", 4), ("fsdp", 2)])
def test_as_many_ranks_resume_to_the_bit(four, mode, count, tmp_path):
    """DDP sums in another order in its first backward pass: two ranks do not see it."""
    fields = {"parallel": mode, "dropout": 0.2, "precision": "16-mixed", "accumulate": 2}
    fields |= {"batch_size": 16 // count, "checkpoint_every": 4}
    expected, seen = run(four, count, **fields)
    run(four, count, tmp_path, stop_at=10, **fields)
    assert names(tmp_path) == ["step-00000004.pt"]  # of 6, 3 in an epoch
    resumed, seen_after = run(four, count, tmp_path, **fields)
    assert [batches[8:] for batches in seen] == seen_after
    if mode == "ddp" and count > 2:
        assert resumed["skipped"] == expected["skipped"]
        assert_alike(resumed, expected)
    else:
        assert bits(resumed) == bits(expected)


@adds_up
@pytest.mark.parametrize("modes", [at_large(("fsdp",) * 3), ("ddp", "fsdp", "ddp")], ids=str)
def test_other_numbers_of_ranks_go_on_with_every_sample_once(four, modes, tmp_path):
    """2, then 4, then 1, with as many samples in a step: the run is that of one process."""
    same = {"checkpoint_every": 4, "max_steps": 16}
    expected = train(batch_size=8, **same)
    epochs = []
    for count, mode, stop_at in zip((2, 4, 1), modes, (6, 10, 0), strict=True):
        fields = {"parallel": mode, "batch_size": 8 // count, **same}
        n_before = int(names(tmp_path)[-1][5:13]) if epochs else 0
        ours, seen = run(four, count, tmp_path, stop_at=stop_at - n_before, **fields)
        steps = [sorted(itertools.chain(*parts)) for parts in zip(*seen, strict=True)]
        epochs[n_before:] = steps
    assert_alike(ours, expected)
    assert epochs == [sorted(batch) for batch in expected["seen"]]
    assert sorted(itertools.chain(*epochs[:12])) == list(range(N))


@pytest.mark.parametrize("mode", [at_large("ddp"), "fsdp"])
def test_a_loop_of_ones_own_resumes_over_ranks(four, mode, tmp_path):
    """On as many to the bit, on others too, and after a signal to one of them."""
    expected = four.run(2, train_by_hand, tmp_path / "whole", mode)
    assert expected[0] == expected[1]
    four.run(2, train_by_hand, tmp_path / "run", mode, 11)
    assert names(tmp_path / "run")[-1] == "step-00000009.pt"
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    assert four.run(2, train_by_hand, tmp_path / "run", mode) == expected
    others = four.run(4, train_by_hand, tmp_path / "other", mode)
    assert len({*map(str, others)}) == 1
    assert four.run(2, train_by_hand, tmp_path / "signal", mode, 0, 4) == [143, 143]
    assert names(tmp_path / "signal") == ["step-00000010.pt"]
    assert four.run(2, train_by_hand, tmp_path / "signal", mode) == expected


def test_loaders_of_the_users_own_resume_with_as_many_ranks_only(four, tmp_path):
    expected = four.run(2, train_from_a_list, None)
    four.run(2, train_from_a_list, tmp_path, 5)
    for text in four.run(4, train_from_a_list, tmp_path):
        assert ": 2 ranks wrote it, other numbers need a fastamp.DataLoader(shard=True)" in text
    resumed = four.run(2, train_from_a_list, tmp_path)
    assert bits(resumed[0]) == bits(expected[0])
    assert [r["seen"] for r in resumed] == [r["seen"][3:] for r in expected]


@pytest.mark.parametrize(("mode", "of"), [("ddp", "train_data"), ("fsdp", "val_data")])
def test_unlike_numbers_of_batches_are_an_error_on_all(four, mode, of):
    lengths = [12, 11] if of == "train_data" else [4, 3]
    text = f"{of}: expected as many batches on every rank, got {lengths}"
    assert four.run(2, train_on_fewer_batches, mode, of) == [("ValueError", text)] * 2


def test_a_model_that_ranks_do_not_share_is_refused(four):
    for kind, text in four.run(2, train_without_sharing):
        assert kind == "ValueError"
        assert text.startswith("model: expected a model in DistributedDataParallel, or sharded")
        assert text.endswith("as there are 2 ranks, got Linear")


def test_a_program_under_torchrun_that_makes_no_process_group_is_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "as there are 2 ranks, got Linear" in train_without_sharing()[1]


@MODES
def test_an_overflow_on_one_rank_is_skipped_by_all(four, mode):
    results = four.run(2, train_and_overflow_on_one, mode)
    for result in results:
        assert result["skipped"] == 1
        assert result["curves"]["loss_scale"] == [[1, 6], [65536.0, 32768.0]]
        assert bits(result) == bits(results[0])


def test_every_rank_draws_for_itself_and_gradients_are_exchanged_once_a_step(four):
    (first, n_first), (second, n_second) = four.run(2, draws_and_pauses, 4)
    assert first != second
    assert n_first == n_second == 4  # of 6 batches, in steps of 4 and 2


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def test_torchrun_trains_and_another_number_of_ranks_resumes(tmp_path):
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 300)
    args = ["--data", str(text), "--layers", "1", "--width", "16", "--heads", "2"]
    args += ["--block-size", "16", "--batch-size", "8", "--lr", "0.01"]
    args += ["--checkpoint-every", "20", "--checkpoint-dir", str(tmp_path / "run")]
    launcher = ["--master-port", free_port(), str(EXAMPLE)]
    code, said = "from torch.distributed.run import main; main()", []
    for count, mode, steps in (("2", "ddp", "40"), ("1", "fsdp", "44")):
        options = ["--nproc-per-node", count, *launcher, *args, "--parallel", mode]
        done = run_python(code, *options, "--steps", steps, PYTHONPATH=os.pathsep.join(sys.path))
        assert done.returncode == 0, done.stderr
        assert ("resumed at step 40 of 44" in done.stderr) == (steps == "44"), done.stderr
        said.append(done.stdout)
    assert said[0].count("40 steps in 32-true, 0 skipped\ntrain_loss: 5.") == 1
    assert float(re.search("val_loss: .* to ([0-9.]+)", said[0])[1]) < 4
    assert "44 steps in 32-true, 0 skipped" in said[1]
