"""A task's race from the command line: what it measures, and what it says."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.bench_pages import make_results
from support.processes import run_python

from fastamp.bench import apart, environment, gpt, jobs, main_job, measure, targets
from fastamp.bench.__main__ import main
from fastamp.bench.gpt import Shape
from fastamp.bench.measure import peak_memory
from fastamp.bench.race import Plan
from fastamp.bench.tasks import find_make
from fastamp.bench.trainer import Score, Trainer

TINY_SHAPE = Shape(layers=1, heads=2, width=32, block_size=16)
NAMES = ["torch fp32", "fastamp fp32", "torch bf16", "fastamp bf16"]
MIB = 2**20
TASK = """
import torch
from torch import nn
def make(device, seed):
    x, y = torch.randn(256, 8), torch.arange(256) % 3
    data = torch.utils.data.TensorDataset(x, y)
    evaluate = lambda model: (model(x).argmax(1) == y).float()
    return nn.Linear(8, 3), data, nn.functional.cross_entropy, {"evaluate": evaluate}
def wide(device, seed):
    model, data, loss, options = make(device, seed)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3)), data, loss, options
"""


@pytest.fixture
def quick(monkeypatch):
    """Take the subprocesses out of the command, on a CPU that is fast at everything."""
    monkeypatch.setattr(main_job, "peak_memory", lambda arm: (arm.batch_size or 100) * MIB)
    monkeypatch.setattr(environment, "cpu_features", lambda: {"amx_bf16"})
    monkeypatch.setitem(gpt.MAIN_SHAPES, "cpu", TINY_SHAPE)


@pytest.fixture
def task(tmp_path):
    path = tmp_path / f"task_of_{tmp_path.name}.py"
    path.write_text(TASK)
    return path


MAIN = """
import multiprocessing, runpy, warnings
warnings.simplefilter("error")
# torch 2.8 leaves a folder of torch.distributed's to the end
warnings.filterwarnings("ignore", "Implicitly cleaning up", ResourceWarning)
from fastamp.bench import apart, cores, environment, gpt, measure
from fastamp.bench.gpt import Shape
from fastamp.bench.race import Plan
measure.SHARES_BLOCKS = 3
environment.cpu_features = lambda: {"amx_bf16"}
cores._read = dict  # a busy machine has another first line
measure.PLAN = Plan(build_s=0.01, builds=(3,))
gpt.MAIN_SHAPES["cpu"] = Shape(layers=1, heads=2, width=32, block_size=16)
# A fork has torch, which takes seconds to import; a test below starts a fresh process.
apart.get_context = lambda _: multiprocessing.get_context("fork")
runpy.run_module("fastamp.bench", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Run the main job once, on the standard library, as a user does whose output is a file."""
    folder = tmp_path_factory.mktemp("a folder")
    done = run_python(MAIN, "--device", "cpu", "--steps", "8", "--json", "all.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return done, json.loads((folder / "all.json").read_text())


def judge(found, peaks=None, excused=""):
    peaks = peaks or dict.fromkeys(NAMES, 100 * MIB)
    judged = targets.judge_targets(found, peaks, targets.TARGETS, excused=excused)
    return {each.name: each for each in judged}


# What is measured


def test_first_comes_what_runs_then_at_most_twelve_lines_of_100_columns(finished):
    done, found = finished
    first, *lines = done.stdout.splitlines()
    said = "gpt: torch and fastamp in fp32 and bf16; 3 to 3 builds in fresh processes, 0 to inf s"
    assert first == f"{said} of training"
    assert len(lines) <= 12
    assert " ".join(lines).startswith(found["sentence"])
    assert max(map(len, lines)) <= 100
    assert done.stderr == ""
    assert "\r" not in done.stdout


def test_the_record_has_every_step_of_every_arm_and_where_its_time_goes(finished):
    _, found = finished
    assert {name: len(curve) for name, curve in found["losses"].items()} == dict.fromkeys(NAMES, 8)
    assert [row[""] for row in found["table"]] == ["fp32", "bf16"]
    parts = {"data", "forward", "backward", "step", "other"}
    assert {frozenset(each) for each in found["details"]["shares"].values()} == {frozenset(parts)}
    assert all(peak > 0 for peak in found["details"]["peak_memory_nbytes"].values())
    names = {each["name"] for each in found["measurements"]}
    assert names >= {"precision/bf16", "fastamp/fp32", "fastamp/bf16", "speedup", "memory saving"}
    assert names >= {"accuracy gap", "step_time"}


@pytest.mark.parametrize(
    ("step_s", "left", "workers", "steps"),
    [
        *((0.2, 44, 0, 1), (0.02, 44, 0, 3), (0.01, 5000, 0, 5), (1e-9, 5000, 0, 40)),
        *((1e-3, 2, 0, 1), (1e-3, None, 0, 40), (1.0, None, 2, 8), (1e-9, None, 2, 40)),
    ],
)
def test_a_visit_is_long_with_workers_longer_and_leaves_six_blocks(step_s, left, workers, steps):
    assert measure.count_visit_steps(step_s, left, workers) == steps


def test_memory_is_measured_in_another_process_and_grows_with_the_model(processes):
    arm = main_job.list_arms("mlp", ["fp32"], batch_size=8)[0]
    small = apart.run_apart(peak_memory, arm)
    parameters = 784 * 256 + 256 + 256 * 10 + 10
    # float32 weights, gradients and two moments are 16 bytes a parameter
    assert 16 * parameters < small < 64 * parameters


def test_every_arm_starts_from_the_same_weights_and_takes_the_same_batches(
    quick, task, monkeypatch
):
    seen, starts, step = {name: [] for name in NAMES}, {}, Trainer.train_step

    def spy(trainer, batch, region):
        name = trainer.arm.name
        starts.setdefault(name, trainer.model.weight.detach().clone())
        seen[name].append(batch[0].clone())
        step(trainer, batch, region)

    monkeypatch.setattr(Trainer, "train_step", spy)
    monkeypatch.setattr(measure, "PLAN", Plan(builds=(1,)))
    assert main([str(task), "--device", "cpu", "--steps", "20"]) == 0
    for name in NAMES[1:]:
        assert torch.equal(starts[name], starts["torch fp32"])
        assert len(seen[name]) == len(seen["torch fp32"]) > 20
        assert all(map(torch.equal, seen[name], seen["torch fp32"]))
    assert not torch.equal(seen["torch fp32"][0], seen["torch fp32"][1])


# What is said


def test_an_arm_is_another_task_with_a_row_and_a_verdict(quick, task, tmp_path, capsys):
    path = tmp_path / "found.json"
    options = "--precision fp32 --steps 8 --memory --batch-size 7"
    words = [str(task), "--arm", f"wide={task}:wide", *options.split()]
    assert main([*words, "--device", "cpu", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [row[""] for row in found["table"]] == ["fp32", "wide"]
    assert [*found["losses"]] == ["torch fp32", "fastamp fp32", "wide"]
    assert {*found["details"]["peak_memory_nbytes"].values()} == {7 * MIB}
    [ratio] = [each for each in found["measurements"] if each["name"] == "speedup/wide"]
    assert (ratio["base"], ratio["unit"]) == ("torch fp32", "x")
    assert main([*words, "--arm", f"wide={task}:wide"]) == 2
    assert "argument --arm: ['wide', 'wide'] names two arms alike" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "name", "verdict"),
    [
        ({"speedups": [1.5] * 6}, "speedup", "pass"),
        ({"speedups": [1.4999] * 6}, "speedup", "fail"),
        ({"speedups": [1.4, 1.4, 1.5, 1.6, 1.6, 1.6]}, "speedup", "inconclusive"),
        ({"speedups": [2.0] * 2}, "speedup", "inconclusive"),  # too few for an interval
        ({"gap": 0.0099}, "accuracy gap", "pass"),
        ({"gap": -0.0099}, "accuracy gap", "pass"),
        ({"gap": 0.02}, "accuracy gap", "pass"),  # better
        ({"gap": -0.0101}, "accuracy gap", "fail"),
    ],
)
def test_a_target_is_met_up_to_its_bound(changes, name, verdict):
    assert judge(make_results(**changes))[name].verdict == verdict


@pytest.mark.parametrize(("peak", "verdict"), [(60, "pass"), (61, "fail"), (None, "n/a")])
def test_a_saving_of_memory_is_met_up_to_its_bound(peak, verdict):
    peaks = dict.fromkeys(NAMES, 100 * MIB) | {NAMES[-1]: peak and peak * MIB}
    saving = judge(make_results(), peaks)["memory saving"]
    assert saving.verdict == verdict
    if peak is not None:
        assert saving.reason == f"{peak} MiB against 100"


def test_an_accuracy_of_one_number_has_no_interval():
    found = make_results()
    found.scores.update(dict.fromkeys(NAMES, Score(loss=1.0, accuracies=[0.5])))
    gap = judge(found)["accuracy gap"]
    assert (gap.verdict, gap.interval.low) == ("inconclusive", -math.inf)


def say(found):
    return targets.say_in_words(found, targets.measure_gains(found))


def test_one_sentence_says_what_precision_brings_what_fastamp_adds_and_what_a_step_is():
    assert say(make_results(speedups=[2.06] * 6, added=1.03)) == (
        "Bf16 makes this training 2.00x as fast as FP32; fastamp adds 3 % in bf16; most of a step "
        "is the model's forward and backward pass (80%)."
    )
    said = say(make_results(speedups=[0.5 * 0.98] * 6, added=0.98))
    assert said.startswith("Bf16 makes this training 0.50x as fast as FP32; fastamp ")
    assert " in fp32; " in said  # where torch is fastest


def test_an_interval_from_086_to_263_cannot_tell_and_is_not_called_nothing():
    found = make_results(speedups=[0.9, 1.1, 2.9, 1.0, 2.8], added=1.0)
    assert say(found).startswith("Cannot tell whether bf16 is faster than FP32 here (")
    wide = make_results(speedups=[2.0] * 5, added=[0.9, 1.1, 1.3, 1.0, 0.8])
    assert "; what fastamp adds cannot be told (1." in say(wide)


def test_a_gain_beyond_the_share_of_what_fastamp_replaces_is_called_noise():
    found = make_results(speedups=[2.0] * 6, added=1.74)
    [gain] = [each for each in targets.measure_gains(found) if each.name == "fastamp/bf16"]
    assert gain.verdict == "cannot tell"
    assert gain.noise == "noise: at most 1.22x can be gained"
    assert f"cannot be told (1.74x is {gain.noise}) in bf16" in say(found)
    workers = replace(found, workers=2)  # they slow the model down: no limit is known
    [gain] = [each for each in targets.measure_gains(workers) if each.name == "fastamp/bf16"]
    assert gain.verdict == "faster"


def test_a_cpu_without_units_races_fp32_alone_and_promises_nothing_else(
    quick, task, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(environment, "cpu_features", set)
    path = tmp_path / "found.json"
    words = [str(task), "--target", "speedup:1.5", "--device", "cpu", "--steps", "8"]
    assert main([*words, "--json", str(path)]) == 0
    found, said = json.loads(path.read_text()), capsys.readouterr().out
    assert found["job"]["precisions"] == ["fp32"]
    assert [*found["losses"]] == NAMES[:2]
    [speedup] = [each for each in found["measurements"] if each["name"] == "speedup"]
    assert speedup["verdict"] == "n/a"
    assert speedup["excused"] == "this CPU names no bf16 units"
    assert found["sentence"].startswith("FP32 alone is raced; ")
    assert not re.search(r"bf16 makes|mixed", said, re.IGNORECASE)


def test_a_users_task_has_no_targets_unless_it_gives_them(quick, task, tmp_path, capsys):
    words = [str(task), "--device", "cpu", "--precision", "fp32", "--steps", "8"]
    assert main(words) == 0
    assert "target" not in capsys.readouterr().out
    assert main([*words, "--check"]) == 3
    assert "no verdict: train has no targets for --check" in capsys.readouterr().err
    assert main([*words, "--check", "--target", "accuracy:1"]) == 0
    assert "accuracy gap" in capsys.readouterr().out
    missed = ["--target", "speedup:1e6"]
    assert (main([*words, *missed, "--check"]), main([*words, *missed])) == (1, 0)


def test_a_nan_in_training_is_a_failure_with_its_own_words_and_status_1(
    quick, task, monkeypatch, tmp_path, capsys
):
    step, path = Trainer.train_step, tmp_path / "found.json"

    def broken(trainer, batch, region):
        step(trainer, batch, region)
        if trainer.arm.name == "torch bf16" and len(trainer.losses) > 5:
            trainer.losses[-1] = torch.tensor(math.nan)

    monkeypatch.setattr(Trainer, "train_step", broken)
    words = [str(task), "--device", "cpu", "--steps", "8", "--json", str(path)]
    assert main(words) == 1
    line = "the training of torch bf16 has failed: its loss is nan in step 8"
    assert line in capsys.readouterr().out.splitlines()[1:3]
    found = json.loads(path.read_text())
    assert (line in found["failures"], found["sentence"]) == (True, "")


# The built-in tasks, one after the other


def test_all_tasks_have_rows_and_one_sentence(quick, monkeypatch, tmp_path, capsys):
    gains = {"mlp": 1.1, "small-gpt": 1.0, "rl": 1.3}
    monkeypatch.setattr(
        "fastamp.bench.main_job.race_task",
        lambda arms, *_: make_results(
            speedups=[2.0 * gains[arms[0].task]] * 6, added=gains[arms[0].task]
        ),
    )
    path = tmp_path / "found.json"
    assert main(["all", *gains, "--device", "cpu", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert [row["task"] for row in found["table"]] == ["mlp"] * 2 + ["small-gpt"] * 2 + ["rl"] * 2
    names = {each["name"] for each in found["measurements"]}
    assert names >= {"mlp/fastamp/bf16", "mlp/precision/bf16", "rl/fastamp/fp32"}
    assert found["sentence"] == (
        "Times as fast as torch in the same precision: mlp 1.10x (faster), "
        "small-gpt 1.00x (equal), rl 1.30x (cannot tell)."
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == [*gains]
    assert main(["all", "cnn"]) == 2
    assert "'cnn' is no file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mlp", "rl", "examples/task_images.py"])
def test_a_built_in_task_has_the_same_losses_by_torch_and_by_fastamp(name, monkeypatch):
    for constant in ("ROWS", "STATES"):
        monkeypatch.setattr(jobs, constant, 512)
    if "images" in name:
        pytest.importorskip("PIL.Image")
        monkeypatch.chdir(Path(__file__).parents[2])
        find_make(name)
        monkeypatch.setattr(sys.modules["task_images"], "PHOTOS", 16)
    arms = main_job.list_arms(name, ["fp32"])
    theirs, ours = measure.race_task(arms, 3).losses.values()
    rtol = 0.2 if "images" in name else 1e-3  # which decodes to other sizes
    assert ours == pytest.approx(theirs, rel=rtol)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--steps 2", "argument --steps: '2' is not"),
        ("latency --batch-sizes 1 0", "--batch-sizes: '0' is not an integer of at least 1"),
        ("--target loss:1", "argument --target: 'loss:1' is none of speedup:X, memory:X and"),
        ("--arm x", "argument --arm: 'x' is not NAME=FILE.py:make"),
        ("--arm x=/missing.py", "argument --arm: '/missing.py' is no file: expected FILE.py, FILE"),
        ("--precision fp8", "argument --precision: invalid choice: 'fp8'"),
        ("--json missing/x", "argument --json: 'missing/x' is no file that can be written"),
        ("--report /dev/null/x", "argument --report: '/dev/null/x' is no file that can be written"),
        ("--step 5", "unrecognized arguments: --step"),
        ("race", "argument task: 'race' is no file: expected FILE.py, FILE.py:make, or one of gpt"),
        ("--fail-on speedup:-5%", "argument --fail-on: 'speedup' needs a --baseline"),
    ],
)
def test_a_bad_argument_is_named_before_any_work(options, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main_job, "race_task", None)
    try:
        status = main(options.split())
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.cuda
def test_a_task_runs_on_a_gpu_in_three_precisions_and_other_commands_run(task, tmp_path, device):
    torch.ones(1, device=device)  # the arms are made in processes of their own
    path = tmp_path / "found.json"
    assert main([str(task), "--memory", "--steps", "8", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["job"]["precisions"] == ["fp32", "bf16", "fp16"]
    assert all(peak > 0 for peak in found["details"]["peak_memory_nbytes"].values())
    for command in ("step --rows in-a-loop/adamw", "latency --batch-sizes 1"):
        assert main(command.split()) == 0
