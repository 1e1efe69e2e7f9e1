"""The main job of the benchmark: what it measures, and what it says."""

from __future__ import annotations

import argparse
import copy
import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.fake_clock import FakeClock
from support.processes import run_python

from fastamp.bench import (
    advice,
    environment,
    main_job,
    measure,
    peaks,
    record,
    targets,
    tasks,
    where,
)
from fastamp.bench import text as train_text
from fastamp.bench.__main__ import main
from fastamp.bench.gpt import GPT, Shape
from fastamp.bench.jobs import language
from fastamp.bench.race import Build, Interval, Plan, Race, Visit
from fastamp.bench.trainer import Score, Trainer

SHAPE = Shape(layers=2, heads=2, width=32, block_size=16)
JOB = measure.Job(device="cpu", precision="bf16", seed=0, steps=8, make=None, memory_make=None)
TINY_SHAPE = Shape(layers=1, heads=2, width=32, block_size=16)
TINY = "--device cpu --precision bf16 --batch-size 4 --steps 8"
NAMES = ["fp32", "lean", "amp", "amp+fastamp"]
MIB = 2**20
TARGETS = {"min_speedup": 1.5, "min_memory_saving": 0.4, "max_accuracy_gap": 0.01}


@pytest.fixture
def text(tmp_path):
    """Return a file of text whose validation part holds bytes of its own."""
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)) * 90 + bytes(range(100, 200)) * 10)
    return path


@pytest.fixture
def corpus(text):
    return train_text.load_corpus(str(text), block_size=SHAPE.block_size)


@pytest.fixture
def quick(monkeypatch, text):
    """Take the subprocesses out of the main job and return its tiny options."""
    monkeypatch.setattr(measure, "peak_memory", lambda *_: 100 * MIB)
    monkeypatch.setattr(environment, "cpu_features", lambda: {"amx_bf16"})
    monkeypatch.setattr(where, "BLOCKS", 3)
    monkeypatch.setattr(main_job, "CPU_SHAPE", TINY_SHAPE)
    return [*TINY.split(), "--data", str(text)]


MAIN = """
import multiprocessing, runpy, warnings
warnings.simplefilter("error")
# torch 2.6 leaves a folder of torch.distributed's to the end
warnings.filterwarnings("ignore", "Implicitly cleaning up", ResourceWarning)
from fastamp.bench import apart, main_job, measure, where
from fastamp.bench.gpt import Shape
from fastamp.bench.race import Plan
where.BLOCKS = 3
measure.PLAN = Plan(build_s=0.01, builds=(3,))
main_job.CPU_SHAPE = Shape(layers=1, heads=2, width=32, block_size=16)
# A fork has torch, which takes seconds to import; a test below starts a fresh process.
apart.get_context = lambda _: multiprocessing.get_context("fork")
runpy.run_module("fastamp.bench", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Run the main job once, on the standard library, as a user does whose output is a file."""
    folder = tmp_path_factory.mktemp("a folder")
    done = run_python(MAIN, *TINY.split(), "--json", "all of it.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    return done, json.loads((folder / "all of it.json").read_text())


def results(*, speedups=(2.0,), peak=50, gap=0.0, loss=1.0):
    """Return what a race found: a build for each speed-up, 64 windows of a score."""
    builds = [
        Build(
            arms=NAMES,
            rounds=[dict.fromkeys(NAMES, Visit(1.0)) | {"amp+fastamp": Visit(1 / speedup)}] * 2,
        )
        for speedup in speedups
    ]
    windows = [0.5] * 64
    scores = {name: [Score(loss=1.0, accuracy=0.5, window_accuracies=windows)] for name in NAMES}
    shifted = [share + gap for share in windows]
    scores[NAMES[-1]] = [Score(loss=loss, accuracy=0.5 + gap, window_accuracies=shifted)]
    part = Interval.exact(0.1)
    profile = advice.Profile(device="cpu", steps=6, parts=dict.fromkeys(advice.PARTS, part))
    return measure.Results(
        parameters=1,
        batch_sizes=[4] * 8,
        peaks=dict.fromkeys(NAMES, 100 * MIB) | {NAMES[-1]: peak and peak * MIB},
        race=Race(arms=NAMES, builds=builds),
        losses={},
        scores=scores,
        profiles=dict.fromkeys(NAMES, profile),
    )


def verdicts(found, excused=()):
    judged = targets.judge_targets(argparse.Namespace(**TARGETS), found, excused=dict(excused))
    return {verdict.name: verdict for verdict in judged}


def test_an_accuracy_of_one_number_has_no_interval_and_no_verdict():
    found = results()
    one = Score(loss=1.0, accuracy=0.5, window_accuracies=[0.5])
    found.scores.update({name: [one] for name in NAMES})
    gap = verdicts(found)["accuracy gap"]
    assert (gap.verdict, gap.interval.low) == ("inconclusive", -math.inf)
    assert gap.reason.endswith("too few numbers for an interval")
    assert targets.mean_accuracy(found, "fp32").high == math.inf


def test_what_an_interval_is_over_is_said():
    found = verdicts(results())
    assert found["accuracy gap"].reason.endswith("over the held-out data, not over trainings")
    assert found["memory saving"].reason.endswith("one process each, no interval")


def test_an_accuracy_is_held_to_a_baseline_only_at_the_same_number_of_steps(tmp_path, capsys):
    path, baseline = tmp_path / "task.py", tmp_path / "base.json"
    path.write_text(tasks.EXAMPLE)
    interval = {"value": 1.0, "low": 1.0, "high": 1.0}
    saved = {"schema_version": record.SCHEMA_VERSION, "command": "amp", "job": {}}
    saved |= {"measurements": [{"name": "accuracy", "interval": interval}]}
    saved |= {"environment": environment.describe("cpu")}
    baseline.write_text(json.dumps(saved))
    words = ["--task", f"{path}:make", "--device", "cpu", "--baseline", str(baseline)]
    words += ["--fail-on", "accuracy:-1%"]
    assert main([*words, "--steps", "8"]) == 3  # it is another job
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    assert "argument --fail-on: 'accuracy' needs --steps" in capsys.readouterr().err


def test_an_accuracy_that_is_no_number_is_the_tasks(capsys):
    found = results()
    nan = Score(loss=1.0, accuracy=math.nan, window_accuracies=[math.nan])
    found.scores.update({name: [nan] for name in NAMES})
    assert verdicts(found)["accuracy gap"].reason.endswith("an accuracy of nan in fp32")
    fine = Score(loss=1.0, accuracy=0.5, window_accuracies=[0.5])
    found.scores["fp32"] = [fine]
    gap = verdicts(found)["accuracy gap"]
    assert (gap.verdict, gap.reason.endswith("nan against 0.5")) == ("fail", True)


def test_every_arm_starts_from_the_same_weights_and_sees_the_same_batches_in_each_visit(
    quick, monkeypatch, tmp_path, capsys
):
    seen, visits = {name: [] for name in NAMES}, {name: [] for name in NAMES}
    starts = {}
    train = Trainer.train

    def spy(trainer, batches, *region):
        name, batches = trainer.config.name, [*batches]
        starts.setdefault(name, copy.deepcopy(trainer.model.state_dict()))
        if not region:
            visits[name].append(len(batches))
            seen[name] += [[part.clone() for part in batch] for batch in batches]
        train(trainer, batches, *region)

    monkeypatch.setattr(Trainer, "train", spy)
    monkeypatch.setattr(measure, "VISIT_S", 1e9)
    monkeypatch.setattr(measure, "PLAN", Plan(builds=(1,)))
    path = tmp_path / "found.json"
    assert main([*quick, "--steps", "66", "--json", str(path)]) == 0
    assert capsys.readouterr().err == ""
    assert visits == dict.fromkeys(NAMES, [1] * 4 + [2] + [5] * 12)
    for name in NAMES[1:]:
        for key, start in starts["fp32"].items():
            assert torch.equal(starts[name][key], start.to(starts[name][key].dtype))
        assert (starts[name]["head.weight"].dtype == torch.bfloat16) == (name == "lean")
    rounds = list(zip(*seen.values(), strict=True))
    for tokens, shifted in ([torch.stack(part) for part in zip(*r, strict=True)] for r in rounds):
        assert (tokens == tokens[0]).all()
        assert (shifted == shifted[0]).all()
    assert not torch.equal(rounds[0][0][0], rounds[1][0][0])
    found = json.loads(path.read_text())
    assert {len(curve) for curve in found["losses"].values()} == {66}
    race = found["races"]["training"]
    assert [len(build) for build in race["builds"]] == [12]


@pytest.mark.parametrize(
    ("step_s", "all_steps", "steps", "rounds"),
    [
        (0.2, 48, 1, 44),  # the GPT on a CPU
        (0.06, 45, 1, 41),  # the GPT on a GPU
        (0.02, 48, 3, 14),
        (0.001, 48, 3, 14),
        (0.01, 5000, 5, 999),
        (1e-9, 5000, 40, 124),
        (0.001, 8, 1, 6),
        (0.001, 3, 1, 2),
        (0.2, None, 1, 2000),
        (0.001, None, 40, 50),
    ],
)
def test_a_visit_is_long_and_leaves_six_blocks_or_three_of_single_steps(
    step_s, all_steps, steps, rounds
):
    found, plan = measure._plan_visits(step_s, all_steps, Plan())
    assert (found, plan.rounds) == (steps, rounds)


# What is measured


def test_memory_is_measured_in_another_process_and_grows_with_the_model(
    finished, corpus, processes
):
    shape = replace(SHAPE, width=384, layers=3)
    make = partial(language.make_gpt, shape=shape, batch_size=4, corpus=corpus)
    make = partial(JOB.make_training, 0, make)
    large = peaks.peak_memory(make, JOB.list_arms()[0], "cpu")
    parameters = sum(parameter.numel() for parameter in GPT(shape).parameters())
    # float32 weights, gradients and two moments are 16 bytes a parameter
    assert 16 * parameters < large < 32 * parameters
    # The order of 680,000 windows of 16 bytes is most of it.
    assert 0 <= finished[1]["details"]["peak_memory_nbytes"]["fp32"] < 2**26


# What is said


@pytest.mark.parametrize(
    ("changes", "name", "verdict"),
    [
        ({"speedups": [1.5] * 6}, "speedup", "pass"),
        ({"speedups": [1.4999] * 6}, "speedup", "fail"),
        ({"speedups": [1.4, 1.4, 1.5, 1.6, 1.6, 1.6]}, "speedup", "inconclusive"),
        ({"speedups": [2.0] * 2}, "speedup", "inconclusive"),  # too few for an interval
        ({"peak": 60}, "memory saving", "pass"),
        ({"peak": 61}, "memory saving", "fail"),
        ({"peak": None}, "memory saving", "n/a"),
        ({"gap": 0.0099}, "accuracy gap", "pass"),
        ({"gap": -0.0099}, "accuracy gap", "pass"),
        ({"gap": 0.02}, "accuracy gap", "pass"),  # better
        ({"gap": -0.0101}, "accuracy gap", "fail"),
        ({"loss": math.nan}, "accuracy gap", "fail"),
    ],
)
def test_a_target_is_met_up_to_its_bound(changes, name, verdict):
    assert verdicts(results(**changes))[name].verdict == verdict


def test_a_speedup_that_cannot_be_expected_is_not_judged_but_shown():
    found = verdicts(results(speedups=[0.1] * 6), {"speedup": "no units"})["speedup"]
    assert (found.verdict, found.reason) == ("n/a", "amp+fastamp against fp32: no units")
    assert found.interval.value == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("features", "precision", "reason"),
    [
        ({"avx2", "avx512_bf16"}, "bf16", None),
        ({"asimd", "bf16"}, "bf16", None),
        ({"avx2"}, "bf16", "names no bf16 units"),
        (set(), "bf16", "names no bf16 units"),
        ({"avx512_bf16"}, "fp16", "fp16 has no speed-up"),
    ],
)
def test_a_cpu_without_units_has_no_speedup_to_expect(monkeypatch, features, precision, reason):
    monkeypatch.setattr(environment, "cpu_features", lambda: features)
    found = environment.no_speed_reason("cpu", precision)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("options", "status"),
    [
        ("--check", 1),  # the peaks are equal: nothing is saved
        ("", 0),
        ("--check --min-memory-saving 0 --min-speedup 0 --max-accuracy-gap 1", 0),
    ],
)
def test_a_missed_target_is_an_error_only_with_check(quick, options, status, capsys):
    assert main(["amp", *quick, *options.split()]) == status
    assert ("memory saving 0 % (target >= 40 %): fail" in capsys.readouterr().out) == (
        "--min" not in options
    )


@pytest.mark.parametrize(("speedups", "status"), [([2.0] * 6, 0), ([1.0, 2.0] * 3, 3)])
def test_a_target_that_is_met_perhaps_is_no_success(quick, monkeypatch, speedups, status, capsys):
    monkeypatch.setattr(main_job, "train_arms", lambda *_, **__: results(speedups=speedups))
    assert main([*quick, "--check"]) == status
    assert ("inconclusive" in capsys.readouterr().out) == (status == 3)


@pytest.mark.parametrize(("peak", "status"), [(50, 0), (None, 3)])
def test_targets_of_which_none_can_be_judged_are_not_met(quick, monkeypatch, peak, status, capsys):
    monkeypatch.setattr(main_job, "no_speed_reason", lambda *_: "no units")
    monkeypatch.setattr(main_job, "train_arms", lambda *_, **__: results(peak=peak))
    if peak is None:
        monkeypatch.setattr(targets, "_accuracy_gap", lambda *_: (None, "not scored"))
    assert main([*quick, "--check"]) == status
    assert ": n/a, amp+fastamp against fp32: no units" in capsys.readouterr().out


def test_a_cpu_without_units_races_fastamp_in_fp32_alone(quick, tmp_path, monkeypatch, capsys):
    """A step in bfloat16 takes 20 times as long there: the job would take a quarter of an hour."""
    place = quick.index("--precision")
    del quick[place : place + 2]
    monkeypatch.setattr(language, "VALIDATION_WINDOWS", 4)
    monkeypatch.setattr(main_job, "no_speed_reason", lambda *_: "no units")
    path = tmp_path / "found.json"
    assert main([*quick, "--json", str(path)]) == 0
    found, said = json.loads(path.read_text()), capsys.readouterr().out
    assert [*found["losses"]] == ["fp32", "fp32+fastamp"]
    assert found["job"]["memory_batch_size"] == found["job"]["batch_size"]
    added = [(m["name"], m["base"]) for m in found["measurements"] if m["arm"] == "fp32+fastamp"]
    assert added[:2] == [("speedup", "fp32"), ("over_amp", "fp32")]
    assert said.count("n/a, fp32+fastamp against fp32: all arms train in FP32: no units") == 2
    assert "bf16: n/a; no units; --precision bf16 races it" in said
    assert found["sentence"].startswith("This CPU has no units for a lower precision, so")


def test_the_record_has_every_step_and_every_part_and_the_verdicts_come_last(finished):
    """That its figures are those of the table is a test of every command's page."""
    done, found = finished
    lines, known = done.stdout.splitlines(), found["details"]
    for name, row in zip(NAMES, found["table"], strict=True):
        assert row["arm"] == name
        assert row["peak MiB"] == f"{known['peak_memory_nbytes'][name] / MIB:.0f}" != "0"
        assert row["loss"] == f"{known['validation'][name][0]['loss']:.4f}"
        assert row["accuracy"] == f"{known['validation'][name][0]['accuracy']:.4f}"
        assert len(found["losses"][name]) == 8
        parts = {"data", "forward", "backward", "step", "other"}
        assert {*known["profiles"][name]["parts"]} == parts
    builds = found["races"]["training"]["builds"]
    assert len(builds) == 3
    assert all(sorted(v["arm"] for v in r) == sorted(NAMES) for build in builds for r in build)
    verdicts = [each["text"] for each in found["measurements"] if each["reason"]]
    closing = [*verdicts, *found["closing"], *filter(None, [found["sentence"]])]
    assert lines[-len(closing) :] == closing
    assert "memory: peak of the resident set" in done.stdout
    assert found["environment"]["torch"] == torch.__version__
    assert found["job"]["shape"]["width"] == 32


def test_the_memory_is_that_of_a_large_batch_unless_a_batch_is_asked_for(quick, monkeypatch):
    assert (main_job.CPU_STEPS["steps"] - measure.WARMUP_STEPS - 1) // 2 >= 20
    seen = []

    def look(make, *_):
        seen.append(make().batch_size)

    monkeypatch.setattr(measure, "peak_memory", look)
    sizes = {"batch_size": 2, "steps": 8, "memory_batch_size": 5}
    monkeypatch.setattr(main_job, "CPU_STEPS", sizes)
    assert main(quick) == 0
    place = quick.index("--batch-size")
    assert main(quick[:place] + quick[place + 2 :]) == 0
    assert seen == [4] * len(NAMES) + [5] * len(NAMES)


def test_a_batch_of_its_own_stands_beside_the_memory_in_table_target_and_sentence(
    quick, monkeypatch, capsys
):
    def found(job, *_, **__):
        peaks = results().peaks | {"amp": 50 * MIB}
        return replace(results(), memory_batch=job.memory_batch, peaks=peaks)

    monkeypatch.setattr(main_job, "train_arms", found)
    sizes = {"batch_size": 4, "steps": 8, "memory_batch_size": 40}
    monkeypatch.setattr(main_job, "CPU_STEPS", sizes)
    place = quick.index("--batch-size")
    assert main(quick[:place] + quick[place + 2 :]) == 0
    shown = capsys.readouterr().out
    assert "peak MiB at 40" in shown.splitlines()[1]
    assert "a peak of 50 MiB against 100 MiB at batches of 40, one process each" in shown
    assert "its memory at batches of 40" in shown.splitlines()[-1]
    assert main(quick) == 0  # of one batch, which is asked for
    assert "at batches of" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([2.0, 1.0], []),
        ([math.nan, 1.0], []),  # a step that was skipped
        ([2.0, math.nan, math.nan], ["its loss is nan from step 2 of 3 on"]),
        ([math.inf], ["its loss is inf from step 1 of 1 on"]),
    ],
)
def test_a_training_whose_last_loss_is_no_number_has_failed(losses, said):
    found = measure.find_failure("amp", losses)
    assert found == [f"the training of amp has failed: {each}" for each in said]


def test_a_nan_in_training_is_a_failure_with_its_own_words_and_status_1(
    quick, monkeypatch, tmp_path, capsys
):
    step, path = Trainer.train_step, tmp_path / "found.json"

    def broken(trainer, batch, region):
        step(trainer, batch, region)
        if trainer.config.name == "amp" and len(trainer.losses) > 5:
            trainer.losses[-1] = torch.tensor(math.nan)

    monkeypatch.setattr(Trainer, "train_step", broken)
    assert main([*quick, "--json", str(path)]) == 1
    line = "the training of amp has failed: its loss is nan from step 6 of 8 on"
    assert capsys.readouterr().out.splitlines()[-1] == line
    found = json.loads(path.read_text())
    assert (line in found["failures"], found["sentence"]) == (True, "")


def test_the_first_build_trains_all_steps_and_the_others_are_for_the_times(
    quick, monkeypatch, tmp_path
):
    made, train = [], measure._train

    def look(job, configs, plan, number):
        made.append((number, job.steps))
        return train(job, configs, plan, number)

    monkeypatch.setattr(measure, "_train", look)
    assert main(quick) == 0
    assert made == [(1, 8), (2, None), (3, None)]


def test_a_slower_step_is_a_regression_of_the_main_job_and_a_rerun_is_none(
    quick, tmp_path, monkeypatch, capsys
):
    saved = tmp_path / "saved.json"
    command = [*quick, "--steps", "104"]
    held = [*command, "--baseline", str(saved), "--fail-on", "speedup:-5%"]
    times_s = {"fp32": 2.0, "lean": 1.0, "amp": 1.0, "amp+fastamp": 0.9}
    clock = FakeClock(monkeypatch, noise=0.01)

    def step(trainer, _, region):
        for name in where.REGIONS:
            with region(name):
                pass
        trainer.losses.append(torch.zeros(()))
        clock.spend(times_s[trainer.config.name])

    monkeypatch.setattr(Trainer, "train_step", step)
    assert main([*command, "--json", str(saved)]) == 0
    assert main(held) == 0
    times_s["amp+fastamp"] = 1.0  # a ninth longer: 10 % less of a speed-up
    assert main(held) == 1
    assert "speedup since the baseline" in (shown := capsys.readouterr().out)
    assert "(target >= -5 %): fail" in shown


def test_a_file_gets_whole_lines_and_no_progress_bar(finished):
    done, _ = finished
    assert done.stderr == ""
    assert "\r" not in done.stdout
    assert done.stdout.startswith("standard library of Python")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--steps 0", "argument --steps: '0' is not an integer of at least 3"),
        ("--steps 2", "argument --steps: '2' is not"),
        (
            "step --shapes 2000000x1",
            "argument --shapes: '2000000x1' has more than 1,048,576 tensors",
        ),
        ("step --shapes 3x", "argument --shapes: '3x' is neither tensors and elements"),
        (
            "latency --batch-sizes 1,0",
            "argument --batch-sizes: '0' is not an integer of at least 1",
        ),
        ("--report missing/x", "argument --report: 'missing/x' is no file that can be written"),
        ("--baseline short", "argument --baseline: 'short' cannot be read"),
        ("--fail-on speedup", "argument --fail-on: 'speedup' is not a metric and a change"),
        ("--fail-on speedup:-5%", "argument --fail-on: 'speedup' needs a --baseline"),
        ("--batch-size -1", "argument --batch-size: '-1' is not an integer of at least 1"),
        (
            "--min-memory-saving 40",
            "argument --min-memory-saving: '40' is not a number from -1 to 1",
        ),
        ("--max-accuracy-gap nan", "argument --max-accuracy-gap: 'nan' is not"),
        ("--device tpu", "argument --device: invalid choice: 'tpu'"),
        ("--data missing", "argument --data: 'missing' cannot be read: No such file or directory"),
        ("--data empty", "argument --data: 'empty' holds 0 bytes, too few"),
        (f"--data {'x' * 300}", "xxx' cannot be read: File name too long"),
        ("--data short", "argument --data: 'short' holds 10 bytes, too few: windows"),
        ("--json missing/x", "argument --json: 'missing/x' is no file that can be written"),
        ("--json empty", "argument --json: 'empty' is no file that can be written"),
        (f"--json {'x' * 300}", "xxx' is no file that can be written"),
        ("--step 5", "unrecognized arguments: --step 5"),
        ("race", "invalid choice: 'race'"),
    ],
)
def test_a_bad_argument_is_named_before_any_work(options, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main_job, "train_arms", None)
    (tmp_path / "empty").mkdir()
    (tmp_path / "short").write_bytes(b"0123456789")
    with pytest.raises(SystemExit) as exit_:
        main(options.split())
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_a_bad_argument(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_:
        main(["--device", "cuda"])
    assert exit_.value.code == 2
    assert "argument --device: 'cuda' needs a GPU" in capsys.readouterr().err


@pytest.mark.cuda
def test_the_main_job_runs_on_a_gpu_with_loss_scaling(monkeypatch, tmp_path, capsys, device):
    torch.ones(1, device=device)  # the job makes its tensors in processes of its own
    shape = Shape(layers=2, heads=2, width=64, block_size=64)
    monkeypatch.setattr(main_job, "GPT2_SMALL", shape)
    options = "--batch-size 64 --steps 4"
    path = tmp_path / "found.json"
    assert main([*options.split(), "--precision", "fp16", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["environment"]["device"] == "cuda"
    peaks = found["details"]["peak_memory_nbytes"]
    assert peaks["amp+fastamp"] < peaks["fp32-strict"]
    assert "memory: peak of the GPU memory" in capsys.readouterr().out


@pytest.mark.cuda
def test_the_other_commands_run_on_a_gpu(device):
    torch.ones(1, device=device)  # they make theirs in processes of their own
    for command in ("step --shapes 3x1000 --work adamw", "latency --batch-sizes 1"):
        assert main(command.split()) == 0
