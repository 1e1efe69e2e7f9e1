"""The benchmark: its text, its model, its arms, what it measures, and what it says about that."""

from __future__ import annotations

import copy
import io
import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from fastamp.bench import amp, data, environment, memory, race, report, train
from fastamp.bench.__main__ import main
from fastamp.bench.memory import PeakMemory
from fastamp.bench.model import GPT, Shape
from fastamp.bench.report import Figures, Quartiles

SHAPE = Shape(layers=2, heads=2, width=32, block_size=16)
JOB = train.Job(device="cpu", precision="bf16", shape=SHAPE, batch_size=4, steps=8, seed=0)
TINY = "--device cpu --layers 1 --heads 2 --width 32 --block-size 16 --batch-size 4 --steps 4"
NAMES = ["fp32", "amp", "amp+fastamp"]
TARGETS = {"speed-up": 1.5, "memory saving": 0.4, "accuracy gap": 0.01}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def text(tmp_path):
    """Return a file of text whose validation part holds bytes of its own."""
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)) * 90 + bytes(range(100, 200)) * 10)
    return path


@pytest.fixture
def corpus(text):
    return data.load_corpus(str(text), block_size=SHAPE.block_size)


@pytest.fixture
def quick(monkeypatch, text):
    """Take the subprocesses out of the main job and return its tiny options."""
    monkeypatch.setattr(race, "peak_memory", lambda *_: PeakMemory(100, "not measured"))
    monkeypatch.setattr(environment, "cpu_features", lambda: {"amx_bf16"})
    return [*TINY.split(), "--data", str(text)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Run the main job once, on the standard library, as a user does, in a pipe."""
    folder = tmp_path_factory.mktemp("a folder")
    command = [sys.executable, "-W", "error", "-m", "fastamp.bench", *TINY.split()]
    done = subprocess.run(
        [*command, "--json", "all of it.json"],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done, json.loads((folder / "all of it.json").read_text())


def figures(*, speedup=2.0, peak=50, correct=50, loss=1.0):
    spread = Quartiles(median=speedup, low=speedup, high=speedup)
    score = train.Score(loss=loss, accuracy=correct / 100, correct=correct, total=100)
    return Figures(
        name="an arm",
        step_times_s=[1.0],
        step_time_s=spread,
        tokens_per_s=1.0,
        speedup=spread,
        peak_memory_bytes=peak,
        validation=score,
    )


def verdicts(arm, excused=()):
    base = figures(speedup=1.0, peak=100, correct=50)
    found = report.judge(base, arm, TARGETS, excused=dict(excused))
    return {verdict.name: verdict for verdict in found}


# The text


def test_files_are_joined_in_the_order_of_their_paths_and_the_tail_is_held_out(tmp_path):
    for name, letter in {"b/a": b"3", "a/z": b"2", "a.txt": b"1", "c": b"4"}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(letter * 100)
    corpus = data.load_corpus(str(tmp_path), block_size=4)
    assert bytes(corpus.train) == b"1" * 100 + b"2" * 100 + b"3" * 100 + b"4" * 60
    assert bytes(corpus.validation) == b"4" * 40
    assert corpus.files == 4


def test_the_standard_library_is_read_without_third_party_code_and_tests(tmp_path, monkeypatch):
    for name in ("os.py", "json/scanner.py", "site-packages/torch.py", "test/test_os.py", "os.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(name[:1].encode() * 100)
    monkeypatch.setattr(data.sysconfig, "get_path", lambda _: str(tmp_path))
    corpus = data.load_corpus(None, block_size=4)
    assert bytes(corpus.train) + bytes(corpus.validation) == b"j" * 100 + b"o" * 100


def test_no_validation_byte_is_ever_trained_on(corpus):
    draws = data.training_batches(corpus.train, batch_size=64, block_size=16, seed=0)
    seen = torch.cat([torch.cat(next(draws)).flatten() for _ in range(50)])
    held = [
        torch.cat(batch).flatten()
        for batch in data.validation_batches(
            corpus.validation, windows=64, batch_size=24, block_size=16
        )
    ]
    assert seen.max() == 99
    assert torch.cat(held).min() == 100
    assert [batch.numel() // 32 for batch in held] == [24, 24, 16]


def test_a_batch_asks_for_the_next_byte_and_depends_on_the_seed_alone(corpus):
    def draw(seed):
        return next(data.training_batches(corpus.train, batch_size=4, block_size=16, seed=seed))

    tokens, targets = draw(0)
    assert torch.equal(targets, (tokens + 1) % 100)
    assert torch.equal(tokens, draw(0)[0])
    assert not torch.equal(tokens, draw(1)[0])


# The model and the arms


def test_a_byte_changes_no_prediction_before_it():
    torch.manual_seed(0)
    model = GPT(SHAPE)
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(dim=2).all()


def test_autocast_reaches_the_residual_stream():
    model = GPT(SHAPE)
    seen = []
    model.norm.register_forward_hook(lambda _module, args, _out: seen.append(args[0].dtype))
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    for arm in train.make_arms("bf16"):
        with train.Run(arm, JOB, model).autocast():
            model(tokens)
    assert seen == [torch.float32, torch.bfloat16, torch.bfloat16]


def test_every_arm_starts_from_the_same_weights_and_sees_the_same_batches(
    quick, monkeypatch, capsys
):
    seen = {name: [] for name in NAMES}
    starts = {}
    step = race.train_step

    def spy(run, tokens, targets):
        starts.setdefault(run.arm.name, copy.deepcopy(run.model.state_dict()))
        seen[run.arm.name].append((tokens.clone(), targets.clone()))
        step(run, tokens, targets)

    monkeypatch.setattr(race, "train_step", spy)
    assert main(quick) == 0
    assert capsys.readouterr().err == ""
    for name in NAMES[1:]:
        assert all(torch.equal(starts[name][key], starts["fp32"][key]) for key in starts["fp32"])
    rounds = list(zip(*seen.values(), strict=True))
    assert len(rounds) == 4
    for tokens, targets in ([torch.stack(part) for part in zip(*r, strict=True)] for r in rounds):
        assert (tokens == tokens[0]).all()
        assert (targets == targets[0]).all()
    assert not torch.equal(rounds[0][0][0], rounds[1][0][0])


def test_six_rounds_run_the_arms_in_each_of_the_six_orders(corpus):
    model = train.make_model(JOB)
    runs = [train.Run(arm, JOB, copy.deepcopy(model)) for arm in train.make_arms("bf16")]
    rounds = race.race(runs, replace(JOB, steps=6), corpus, lambda: None)
    assert sorted(tuple(seconds) for seconds in rounds) == sorted(itertools.permutations(NAMES))


def test_the_fp32_arm_is_a_plain_loop_to_the_last_bit(corpus):
    model = train.make_model(JOB)
    torch.nn.init.normal_(model.head.weight)  # steep enough for the clip to act
    run = train.Run(train.make_arms("bf16")[0], JOB, copy.deepcopy(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * 256 / 32, fused=True)
    batches = data.training_batches(corpus.train, batch_size=4, block_size=16, seed=0)
    for tokens, targets in itertools.islice(batches, 3):
        train.train_step(run, tokens, targets)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 1
        optimizer.step()
    for ours, plain in zip(run.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_arms_clip_the_same_unscaled_gradients_in_float32(corpus, precision):
    model = train.make_model(JOB)
    tokens, targets = next(data.training_batches(corpus.train, batch_size=4, block_size=16, seed=0))
    norms = []
    for arm in train.make_arms(precision):

        def clip(parameters, max_norm, arm=arm):
            assert max_norm == 1.0
            assert {parameter.grad.dtype for parameter in parameters} == {torch.float32}
            norms.append(arm.clip(parameters, max_norm).item())

        run = train.Run(replace(arm, clip=clip), JOB, copy.deepcopy(model))
        train.train_step(run, tokens, targets)
        assert run.scaler.is_enabled() == (precision == "fp16" and arm.name != "fp32")
    # 8 and 11 bits of precision, over a few dozen roundings
    assert norms == pytest.approx([norms[0]] * 3, rel=0.03)
    assert norms[1] != norms[0]


def test_a_score_is_computed_in_float32_outside_autocast(corpus, monkeypatch):
    seen = []
    cross_entropy = functional.cross_entropy

    def spy(logits, targets, **options):
        seen.append((logits.dtype, torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return cross_entropy(logits, targets, **options)

    monkeypatch.setattr(train.functional, "cross_entropy", spy)
    run = train.Run(train.make_arms("bf16")[1], JOB, train.make_model(JOB))
    windows = data.validation_batches(corpus.validation, windows=6, batch_size=4, block_size=16)
    score = train.evaluate(run, windows)
    assert seen == [(torch.float32, False, False)] * 2
    assert score.total == 6 * 16
    assert score.accuracy == score.correct / score.total
    assert score.loss == pytest.approx(math.log(256), rel=0.2)  # nothing is learnt yet


# What is measured


def test_memory_is_measured_in_another_process_and_grows_with_the_model(corpus, monkeypatch):
    monkeypatch.setattr(memory, "_train", None)  # seen by this process and its forks only
    small = memory.peak_memory(JOB, "fp32", corpus.train)
    large_job = replace(JOB, shape=replace(SHAPE, width=768, layers=3))
    large = memory.peak_memory(large_job, "fp32", corpus.train)
    parameters = sum(parameter.numel() for parameter in GPT(large_job.shape).parameters())
    # float32 weights, gradients and two moments are 16 bytes a parameter
    assert 16 * parameters < large.nbytes < 32 * parameters
    assert 0 <= small.nbytes < 2**24
    assert "fresh process" in small.method


def test_the_speedup_is_paired_by_round_and_leaves_out_the_warmup(quick, monkeypatch, capsys):
    fp32, other = [9.0, 9.0, 1.0, 2.0, 6.0], [1.0, 1.0, 1.0, 1.0, 2.0]
    rounds = [dict(zip(NAMES, (a, b, b), strict=True)) for a, b in zip(fp32, other, strict=True)]
    monkeypatch.setattr(race, "race", lambda *_: rounds)
    monkeypatch.setattr(amp, "write_json", lambda found, _: reports.append(found))
    reports = []
    assert main([*quick, "--json", "unused.json"]) == 0
    found = reports[0]
    assert found.arms[2].speedup == Quartiles(median=2.0, low=1.5, high=2.5)
    assert found.arms[2].step_time_s.median == 1.0
    assert found.arms[0].step_time_s.median == 2.0
    assert found.arms[0].tokens_per_s == 4 * 16 / 2.0
    assert found.arms[0].step_times_s == fp32
    assert "speed-up 2x (target >= 1.5x): pass" in capsys.readouterr().out


# What is said


@pytest.mark.parametrize(
    ("changes", "name", "verdict"),
    [
        ({"speedup": 1.5}, "speed-up", "pass"),
        ({"speedup": 1.4999}, "speed-up", "fail"),
        ({"peak": 60}, "memory saving", "pass"),
        ({"peak": 61}, "memory saving", "fail"),
        ({"peak": None}, "memory saving", "n/a"),
        ({"correct": 51}, "accuracy gap", "pass"),
        ({"correct": 49}, "accuracy gap", "pass"),
        ({"correct": 52}, "accuracy gap", "fail"),
        ({"correct": 48}, "accuracy gap", "fail"),
        ({"loss": math.nan}, "accuracy gap", "fail"),
    ],
)
def test_a_target_is_met_up_to_its_bound(changes, name, verdict):
    assert verdicts(figures(**changes))[name].verdict == verdict


def test_a_speedup_that_cannot_be_expected_is_not_judged_but_shown():
    found = verdicts(figures(speedup=0.1), {"speed-up": "no units"})["speed-up"]
    assert (found.verdict, found.figure, found.reason) == ("n/a", 0.1, "no units")


@pytest.mark.parametrize(
    ("features", "precision", "reason"),
    [
        ({"avx2", "avx512_bf16"}, "bf16", None),
        ({"asimd", "bf16"}, "bf16", None),
        ({"avx2"}, "bf16", "without bf16 units"),
        (set(), "bf16", "nothing tells"),
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


def test_a_target_that_is_not_judged_is_not_missed(quick, monkeypatch, capsys):
    monkeypatch.setattr(amp, "no_speed_reason", lambda *_: "no units")
    options = "--check --min-memory-saving 0 --min-speedup 1e6 --max-accuracy-gap 1"
    assert main([*quick, *options.split()]) == 0
    assert (
        "x (target >= 1e+06x): n/a, amp+fastamp against fp32: no units" in capsys.readouterr().out
    )


def test_a_batch_that_is_cut_for_a_slow_cpu_is_not_held_to_the_memory_target(
    quick, monkeypatch, capsys
):
    def memory_line(*options):
        main([*quick, *options])
        return capsys.readouterr().out.splitlines()[-2]

    default = quick.index("--batch-size")
    del quick[default : default + 2]
    monkeypatch.setattr(amp, "CPU_CUT", {"batch_size": 3, "steps": 3})
    monkeypatch.setattr(amp, "no_speed_reason", lambda *_: "no units")
    assert ": n/a, amp+fastamp against fp32: no units, so the default batch is cut to 3" in (
        memory_line()
    )
    assert ": fail, amp+fastamp against fp32: peak of" in memory_line("--batch-size", "3")


def test_the_json_file_says_what_the_table_says(finished):
    done, found = finished
    lines = done.stdout.splitlines()
    for arm, line in zip(found["arms"], lines[2:5], strict=True):
        times, peak = arm["step_time_s"], arm["peak_memory_bytes"]
        assert len(arm["step_times_s"]) == 4
        assert peak > 0
        assert line.replace("[", "").replace("]", "").replace(",", "").split() == [
            arm["name"],
            *(f"{times[key] * 1e3:.1f}" for key in ("median", "low", "high")),
            f"{arm['tokens_per_s']:.0f}",
            f"{arm['speedup']['median']:.2f}x",
            f"{peak / 2**20:.0f}",
            f"{arm['validation']['loss']:.4f}",
            f"{arm['validation']['accuracy']:.4f}",
        ]
    assert [arm["name"] for arm in found["arms"]] == NAMES
    assert [sorted(names) for names in found["order"]] == [sorted(NAMES)] * 4
    for target, line in zip(found["targets"], lines[-3:], strict=True):
        assert line.startswith(target["name"])
        assert f": {target['verdict']}, amp+fastamp against fp32: {target['reason']}" in line
    assert found["schema_version"] == 1
    assert found["environment"]["torch"] == torch.__version__
    assert found["job"]["shape"]["width"] == 32


def test_a_pipe_gets_whole_lines_and_no_progress_bar(finished):
    done, _ = finished
    assert done.stderr == ""
    assert "\r" not in done.stdout
    assert done.stdout.startswith("standard library of Python")


def test_a_terminal_gets_a_progress_bar_where_tqdm_is_installed(monkeypatch):
    pytest.importorskip("tqdm")

    def shown(stream, *, terminal):
        stream.isatty = lambda: terminal
        monkeypatch.setattr(sys, "stderr", stream)
        with report.progress(2) as tick:
            tick()
        return stream.getvalue()

    assert "/2" in shown(io.StringIO(), terminal=True)
    assert shown(io.StringIO(), terminal=False) == ""
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda _: None)
    assert shown(io.StringIO(), terminal=True) == ""


def test_a_number_that_is_not_finite_is_null_in_the_json_file(quick, monkeypatch, tmp_path, capsys):
    lost = train.Score(loss=math.nan, accuracy=0.0, correct=0, total=1)
    monkeypatch.setattr(race, "evaluate", lambda *_: lost)
    path = tmp_path / "found.json"
    assert main([*quick, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["arms"][0]["validation"]["loss"] is None
    assert "fail, amp+fastamp against fp32: validation loss nan" in capsys.readouterr().out


def test_an_old_json_file_is_replaced_at_once_and_nothing_is_left_beside_it(
    quick, tmp_path, capsys
):
    path, link = tmp_path / "found.json", tmp_path / "link"
    path.write_text("old")
    link.hardlink_to(path)
    assert main([*quick, "--json", str(path)]) == 0
    assert capsys.readouterr().err == ""
    assert json.loads(path.read_text())["schema_version"] == 1
    assert link.read_text() == "old"
    assert sorted(tmp_path.iterdir()) == [path, link, tmp_path / "text"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--steps 0", "argument --steps: '0' is not an integer of at least 3"),
        ("--steps 2", "argument --steps: '2' is not"),
        ("--batch-size -1", "argument --batch-size: '-1' is not an integer of at least 1"),
        ("--width x", "argument --width: 'x' is not"),
        ("--width 32 --heads 3", "argument --heads: 3 does not divide --width 32"),
        (
            "--min-memory-saving 40",
            "argument --min-memory-saving: '40' is not a number from -1 to 1",
        ),
        ("--max-accuracy-gap nan", "argument --max-accuracy-gap: 'nan' is not"),
        ("--device tpu", "argument --device: invalid choice: 'tpu'"),
        ("--data missing", "argument --data: 'missing' is no file and no folder"),
        ("--data empty", "argument --data: 'empty' holds no file to read"),
        ("--data short", "argument --data: 'short' holds 10 bytes, too few: --block-size"),
        ("--json missing/x", "argument --json: 'missing/x' cannot be written: No such file"),
        ("--json empty", "argument --json: 'empty' is not a regular file"),
        ("--step 5", "unrecognized arguments: --step 5"),
        ("race", "invalid choice: 'race'"),
    ],
)
def test_a_bad_argument_is_named_before_any_work(options, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(amp, "measure", None)
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
def test_the_main_job_runs_on_a_gpu_with_loss_scaling(tmp_path, capsys):
    options = "--layers 2 --heads 2 --width 64 --block-size 64 --batch-size 64 --steps 4"
    path = tmp_path / "found.json"
    assert main([*options.split(), "--precision", "fp16", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["environment"]["device"] == "cuda"
    assert found["arms"][2]["peak_memory_bytes"] < found["arms"][0]["peak_memory_bytes"]
    assert "max_memory_allocated" in capsys.readouterr().out
