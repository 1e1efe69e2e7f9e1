"""Tasks of users: how the bench runs on them, and what it says of broken ones."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.processes import run_python
from torch import nn

from fastamp.bench import advice, environment, measure, peaks, targets, tasks, where
from fastamp.bench.__main__ import main
from fastamp.bench.race import Build, Interval, Race, Visit
from fastamp.bench.trainer import Trainer

EXAMPLES = Path(__file__).parents[2] / "examples"
HEAD = """
import torch
from torch import nn
model, loss = nn.Linear(4, 3), nn.functional.cross_entropy
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.arange(64) % 3)
def fail(*args, **options):
    raise ArithmeticError("of the user's own")
"""


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    """Keep the folders of tasks out of other tests' processes: one has a json.py."""
    monkeypatch.setattr(sys, "path", [*sys.path])


# What make returns, and what is said of it; a line in braces is a function body.
BROKEN = {
    "return fail()": "make: make('cpu', 0) raised ArithmeticError: of the user's own",
    "return model": "make: expected (model, dataset, loss) or",
    "return model, data": "make: expected (model, dataset, loss) or (model, dataset, loss,"
    " options), got a tuple of 2",
    "return fail, data, loss": "model: expected an nn.Module, got <function",
    "return nn.LazyLinear(3), data, loss": "model: expected no lazy modules: call it in make, got",
    "return nn.ReLU(), data, loss": "model: expected a parameter that requires a gradient, got",
    "return model, data, 'mse'": "loss: expected None or a function of output and target, got",
    "return model, data, loss, []": "options: expected a dict, got []",
    "return model, data, loss, {'lr': 1}": "options: expected some of optimizer, evaluate,",
    "return model, data, loss, {'batch_size': 0}": "options['batch_size']: expected an integer",
    "return model, data, loss, {'dtype': 'bf16'}": "options['dtype']: expected torch.bfloat16,",
    "return model, data, loss, {'accumulate': 1.5}": "options['accumulate']: expected an integer",
    "return model, data, loss, {'schedule': 1}": "options['schedule']: expected a function of an",
    "return model, data, loss, {'arms': [1]}": "options['arms']: expected a dict of changes",
    "return model, data, loss, {'max_norm': 0}": "options['max_norm']: expected a number above 0",
    "return model, 5, loss": "dataset: expected what a DataLoader takes, or an iterable",
    "return model, iter([1]), loss": "dataset: expected an iterable of batches",
    "return model, [], loss": "dataset: DataLoader raised ValueError: num_samples should be",
    "return model, torch.utils.data.DataLoader([1], 2, drop_last=True), loss": "dataset: expected a"
    " batch in every pass, got none",
    "return model, map(fail, [1]), loss": "dataset: expected an iterable of batches",
    "return model, torch.utils.data.DataLoader(data, collate_fn=fail), loss": "dataset: its next"
    " batch raised ArithmeticError: of the user's own",
    "model.forward = fail; return model, data, loss": "model: its call on a batch raised"
    " ArithmeticError: of the user's own",
    "return nn.Linear(5, 3), data, loss": "model: its call on a batch raised RuntimeError: mat1",
    "return model, data, fail": "loss: its computation raised ArithmeticError: of the user's own",
    "return model, data, lambda x, y: x": "loss: its computation raised ValueError: loss: expected"
    " a 0-dim tensor, got torch.Size([32, 3])",
    "return model, data, lambda x, y: x.detach().sum()": "loss: its backward pass raised"
    " RuntimeError: element 0 of tensors does not require grad",
    "other = nn.Linear(1, 1); return model, data, loss, {'optimizer': lambda _:"
    " torch.optim.SGD(other.parameters())}": "options['optimizer']: expected parameters of the"
    " model that it is called with, a copy for each arm, got others",
    "return model, data, loss, {'optimizer': lambda _: torch.optim.SGD(model.parameters())}": "opti"
    "ons['optimizer']: expected parameters of the model that it is called with",
    "model.bias.requires_grad_(False); return model, data, loss, {'optimizer': lambda m:"
    " torch.optim.SGD([m.bias])}": "loss: expected a gradient of a parameter of the optimizer, got",
    "return model, data, loss, {'optimizer': fail}": "options['optimizer']: its call raised",
    "return model, data, loss, {'optimizer': lambda m: m}": "options['optimizer']: expected an"
    " optimizer from its call, or a list of them, got Linear",
    "return model, data, loss, {'optimizer': lambda m: torch.optim.LBFGS(m.parameters())}": "option"
    "s['optimizer']: its step raised",
    "return model, data, loss, {'evaluate': fail}": "options['evaluate']: its call on the model",
    "return model, data, loss, {'evaluate': lambda m: 'good'}": "options['evaluate']: its call on"
    " the model raised",
    "return model, data, loss, {'evaluate': lambda m: []}": "options['evaluate']: expected a",
    "return model, data, lambda x, y: torch.empty(2**48).sum()": "batch_size: a step does not fit"
    " into memory; loss: its computation raised RuntimeError",
}


@pytest.fixture
def quick(monkeypatch):
    """Measure memory in this process, on a CPU that is fast at everything."""
    monkeypatch.setattr(measure, "peak_memory", peaks.measure_peak)
    monkeypatch.setattr(environment, "cpu_features", lambda: {"amx_bf16"})
    monkeypatch.setattr(where, "BLOCKS", 3)


def run(path, *options):
    """Run the main job on a task; return its status, record and what it printed."""
    found = path.parent / f"{path.stem}.json"
    words = ["--task", f"{path}:make", "--device", "cpu", "--json", str(found), *options]
    assert main(words) == 0
    return json.loads(found.read_text())


def test_the_example_of_the_help_is_a_task_that_is_measured_like_the_gpt(quick, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["amp", "--help"])
    assert tasks.EXAMPLE in capsys.readouterr().out
    assert len(tasks.EXAMPLE.splitlines()) <= 15
    path = tmp_path / "of_the_help.py"
    path.write_text(tasks.EXAMPLE)
    saved = run(path, "--steps", "8", "--report", str(tmp_path / "page.html"))
    assert saved["job"] == {
        "task": f"{path}:make",
        "device": "cpu",
        "precision": "bf16",
        "batch_size": 128,
        "steps": 8,
        "seed": 0,
    }
    judged = [each for each in saved["measurements"] if each["target"] != [None, None]]
    assert [each["name"] for each in judged] == [
        "speedup",
        "memory saving",
        "accuracy gap",
    ]
    assert judged[2]["interval"]["value"] < 0.1
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == saved["sentence"]
    assert saved["sentence"] in (tmp_path / "page.html").read_text()
    # A result of its own is no regression; that of another size cannot be compared.
    held = ["--steps", "8", "--baseline", str(tmp_path / "of_the_help.json")]
    words = ["--task", f"{path}:make", "--device", "cpu", *held]
    assert main([*words, "--fail-on", "speedup:-99%"]) == 0
    assert main([*words, "--batch-size", "64"]) == 3
    assert "batch_size is 128, not 64" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nanogpt", "classifier", "hugging_face"])
def test_other_peoples_scripts_are_tasks_of_twenty_lines(quick, name, tmp_path, capsys):
    pytest.importorskip(
        {"classifier": "sklearn", "hugging_face": "transformers"}.get(name, "torch")
    )
    source = (EXAMPLES / f"task_{name}.py").read_text()
    assert len([line for line in source.splitlines() if line]) <= 20
    path = tmp_path / f"task_{name}.py"
    path.write_text(source.replace("layers=4, heads=4, width=128", "layers=1, heads=2, width=16"))
    saved = run(path, "--steps", "8")
    _, *lean, stock, ours = (curve[0] for curve in saved["losses"].values())
    assert len(lean) == (name != "classifier")  # whose optimizer is no Adam
    assert lean == [pytest.approx(stock, rel=0.05)] * len(lean)
    assert ours == pytest.approx(stock, rel=1e-5)  # both drop out the same
    assert all(math.isfinite(loss) for curve in saved["losses"].values() for loss in curve)
    gap = next(m for m in saved["measurements"] if m["name"] == "accuracy gap")
    assert ("no function that evaluates" in gap["reason"]) == (name != "classifier")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ("SGD(m.parameters())", "options['optimizer']: expected torch's AdamW, or its Adam"),
        (
            "Adam(m.parameters(), weight_decay=1)",
            "options['optimizer']: expected torch's AdamW, or",
        ),
        ("AdamW(m.parameters(), amsgrad=True)", "options['optimizer']: fastamp.AdamW in its place"),
        ("Adam(m.parameters())", None),
    ],
)
def test_lean_is_left_out_where_the_optimizer_is_not_adamw(quick, optimizer, said, tmp_path):
    path = tmp_path / f"lean_{len(optimizer)}.py"
    body = f"return model, data, loss, {{'optimizer': lambda m: torch.optim.{optimizer}}}"
    path.write_text(f"{HEAD}\ndef make(*_):\n    {body}\n")
    saved = run(path, "--steps", "8")
    assert [*saved["losses"]] == ["fp32", *(["lean"] if said is None else []), "amp", "amp+fastamp"]
    (note,) = (note for note in saved["notes"] if note.startswith("lean: "))
    assert note.startswith(f"lean: n/a; {said}" if said else "lean: bfloat16 weights")
    assert [each["arm"] for each in saved["measurements"] if each["name"] == "speedup"] == [
        "amp+fastamp"
    ]


def test_a_broken_task_is_one_line_that_names_the_part_and_status_2(quick, tmp_path, capsys):
    for place, (body, wanted) in enumerate(BROKEN.items()):
        path = tmp_path / f"broken_{place}.py"
        path.write_text(f"{HEAD}\ndef make(device, seed):\n    {body}\n")
        try:
            status = main(["--task", f"{path}:make", "--device", "cpu", "--steps", "3"])
        except SystemExit as ended:
            status = ended.code
        *trace, line = capsys.readouterr().err.splitlines()
        prefix = f"python -m fastamp.bench amp: error: argument task: '{path}:make' breaks its"
        assert line.startswith(f"{prefix} contract: {wanted}"), (body, line)
        assert status == 2
        if "of the user's own" in line:
            assert trace[0] == "Traceback (most recent call last):"
            assert sum(f'File "{path}", line' in each for each in trace) >= 1
            assert not any("fastamp/bench" in each for each in trace)
            assert trace[-1] == "ArithmeticError: of the user's own"


def test_a_task_that_cannot_be_found_is_a_bad_argument(tmp_path, capsys):
    (tmp_path / "wrong.py").write_text("make = 5\nx = fail\n")
    (tmp_path / "json.py").write_text("")
    (tmp_path / "right.py").write_text("make = 5\n")
    (tmp_path / "quits.py").write_text("import sys\nsys.exit('no')\n")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "right.py").touch()
    for task, wanted in {
        "mpl": "argument task: 'mpl' is none of gpt",
        f"{tmp_path}/missing.py:make": "missing.py: its import raised ModuleNotFoundError",
        f"{tmp_path}/wrong.py:make": "wrong.py: its import raised NameError: name 'fail'",
        f"{tmp_path}/quits.py:make": "quits.py: its import raised SystemExit: no",
        f"{tmp_path}/run.v2.py:make": "cannot be imported: a module has no dot in its name",
        f"{tmp_path}/json.py:make": "another module is called 'json'",
        f"{tmp_path}/right.py:make": "has a int there",
        f"{tmp_path}/right.py:made": "has no such function",
        f"{tmp_path}/inner/right.py:make": "another module is called 'right'",
        "no.such.module:make": "its import raised ModuleNotFoundError: No module named 'no'",
    }.items():
        with pytest.raises(SystemExit) as ended:
            main(["--task", task])
        assert ended.value.code == 2
        assert wanted in capsys.readouterr().err.splitlines()[-1]


def test_options_of_the_gpt_are_for_the_gpt_alone(tmp_path, capsys):
    path = tmp_path / "with_loader.py"
    batches = f"{HEAD}\ndef make(*_):\n    return model, torch.utils.data.DataLoader(data), loss\n"
    path.write_text(batches)
    for option in ("--data x", "--batch-size 2"):
        with pytest.raises(SystemExit) as ended:
            main(["--task", f"{path}:make", *option.split()])
        assert ended.value.code == 2
        assert f"argument {option.split()[0]}: " in capsys.readouterr().err


MAIN = """
import multiprocessing, runpy
from fastamp.bench import apart, measure
from fastamp.bench.race import Plan
measure.PLAN = Plan(build_s=0.01, builds=(3,))
apart.get_context = lambda _: multiprocessing.get_context("fork")
runpy.run_module("fastamp.bench", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("body", "batches", "line"),
    [
        ("os.kill(os.getpid(), 9)", "data", "batch_size: a step does not fit into memory, or the"),
        (
            "return fail()",
            "torch.utils.data.DataLoader(data, num_workers=1)",  # it can have children
            "model: its call on a batch raised ArithmeticError: of the user's own",
        ),
    ],
)
def test_a_process_that_is_killed_or_raises_ends_the_bench(body, batches, line, tmp_path):
    (tmp_path / "dies.py").write_text(f"""import os{HEAD}
def forward(x):
    {body}
def make(device, seed):
    model.forward = forward
    return model, {batches}, loss
""")
    done = run_python(MAIN, "--task", "dies.py:make", "--device", "cpu", cwd=tmp_path)
    assert done.returncode == 2
    assert line in done.stderr.splitlines()[-1]
    assert ("in fail" in done.stderr) == ("fail" in body)
    assert done.left == []


def test_a_module_and_its_neighbours_can_be_a_task(quick, tmp_path):
    (tmp_path / "neighbour_of_task.py").write_text(HEAD)
    (tmp_path / "task_of_folder.py").write_text(
        "from neighbour_of_task import *\ndef make(*_):\n    return model, data, loss\n"
    )
    make = tasks.find_make(f"{tmp_path}/task_of_folder.py:make")
    assert tasks.find_make("task_of_folder:make") is make
    assert isinstance(tasks.make_training(make, "cpu", 0).model, nn.Linear)


def test_tensors_in_a_tuple_and_arrays_in_a_dict_are_columns():
    x, y = torch.randn(10, 3), torch.arange(10)
    for data in ((x, y), {"x": x, "labels": y.numpy()}):
        training = tasks.make_training(
            lambda *_, data=data: (nn.Linear(3, 2), data, None), "cpu", 0
        )
        assert not training.has_loader
        loader = tasks.make_loader(training, 0, device="cpu")
        (batch,) = loader
        assert tasks.count_samples(batch) == 10
        assert isinstance(batch, dict) == isinstance(data, dict)


def test_batches_of_a_list_of_samples_come_pass_after_pass_and_only_whole_ones():
    training = tasks.Training(model=nn.Linear(1, 1), data=[*range(10)], loss=None, batch_size=4)
    batches = tasks.draw(tasks.make_loader(training, 0, device="cpu"), "cpu")
    drawn = [next(batches).tolist() for _ in range(4)]
    assert [len(batch) for batch in drawn] == [4] * 4
    assert len({*drawn[0], *drawn[1]}) == 8
    assert drawn[:2] != drawn[2:]


MOVES = "import os; os.chdir(os.path.dirname(os.path.abspath(__file__)))"
ONCE = "import sys; assert not sys.imported, 'twice'; sys.imported.append(True)"


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ("", f"{MOVES}; return model, data, loss"),
        (MOVES, "return model, data, loss"),
        (ONCE, "return model, data, loss"),
    ],
    ids=["changes the folder", "moves when imported", "is imported once"],
)
def test_a_task_that(quick, head, body, tmp_path, monkeypatch):
    def elsewhere(*args):
        if head != ONCE:
            tasks.find_make.cache_clear()  # as in another process
            sys.modules.pop("moves")
        return peaks.measure_peak(*args)

    monkeypatch.setattr(measure, "peak_memory", elsewhere)
    monkeypatch.setattr(sys, "imported", [], raising=False)
    monkeypatch.delitem(sys.modules, "moves", raising=False)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "moves.py").write_text(f"{head}{HEAD}\ndef make(*_):\n    {body}\n")
    monkeypatch.chdir(tmp_path)
    found = tmp_path / "found.json"
    words = ["--task", "inner/moves.py:make", "--device", "cpu", "--json", str(found)]
    assert main([*words, "--steps", "3"]) == 0
    saved = json.loads(found.read_text())
    assert saved["job"]["task"] == "inner/moves.py:make"
    assert saved["details"]["parameters"] == 15


def test_rates_are_of_all_samples_where_batches_differ(quick, tmp_path, capsys):
    path = tmp_path / "ragged.py"
    body = "return model, torch.utils.data.DataLoader(data, 24), loss"
    path.write_text(f"{HEAD}\ndef make(*_):\n    {body}\n")
    saved = run(path, "--steps", "8")
    assert "8 steps of 16 to 24 samples" in capsys.readouterr().out
    time_s = saved["races"]["training"]["arms"]["amp"]["time_s"]["median"]
    mean = (24 + 24 + 16 + 24 + 24 + 16 + 24 + 24) / 8
    assert saved["details"]["samples_per_s"]["amp"] == pytest.approx(mean / time_s)


def test_an_evaluation_of_another_length_for_each_arm_breaks_the_contract(quick, tmp_path, capsys):
    path = tmp_path / "grows.py"
    lines = "seen = []\ndef grow(_):\n    seen.append(0.5); return seen\n"
    body = "return model, data, loss, {'evaluate': grow}"
    path.write_text(f"{HEAD}\n{lines}def make(*_):\n    {body}\n")
    assert main(["--task", f"{path}:make", "--device", "cpu", "--steps", "3"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "options['evaluate']: expected as many numbers for each arm, " in said


# Where the time goes, and the sentence


def test_every_part_of_a_step_is_timed_once_a_step_on_batches_of_its_own(
    quick, tmp_path, monkeypatch
):
    path = tmp_path / "timed.py"
    path.write_text(f"{HEAD}\ndef make(*_):\n    return model, data, loss, {{'batch_size': 8}}\n")
    timers = []

    class Timer(where.fastamp.Timer):
        def __init__(self, device):
            super().__init__(device)
            timers.append(self)

    seen, step = [], Trainer.train_step

    def spy(trainer, batch, region):
        seen.append((isinstance(region, Timer), batch[0].sum().item()))
        step(trainer, batch, region)

    monkeypatch.setattr(Trainer, "train_step", spy)
    monkeypatch.setattr(measure, "MOST_STEPS", 5)
    monkeypatch.setattr(measure, "VISIT_S", 1e9)
    monkeypatch.setattr(where.fastamp, "Timer", Timer)
    saved = run(path, "--steps", "64")
    counts = [{name: s.count for name, s in timer.summary().items()} for timer in timers]
    counts = [count for count in counts if count]  # those of trainers time nothing
    assert sorted(count.pop("step") for count in counts) == [5] * 6 + [10] * 6  # zero_grad inside
    assert counts == [{"data": 5, "forward": 5, "backward": 5}] * 12
    drawn = [batch for is_timed, batch in seen if is_timed]
    assert len(drawn) == 60
    assert all(a != b for a, b in itertools.pairwise(drawn))
    for arm, profile in saved["details"]["profiles"].items():
        parts = {name: part["value"] for name, part in profile["parts"].items()}
        assert all(value > 0 for value in parts.values())
        assert (profile["syncs"], profile["steps"]) == (0, 3 * 5)
        median_s = saved["races"]["training"]["arms"][arm]["time_s"]["median"]
        assert sum(parts.values()) - parts["data"] == pytest.approx(median_s)
    facts = saved["details"]["profiles"]["amp"]["facts"]
    assert (facts["loader"], facts["dataset"]) == ("torch.DataLoader", "TensorDataset")
    assert (facts["optimizer"], facts["fused"], facts["dtype"]) == ("AdamW", True, "bfloat16")


def test_a_step_that_stalls_once_changes_no_part_of_the_median_step():
    block = {"data": 0.5, "forward": 0.2, "backward": 0.5, "step": 0.2, "all": 1.0}
    stalled = {"data": 9.0, "forward": 0.2, "backward": 30.0, "step": 0.2, "all": 31.0}
    parts = where.split_step([block, block, stalled, block, block], 2.0, "cpu")
    values = {name: part.value for name, part in parts.items()}
    assert values == pytest.approx(
        {"data": 0.5, "forward": 0.4, "backward": 1.0, "step": 0.4, "other": 0.2}
    )
    assert all(part.low <= part.value <= part.high for part in parts.values())
    assert "waits" in where.split_step([block] * 3, 2.0, "cuda")


def results(amp, ours, *, peaks_=(100, 50)):
    """Return what a race found: builds of equal times as fast as FP32."""
    visits = {"fp32": Visit(1.0), "amp": Visit(1 / amp), "amp+fastamp": Visit(1 / amp / ours)}
    return SimpleNamespace(
        race=Race(arms=[*visits], builds=[Build(arms=[*visits], rounds=[visits] * 2)] * 5),
        peaks={"fp32": peaks_[0] * 2**20, "amp": peaks_[1] and peaks_[1] * 2**20},
        batch_sizes=[4] * 24,
        memory_batch=None,
    )


def say(found, advice_, limit=math.inf):
    """Return the sentence where data take no time."""
    ratio = found.race.ratio("amp+fastamp", "amp")
    return targets.say_in_words(found, advice_, ratio, limit)


def test_one_sentence_says_it_all():
    loader = advice.Advice(
        part="loader", what="x", gain=Interval(value=1.2, low=1.0, high=1.5), why="waits"
    )
    nothing = advice.Advice(part="nothing", what="nothing", gain=Interval.exact(1.0), why="")
    step = advice.Advice(part="step", what="x", gain=Interval.exact(1.1), why=advice.RACED)
    assert say(results(1.86, 1.01), [step, loader]) == (
        "Mixed precision makes this model 1.86x as fast on this machine and halves its memory; "
        "fastamp adds 1 %; your loader is next to mend: up to 1.50x."
    )
    assert "; fastamp adds 102 %; " in say(results(1.86, 2.02), [nothing])
    assert say(results(0.5, 0.98, peaks_=(100, 120)), [nothing]) == (
        "Mixed precision makes this model 0.50x as fast on this machine and takes 20 % more memory;"
        " fastamp costs 2 %; nothing else would make a step faster by 2 %."
    )
    both = results(1.0, 1.0)
    both.memory_batch = 40
    assert say(both, [nothing]) == (
        "Mixed precision changes the speed of this model by less than 2 % on this machine and "
        "halves its memory at batches of 40, not 4; fastamp adds less than 2 %; nothing else would "
        "make a step faster by 2 %."
    )


def test_what_cannot_be_told_is_not_called_nothing():
    nothing = advice.Advice(part="nothing", what="nothing", gain=Interval.exact(1.0), why="")
    wide = results(1.0, 1.0, peaks_=(100, None))
    other = wide.race.builds[0].rounds[0] | {"amp": Visit(2.0)}
    wide.race.builds[1] = Build(arms=wide.race.arms, rounds=[other] * 2)
    said = say(wide, [nothing])
    assert said.startswith("Cannot tell whether mixed precision is faster here (0.87x [")
    assert "; what fastamp adds cannot be told (1.15x [" in said
    assert "memory" not in said
    few = results(0.93, 1.0)
    del few.race.builds[2:]
    assert say(few, [nothing]).startswith(
        "Cannot tell whether mixed precision is faster here (0.93x"
    )


def test_a_gain_beyond_the_share_of_the_step_is_called_noise():
    nothing = advice.Advice(part="nothing", what="nothing", gain=Interval.exact(1.0), why="")
    parts = {"step": Interval.exact(0.039), "forward": Interval.exact(0.961)}
    limit = advice.Profile(device="cpu", steps=6, parts=parts).limit("step")
    assert limit == pytest.approx(1 / 0.961)
    said = say(results(1.5, 1.74), [nothing], limit)
    assert (
        "; what fastamp adds cannot be told: 1.74x is noise, since what it replaces takes" in said
    )
    assert "3.9 % of the time: 1.04x at most" in said
    assert "; fastamp adds 3 %; " in say(results(1.5, 1.03), [nothing], limit)
