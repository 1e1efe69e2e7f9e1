"""`python -m fastamp.train`, and what importing fastamp costs a program."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from support.processes import CONTEXT, run_python
from support.trainable import run, run_command

import fastamp
from fastamp.train import __main__ as command

SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--block-size", "16", "--lr", "0.01"]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 300)
    return str(path)


def test_the_command_trains_and_resumes(text, tmp_path, capsys):
    args = ["--data", text, *SMALL, "--steps", "60", "--checkpoint-dir", str(tmp_path / "run")]
    assert command.main(args) == 0
    first = capsys.readouterr()
    assert "60 steps in 32-true, 0 skipped\ntrain_loss: 5." in first.out
    assert first.err == ""
    loss = float(re.search("val_loss: .* to ([0-9.]+)", first.out)[1])
    assert loss < 3
    assert command.main(args) == 0
    assert re.search("val_loss: .*", capsys.readouterr().out)[0] in first.out
    with pytest.raises(SystemExit) as raised:
        command.main([*args, "--lr", "0.02"])
    assert raised.value.code == 1
    assert "it has lr=0.01, this run 0.02" in capsys.readouterr().err
    assert command.main([*args, "--lr", "0.02", "--no-resume"]) == 0
    assert command.main([*args, "--lr", "0.02", "--steps", "70"]) == 0
    assert "70 steps in 32-true" in capsys.readouterr().out


def test_a_name_that_the_terminal_cannot_show_is_escaped(text, monkeypatch):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    named = shutil.copy(text, f"{text}-\xe9")
    assert command.main(["--data", named, *SMALL, "--steps", "2"]) == 0
    assert b"text-\\xe9\n" in shown.buffer.getvalue()


def test_checkpoints_inside_the_folder_of_the_text_are_not_read_as_text(text, tmp_path, capsys):
    folder = tmp_path / "texts"
    (folder / "run").mkdir(parents=True)
    shutil.copy(text, folder)
    args = ["--data", str(folder), *SMALL, "--steps", "6", "--checkpoint-dir"]
    for _ in range(2):
        assert command.main([*args, str(folder / "run")]) == 0
    with pytest.raises(SystemExit):
        command.main([*args, str(folder)])
    assert "is the folder of --data, which is read as text" in capsys.readouterr().err


def test_every_field_of_the_config_is_an_option(text, tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(command, "fine_tune", lambda *args: seen.append(args[-1]) or "done")
    options = ["--epochs", "2", "--batch-size", "8", "--weight-decay", "0", "--optimizer", "sgd"]
    options += ["--schedule", "linear", "--warmup-steps", "3", "--no-use-amp", "--max-norm", "none"]
    options += ["--accumulate", "2", "--compile", "--device", "cpu", "--seed", "7", "--keep", "2"]
    options += ["--num-workers", "1", "--eval-every", "5", "--log-every", "6", "--keep-best"]
    options += ["--checkpoint-dir", str(tmp_path), "--checkpoint-every", "4", "--no-resume"]
    assert command.main(["--data", text, *SMALL, *options, "--no-progress"]) == 0
    fields = {"epochs": 2, "max_steps": None, "batch_size": 8, "lr": 0.01, "weight_decay": 0.0}
    fields |= {"optimizer": "sgd", "schedule": "linear", "warmup_steps": 3, "use_amp": False}
    fields |= {"max_norm": None, "accumulate": 2, "compile": True, "device": "cpu", "seed": 7}
    fields |= {"keep": 2, "num_workers": 1, "eval_every": 5, "log_every": 6, "keep_best": True}
    fields |= {"checkpoint_dir": str(tmp_path), "checkpoint_every": 4, "resume": False}
    assert seen == [fastamp.TrainConfig(**fields)]
    with pytest.raises(SystemExit):
        command.main(["--help"])
    shown = capsys.readouterr().out
    for field in dataclasses.fields(fastamp.TrainConfig):
        name = {"max_steps": "steps"}.get(field.name, field.name).replace("_", "-")
        is_object = field.name in {"tracker", "loss_fn", "model_call"}
        assert (f"--{name} " in shown or f"--{name}\n" in shown) != is_object, name


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--steps", "0"], "argument --steps/--max-steps: '0' is not an integer from 1 to 1e+09"),
        (["--steps", "9" * 20], "argument --steps/--max-steps: '99999999999999999999' is not"),
        (["--lr", "inf"], "argument --lr: 'inf' is not a number from 1e-12 to 1e+06"),
        (["--device", "mps"], "argument --device: expected an available device, got 'mps'"),
        (["--width", "100000000"], "argument --width: 100000000 needs 7,152,573,666 GiB at least"),
        (["--layers", "10000", "--width", "1024"], "argument --layers: 10000 needs 2,268 GiB"),
        (["--batch-size", "1000000000"], "argument --batch-size: 1000000000 needs"),
        (["--block-size", "1000000000"], "argument --block-size: 1000000000 needs 10000000010"),
        (["--width", "10"], "argument --width: 10 is no multiple of --heads 4"),
        (
            ["--data", "/nowhere"],
            "argument --data: '/nowhere' is no file, and no folder that holds one",
        ),
        (["--device", "abacus"], "argument --device: expected an available device"),
        (["--parallel", "ddp"], "argument --parallel: 'ddp' needs ranks: start them with torchrun"),
        (["--precision", "8"], "argument --precision: invalid choice: '8'"),
    ],
)
def test_the_command_refuses_bad_arguments(args, message, capsys):
    with pytest.raises(SystemExit) as raised:
        command.main(args)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "x"}, "RANK: expected an integer of at least 0, got 'x'"),
        ({"LOCAL_RANK": "1.5"}, "LOCAL_RANK: expected an integer of at least 0, got '1.5'"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "a", "RANK": "0"}, "MASTER_PORT: .*, got None"),
        (
            {"WORLD_SIZE": "2", "MASTER_ADDR": "a", "RANK": "2", "MASTER_PORT": "1"},
            "RANK: expected less than WORLD_SIZE=2, got 2",
        ),
    ],
)
def test_variables_of_a_launcher_are_refused_by_name(variables, message, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as raised:
        command.main([])
    assert raised.value.code == 2
    assert re.fullmatch(rf"python -m fastamp.train: error: {message}\n", capsys.readouterr().err)
    if len(variables) > 2:
        with pytest.raises(ValueError, match=message):
            run()


def test_a_rank_without_a_launcher_prints_its_result(text, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    assert command.main(["--data", text, *SMALL, "--steps", "1"]) == 0
    assert "1 steps in 32-true" in capsys.readouterr().out


NO_BACKEND = "FASTAMP_BACKEND='zz' is not a backend; available: .*\n"


@pytest.mark.skipif("cpu" not in fastamp.backends(), reason="a warning comes before it")
def test_a_backend_that_is_not_there_is_one_line_of_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "fastamp.train"],
        env={**os.environ, "FASTAMP_BACKEND": "zz"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(NO_BACKEND, done.stderr)
    # And of the other one, in a fork that has torch.
    code = "import runpy, sys; sys.argv[0] = '-m'; runpy.run_module('fastamp.bench')"
    done = run_python(code, FASTAMP_BACKEND="zz")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(NO_BACKEND, done.stderr)


def test_the_command_ends_as_a_signal_would(text, tmp_path):
    args = ["--data", text, *SMALL, "--steps", "100000", "--checkpoint-every", "50"]
    args += ["--checkpoint-dir", str(tmp_path / "run")]
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        found = set(tmp_path.glob("run/*.pt"))
        child = CONTEXT.Process(target=run_command, args=(args, tmp_path / "errors"))
        child.start()
        while set(tmp_path.glob("run/*.pt")) <= found:
            assert child.is_alive()
            time.sleep(0.01)
        os.kill(child.pid, number)
        child.join(240)
        assert child.exitcode == status
        message = (tmp_path / "errors").read_text()
        assert ("interrupted; resume from" in message) == (number == signal.SIGINT)


def test_importing_fastamp_and_clipping_import_no_extra_and_no_slow_part_of_torch():
    code = "import sys, torch, numpy; before = {*sys.modules}; import fastamp\n"
    code += "p = torch.nn.Parameter(torch.ones(3)); p.grad = torch.ones(3)\n"
    code += "fastamp.clip_grad_norm_(p, 1.0)\n"
    code += "print(*{*sys.modules} - before)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    extras = ("lightning", "pytorch_lightning", "accelerate", "transformers", "wandb", "sklearn")
    extras += ("matplotlib", "tensorboard", "tqdm", "pynvml", "torch._dynamo")
    extras += ("torch.distributed.tensor", "torch.distributed.checkpoint", "fastamp._ops.sharded")
    assert "fastamp.train" in done.stdout.split()
    assert not [name for name in done.stdout.split() if name.startswith(extras)]
