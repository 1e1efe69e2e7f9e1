"""Tasks of users: how the bench runs on them, and what it says of broken ones."""

from __future__ import annotations

import html
import json
import math
import re
import sys
from pathlib import Path

import pytest
from torch import nn

from fastamp.bench import environment, measure, tasks
from fastamp.bench.__main__ import main

ROOT = Path(__file__).parents[2]
EXAMPLES, STRANGERS = ROOT / "examples", ROOT / "tests" / "support" / "strangers"
HEAD = """
import torch
from torch import nn
model, loss = nn.Linear(4, 3), nn.functional.cross_entropy
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.arange(64) % 3)
def fail(*args, **options):
    raise ArithmeticError("of the user's own")
"""


# What make returns, and what is said of it; a line in braces is a function body.
BROKEN = {
    "return fail()": "make: make('cpu', 0) raised ArithmeticError: of the user's own",
    "return model, data": "make: expected (model, dataset, loss) or (model, dataset, loss,"
    " options), got a tuple of 2",
    "return fail, data, loss": "model: expected an nn.Module, got function",
    "return nn.ReLU(), data, loss": "options['optimizer']: its call raised ValueError",
    "return model, data, 'mse'": "loss: its computation raised TypeError: 'str' object is not",
    "return model, data, loss, []": "options: the dict of them raised TypeError: 'list' object",
    "return model, data, loss, {'batchsize': 8}": "options: expected some of ['batch_size', 'evalu"
    "ate', 'max_norm', 'optimizer'], got ['batchsize']",
    "return model, data, loss, {'batch_size': 0}": "dataset: DataLoader raised ValueError: batch_s",
    "return model, iter([]), loss": "dataset: expected a batch in every pass, got none",
    "model.forward = fail; return model, data, loss": "model: its call on a batch raised"
    " ArithmeticError: of the user's own",
    "return model, data, fail": "loss: its computation raised ArithmeticError: of the user's own",
    "return model, data, lambda x, y: x": "loss: its computation raised ValueError: loss: expected"
    " a 0-dim tensor, got torch.Size([32, 3])",
    "return model, data, lambda x, y: x.detach().sum()": "loss: its backward pass raised"
    " RuntimeError: element 0 of tensors does not require grad",
    "other = nn.Linear(1, 1); return model, data, loss, {'optimizer': lambda _:"
    " torch.optim.SGD(other.parameters())}": "options['optimizer']: expected optimizers of"
    " parameters of the model that it is called with, got others",
    "return model, data, loss, {'max_norm': 'x'}": "options['optimizer']: its step raised",
    "return model, data, loss, {'evaluate': lambda m: 'good'}": "options['evaluate']: its call on"
    " the model raised",
    "return model, data, lambda x, y: torch.empty(2**48).sum()": "batch_size: a step does not fit"
    " into memory; loss: its computation raised RuntimeError",
}


@pytest.fixture
def quick(monkeypatch):
    """Race on a CPU that is fast at everything."""
    monkeypatch.setattr(environment, "cpu_features", lambda: {"amx_bf16"})


def run(path, *options):
    """Race a task; return its record."""
    found = path.parent / f"{path.stem}.json"
    words = [str(path), "--device", "cpu", "--json", str(found), *options]
    assert main(words) == 0
    return json.loads(found.read_text())


def test_the_example_of_the_help_is_a_task(quick, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert tasks.EXAMPLE in capsys.readouterr().out
    assert len(tasks.EXAMPLE.splitlines()) <= 15
    path = tmp_path / "of_the_help.py"
    path.write_text(tasks.EXAMPLE)
    saved = run(path, "--steps", "8", "--report", str(tmp_path / "page.html"))
    assert saved["job"] == {
        "task": str(path),
        "device": "cpu",
        "precisions": ["fp32", "bf16"],
        "arms": [],
        "batch_size": None,
        "steps": 8,
        "seed": 0,
    }
    assert saved["sentence"] in html.unescape((tmp_path / "page.html").read_text())


@pytest.mark.parametrize("name", ["nanogpt", "classifier", "hugging_face"])
def test_other_peoples_scripts_are_tasks_of_twenty_lines(quick, name, tmp_path, capsys):
    needed = {"classifier": "sklearn", "hugging_face": "transformers"}
    pytest.importorskip(needed.get(name, "torch"))
    source = (EXAMPLES / f"task_{name}.py").read_text()
    assert len([line for line in source.splitlines() if line]) <= 20
    path = tmp_path / f"task_{name}.py"
    path.write_text(source.replace("layers=4, heads=4, width=128", "layers=1, heads=2, width=16"))
    saved = run(path, "--steps", "8")
    first = {arm: curve[0] for arm, curve in saved["losses"].items()}
    assert [*first] == ["torch fp32", "fastamp fp32", "torch bf16", "fastamp bf16"]
    assert first["fastamp bf16"] == pytest.approx(first["torch bf16"], rel=1e-5)  # same dropout
    assert first["torch bf16"] == pytest.approx(first["torch fp32"], rel=0.05)
    assert all(math.isfinite(loss) for curve in saved["losses"].values() for loss in curve)
    assert capsys.readouterr().err == ""


def test_a_broken_task_is_one_line_that_names_the_part_and_status_2(quick, tmp_path, capsys):
    for place, (body, wanted) in enumerate(BROKEN.items()):
        path = tmp_path / f"broken_{place}.py"
        path.write_text(f"{HEAD}\ndef make(device, seed):\n    {body}\n")
        assert main([f"{path}:make", "--device", "cpu", "--steps", "3"]) == 2
        *trace, line = capsys.readouterr().err.splitlines()
        prefix = f"python -m fastamp.bench train: error: argument task: '{path}:make' breaks its"
        assert line.startswith(f"{prefix} contract: {wanted}"), (body, line)
        if "of the user's own" in line:
            assert trace[0] == "Traceback (most recent call last):"
            assert sum(f'File "{path}", line' in each for each in trace) >= 1
            assert trace[-1] == "ArithmeticError: of the user's own"


def test_a_task_that_cannot_be_found_is_a_bad_argument(tmp_path, capsys):
    (tmp_path / "wrong.py").write_text("make = 5\nx = fail\n")
    (tmp_path / "json.py").write_text("")
    (tmp_path / "right.py").write_text("make = 5\n")
    (tmp_path / "quits.py").write_text("import sys\nsys.exit('no')\n")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "right.py").touch()
    for task, wanted in {
        f"{tmp_path}/missing.py:make": "missing.py:make' is no file: expected FILE.py, ",
        f"{tmp_path}/wrong.py:make": "wrong.py: its import raised NameError: name 'fail'",
        f"{tmp_path}/quits.py:make": "quits.py: its import raised SystemExit: no",
        f"{tmp_path}/json.py:make": "another module is called 'json'",
        f"{tmp_path}/right.py:make": "has no function 'make'",
        f"{tmp_path}/right.py:made": "has no function 'made'",
        f"{tmp_path}/inner/right.py:make": "another module is called 'right'",
        "no.such.module:make": "its import raised ModuleNotFoundError: No module named 'no'",
    }.items():
        assert main([task]) == 2
        assert wanted in capsys.readouterr().err.splitlines()[-1]


def test_a_batch_size_is_for_a_dataset_alone(tmp_path, capsys):
    path = tmp_path / "with_loader.py"
    batches = f"{HEAD}\ndef make(*_):\n    return model, torch.utils.data.DataLoader(data), loss\n"
    path.write_text(batches)
    assert main([str(path), "--batch-size", "2", "--device", "cpu"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "--batch-size: expected a dataset: the task has a loader of its own" in said


def test_a_module_and_its_neighbours_can_be_a_task(quick, tmp_path):
    (tmp_path / "neighbour_of_task.py").write_text(HEAD)
    (tmp_path / "task_of_folder.py").write_text(
        "from neighbour_of_task import *\ndef make(*_):\n    return model, data, loss\n"
    )
    make = tasks.find_make(f"{tmp_path}/task_of_folder.py:make")
    assert tasks.find_make("task_of_folder:make") is make
    assert isinstance(tasks.make_training(make, "cpu", 0).model, nn.Linear)


def test_batches_of_a_list_of_samples_come_pass_after_pass_and_only_whole_ones():
    training = tasks.Training(model=nn.Linear(1, 1), data=[*range(10)], loss=None, batch_size=4)
    batches = tasks.draw(tasks.make_loader(training, 0, device="cpu"), "cpu")
    drawn = [next(batches).tolist() for _ in range(4)]
    assert [len(batch) for batch in drawn] == [4] * 4
    assert len({*drawn[0], *drawn[1]}) == 8
    assert drawn[:2] != drawn[2:]


MOVES = "import os; os.chdir(os.path.dirname(os.path.abspath(__file__)))"


def test_a_task_that_changes_the_folder_is_found_by_the_next_build(quick, tmp_path, monkeypatch):
    train = measure._train

    def elsewhere(*args):
        tasks.find_make.cache_clear()  # as in another process
        sys.modules.pop("moves", None)
        return train(*args)

    monkeypatch.setattr(measure, "_train", elsewhere)
    monkeypatch.delitem(sys.modules, "moves", raising=False)
    (tmp_path / "inner").mkdir()
    body = f"{MOVES}\n{HEAD}\ndef make(*_):\n    {MOVES}; return model, data, loss\n"
    (tmp_path / "inner" / "moves.py").write_text(body)
    monkeypatch.chdir(tmp_path)
    found = tmp_path / "found.json"
    words = ["inner/moves.py", "--device", "cpu", "--json", str(found)]
    assert main([*words, "--steps", "3"]) == 0
    saved = json.loads(found.read_text())
    assert saved["job"]["task"] == "inner/moves.py"
    assert saved["details"]["parameters"] == 15


def mask(text):
    """Return a text without what changes from run to run and from machine to machine."""
    said = r"this machine is too busy.*?\ntime|FP32 alone is raced; .*?\(\d+%\)\."
    text = re.sub(said, "SAID", text, flags=re.DOTALL)
    text = re.sub(r"^torch .*\)$", "MACHINE", text, flags=re.MULTILINE)
    text = re.sub(r"(?:(?:data|forward|backward|step|other) \d+%(?:, )?)+", "SHARES", text)
    text = re.sub(r"at most [\d.]+% of the time|not counted here", "WAITED", text)
    text = re.sub(r"\d+ to \S+ s of", "TIME of", text)
    text = re.sub(r"\d+ (?:to \d+ )?builds(?: of a race)?", "BUILDS", text)
    return re.sub(r"\d+(?:\.\d+)?", "N", text).split()


@pytest.mark.parametrize("name", ["graph", "segmentation", "transformer"])
def test_the_page_shows_what_the_bench_prints_of_three_programs(
    name, monkeypatch, tmp_path, capsys
):
    page = (ROOT / "docs" / "start" / "worth-it.md").read_text()
    shown = page.partition(f"$ python -m fastamp.bench {name}.py\n")[2].partition("```")[0]
    shown = shown.partition("\n$ ")[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "cpu_features", set)
    (tmp_path / f"{name}.py").write_text((STRANGERS / f"{name}.py").read_text())
    assert main([f"{name}.py", "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    assert mask(printed.out) == mask(shown)
    assert printed.err == ""
