"""Training over ranks, in real processes over gloo: as one process, and resumed by any number."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support import ranks
from support.parallel_cases import (
    N,
    call,
    call_for_error,
    draws_and_pauses,
    error_of,
    fail_to_write,
    train,
    train_and_overflow_on_one,
    train_from_a_list,
    train_with_sinks,
)
from support.trainable import CURVES

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed"),
    pytest.mark.usefixtures("one_thread"),
]

MODES = pytest.mark.parametrize("mode", ["ddp", "fsdp"])


@pytest.fixture(scope="module")
def four():
    with ranks.start(4) as started:
        yield started


def run(started, count, *args, **fields):
    """Train on so many ranks; return what all have in common, and the samples of each."""
    results = started.run(count, call, args, fields)
    seen = [result.pop("seen") for result in results]
    for result in results:
        assert repr(result.get("curves")) == repr(results[0].get("curves"))
    return results[0], seen


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_alike(ours, expected):
    """Compare runs that add in another order.

    Parts of a batch are added in another order than the batch: the gradients differ by a few
    float32 roundings, and Adam divides by their size.
    """
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


@pytest.mark.parametrize("accumulate", [1, 5])  # of the 12 batches of an epoch
@MODES
def test_ranks_train_as_one_process_with_all_their_batches(four, mode, accumulate):
    ours, seen = run(four, 2, parallel=mode, batch_size=4, accumulate=accumulate)
    expected = train(batch_size=8, accumulate=accumulate)
    assert_alike(ours, expected)
    for parts, whole in zip(zip(*seen, strict=True), expected["seen"], strict=True):
        assert sorted(itertools.chain(*parts)) == sorted(whole)


def bits(result):
    weights = {name: weight.tobytes() for name, weight in result["weights"].items()}
    return weights, repr(result["curves"]), result["steps"], result["skipped"]


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_every_optimizer_takes_shards(four, optimizer, max_norm, tmp_path):
    fields = {"optimizer": optimizer, "max_norm": max_norm, "max_steps": 5}
    ours, _ = run(four, 2, tmp_path, parallel="fsdp", batch_size=4, **fields)
    assert_alike(ours, train(batch_size=8, **fields))
    assert bits(run(four, 2, tmp_path, parallel="fsdp", batch_size=4, **fields)[0]) == bits(ours)


@pytest.mark.parametrize("count", [2, 4])
@MODES
def test_as_many_ranks_resume_to_the_bit(four, mode, count, tmp_path):
    fields = {"parallel": mode, "dropout": 0.2, "precision": "16-mixed", "accumulate": 2}
    fields |= {"batch_size": 8 // count}
    expected, _ = run(four, count, **fields)
    run(four, count, tmp_path, stop_at=22, **fields)
    assert names(tmp_path)[-1] == "step-00000009"  # within the second epoch
    resumed, _ = run(four, count, tmp_path, **fields)
    assert bits(resumed) == bits(expected)


@pytest.mark.parametrize("modes", [("ddp",) * 3, ("fsdp",) * 3, ("fsdp", "ddp", "fsdp")])
def test_other_numbers_of_ranks_go_on_with_every_sample_once(four, modes, tmp_path):
    """2, then 4, then 1, with as many samples in a step: the run is that of one process."""
    expected = train(batch_size=8, checkpoint_every=2)
    epochs = []
    for count, mode, stop_at in zip((2, 4, 1), modes, (4, 10, 0), strict=True):
        fields = {"parallel": mode, "batch_size": 8 // count, "checkpoint_every": 2}
        n_before = int(names(tmp_path)[-1][5:]) if epochs else 0
        ours, seen = run(four, count, tmp_path, stop_at=stop_at - n_before, **fields)
        steps = [sorted(itertools.chain(*parts)) for parts in zip(*seen, strict=True)]
        epochs[n_before:] = steps
    assert_alike(ours, expected)
    assert epochs == [sorted(batch) for batch in expected["seen"]]
    assert sorted(itertools.chain(*epochs[:12])) == list(range(N))


def test_loaders_of_the_users_own_resume_with_as_many_ranks_only(four, tmp_path):
    expected = four.run(2, train_from_a_list, None)
    four.run(2, train_from_a_list, tmp_path, 5)
    for text in four.run(4, train_from_a_list, tmp_path):
        assert ": 2 ranks wrote it within a pass over loaders of their own" in text
    resumed = four.run(2, train_from_a_list, tmp_path)
    assert bits(resumed[0]) == bits(expected[0])
    assert [r["seen"] for r in resumed] == [r["seen"][3:] for r in expected]


@MODES
def test_the_schedule_keeps_its_place_where_the_steps_get_fewer(four, mode, tmp_path):
    fields = {"parallel": mode, "schedule": "linear", "warmup_steps": 0, "lr": 0.012}
    run(four, 2, tmp_path, stop_at=7, **fields)  # 12 steps, 6 of them in the checkpoint
    ours, _ = run(four, 4, tmp_path, **fields)
    rates = [0.012 * (12 - i) / 12 for i in range(6)] + [0.006, 0.004, 0.002]
    assert ours["curves"]["lr"][1] == pytest.approx(rates)


@MODES
def test_an_overflow_on_one_rank_is_skipped_by_all(four, mode):
    results = four.run(2, train_and_overflow_on_one, mode)
    for result in results:
        assert result["skipped"] == 1
        assert result["curves"]["loss_scale"] == [[1, 6], [65536.0, 32768.0]]
        assert bits(result) == bits(results[0])


@MODES
def test_sinks_are_called_on_the_first_rank_and_times_are_of_all(four, mode):
    first, second = four.run(2, train_with_sinks, mode)
    steps = [step for name, step, _ in first["got"] if name == "train/loss"]
    assert (steps, second["got"]) == (list(range(1, 11)), [])
    assert {"data", "forward", "backward", "step", "evaluate"} == set(first["over_ranks"])
    assert first["over_ranks"] == second["over_ranks"]
    assert {s["min_rank"] for s in first["over_ranks"].values()} <= {0, 1}
    assert "s on rank" in first["text"]


def test_every_rank_draws_for_itself_and_gradients_are_exchanged_once_a_step(four):
    (first, n_first), (second, n_second) = four.run(2, draws_and_pauses, 4)
    assert first != second
    assert n_first == n_second == 4  # of 6 batches, in steps of 4 and 2


def test_blocks_are_sharded_one_by_one(four):
    ours, _ = run(four, 2, parallel="fsdp", max_steps=1)
    assert ours["units"] == 3  # two blocks, and the rest
    assert ours["spread"] == len(ours["weights"])
    assert run(four, 2, max_steps=1)[0]["spread"] == 0  # None is DDP


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "is damaged in __1_0.distcp": lambda folder: flip(folder / "__1_0.distcp"),
    "is damaged in .metadata": lambda folder: flip(folder / ".metadata"),
    "is damaged in __0_0.distcp": lambda folder: (folder / "__0_0.distcp").unlink(),
    "is cut short or no checkpoint": lambda folder: (folder / "run.pt").unlink(),
}


@pytest.mark.parametrize("problem", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_all_and_a_good_one_offered(four, problem, tmp_path):
    run(four, 2, tmp_path, parallel="fsdp", max_steps=6)
    DAMAGE[problem](tmp_path / "step-00000006")
    fields = {"parallel": "fsdp", "max_steps": 6}
    for kind, text in four.run(4, call_for_error, (tmp_path,), fields):
        assert kind == "CheckpointError"
        assert f"step-00000006: {problem}" in text or "step-00000006/run.pt: " + problem in text
        assert f"{tmp_path}/step-00000003 is good: remove step-00000006 to resume from it" in text


def test_processes_and_ranks_refuse_each_others_checkpoints_and_other_runs(four, tmp_path):
    run(four, 2, tmp_path / "ranks", max_steps=3)
    kind, text = error_of(tmp_path / "ranks", max_steps=3)
    assert kind == "CheckpointError"
    assert "step-00000003: was written by several ranks: torchrun --nproc-per-node 1" in text
    train(tmp_path / "alone", max_steps=3)
    for kind, text in four.run(2, call_for_error, (tmp_path / "alone",), {"max_steps": 3}):
        assert kind == "CheckpointError"
        assert "step-00000003.pt: was written by a process of its own" in text
    for kind, text in four.run(4, call_for_error, (tmp_path / "ranks",), {"lr": 0.5}):
        assert kind == "CheckpointError"
        assert "it has lr=0.01, this run 0.5" in text


@pytest.mark.parametrize("where", ["its part", "the rest"])
@MODES
def test_a_rank_that_cannot_write_is_an_error_on_all(four, mode, where, tmp_path):
    run(four, 2, tmp_path, parallel=mode, stop_at=4)
    for kind, text in four.run(2, fail_to_write, tmp_path, mode, where):
        assert kind == "OSError"
        assert f"checkpoint_dir={tmp_path}: step-00000006 cannot be written: No space" in text
    assert names(tmp_path) == ["step-00000003"]
    assert run(four, 2, tmp_path, parallel=mode)[0]["steps"] == 12


def test_ranks_are_asked_for_by_who_has_some():
    with pytest.raises(ValueError, match="parallel: expected None where neither torchrun nor"):
        train(parallel="ddp")
    with pytest.raises(ValueError, match="parallel: expected None, 'ddp' or 'fsdp', got 'zero'"):
        train(parallel="zero")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


SCRIPT = """
import sys, warnings, fastamp
warnings.simplefilter("error")
sys.path.insert(0, sys.argv[1])
from support import parallel_cases
folder, mode, steps = sys.argv[2:]
fields = {"parallel": mode, "schedule": "constant", "max_steps": int(steps), "keep": 2}
parallel_cases.train(folder, looks=False, **fields)
"""


@pytest.fixture
def launch(tmp_path):
    """Return what starts a rank of a script, and leave no process behind."""
    started, port = [], free_port()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    here = Path(__file__).parents[1]

    def start(rank, count, *args):
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
        env = os.environ | {"MASTER_ADDR": "127.0.0.1"} | {k: str(v) for k, v in env.items()}
        command = [sys.executable, str(script), here, *map(str, args)]
        started.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for(condition, processes):
    end_s = time.monotonic() + 60
    while not condition():
        assert all(process.poll() is None for process in processes)
        assert time.monotonic() < end_s
        time.sleep(0.01)


@MODES
def test_a_killed_rank_ends_the_others_and_a_restart_goes_on(mode, launch, tmp_path):
    folder = tmp_path / "run"
    both = [launch(rank, 2, folder, mode, 100_000) for rank in range(2)]
    wait_for(lambda: len([*folder.glob("step-*")]) == 2, both)
    both[1].kill()
    error = both[0].communicate(timeout=30)[1].decode()
    assert both[0].returncode  # 1, or what torch's threads make of it at exit
    assert "RuntimeError" in error
    newest = int(names(folder)[-1][5:])
    both = [launch(rank, 2, folder, mode, newest + 9) for rank in range(2)]
    assert [(p.wait(60), p.stderr.read()) for p in both] == [(0, b"")] * 2
    assert names(folder)[-1] == f"step-{newest + 9:08d}"


@MODES
def test_a_signal_to_one_rank_saves_on_all_at_the_same_step(mode, launch, tmp_path):
    folder = tmp_path / "run"
    both = [launch(rank, 2, folder, mode, 100_000) for rank in range(2)]
    wait_for(lambda: list(folder.glob("step-*")), both)
    both[1].send_signal(signal.SIGTERM)
    assert [(p.wait(30), p.stderr.read()) for p in both] == [(143, b"")] * 2
    last = int(names(folder)[-1][5:])
    assert last % 4 == 0 or last % 3 == 0  # log_every, or the next checkpoint


@MODES
def test_torchrun_trains_and_resumes(mode, tmp_path):
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 300)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    args = ["--master-port", free_port(), "-m", "fastamp.train", "--data", str(text)]
    args += ["--layers", "1", "--width", "16", "--heads", "2", "--block-size", "16"]
    args += ["--steps", "40", "--batch-size", "8", "--parallel", mode, "--lr", "0.01"]
    args += ["--checkpoint-every", "20", "--checkpoint-dir", str(tmp_path / "run")]
    options = {"capture_output": True, "text": True, "timeout": 90}
    done = subprocess.run([*command, "2", *args], check=False, **options)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("40 steps in 32-true, 0 skipped\ntrain_loss: 5.") == 1
    assert float(re.search("val_loss: .* to ([0-9.]+)", done.stdout)[1]) < 4
    again = subprocess.run([*command, "1", *args], check=False, **options)
    assert again.returncode == 0
    assert re.search("val_loss: .*", again.stdout)[0] in done.stdout
