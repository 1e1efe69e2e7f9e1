"""Arms of one's own: what a change does to a training, and how a wrong one is told."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn

from fastamp.bench import arms, environment, measure, peaks, targets, tasks, where
from fastamp.bench.__main__ import main
from fastamp.bench.gpt import Shape
from fastamp.bench.jobs.language import make_gpt
from fastamp.bench.race import Build, Race
from fastamp.bench.trainer import Config, Trainer

HEAD = """
import torch
from torch import nn
def fail(*_):
    raise ArithmeticError("of the user's own")
def make(device, seed):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
    data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.arange(64) % 3)
    def evaluate(model):
        loss = nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1])
        return {"accuracy": 0.5, "loss": loss}
    arms = ARMS
    options = {"evaluate": evaluate, "batch_size": 16, "arms": arms}
    return model, data, nn.functional.cross_entropy, options
"""
FOUR = """{
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "8bit": {"optimizer": lambda m: __import__("fastamp").AdamW(m.parameters(), moments="8bit")},
    "sgd": {"optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1)},
    "small": {"batch_size": 4, "accumulate": 4},
}"""


@pytest.fixture
def bench(monkeypatch, tmp_path, capsys):
    """Return a function that runs the main job on a task with arms; it returns status and text."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(measure, "peak_memory", peaks.measure_peak)
    monkeypatch.setattr(environment, "cpu_features", lambda: {"amx_bf16"})
    monkeypatch.setattr(where, "BLOCKS", 3)

    def run(own, *options, name="task"):
        monkeypatch.delitem(sys.modules, name, raising=False)  # of another test
        path = tmp_path / f"{name}.py"
        path.write_text(HEAD.replace("ARMS", own))
        words = ["--task", f"{path}:make", "--device", "cpu", *options]
        try:
            status = main(words)
        except SystemExit as ended:
            status = ended.code
        return status, capsys.readouterr()

    return run


def make_trainer(change, *, name="own", config=None, model=None, **options):
    """Return a trainer of an arm."""
    data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.arange(64) % 3)
    model = model or nn.Sequential(nn.Embedding(8, 4), nn.Linear(64, 64), nn.Linear(64, 3))
    training = tasks.Training(
        model=model, data=data, loss=nn.functional.cross_entropy, arms={name: change}, **options
    )
    return Trainer(config or Config(name=name, is_own=True), training, "cpu")


# Four arms, from the task to the page


def test_four_arms_have_a_row_a_verdict_and_a_curve_each(bench, tmp_path):
    pytest.importorskip("matplotlib")
    page, record = tmp_path / "page.html", tmp_path / "record.json"
    words = ("--steps", "16", "--report", str(page), "--json", str(record))
    status, printed = bench(FOUR, *words)
    assert (status, printed.err) == (0, "")
    found = json.loads(record.read_text())
    names = ["fp32", "lean", "compiled", "8bit", "sgd", "small", "amp", "amp+fastamp"]
    assert [row["arm"] for row in found["table"]] == names
    assert [*found["losses"]] == names
    judged = {each["name"]: each for each in found["measurements"]}
    for arm in names[2:6]:
        each = judged[f"speedup/{arm}"]
        assert each["verdict"] in {"faster", "slower", "equal", "cannot tell"}
        assert (each["arm"], each["base"]) == (arm, "fp32")
        assert f"{arm} against fp32, in samples a second" in each["reason"] or each["reason"]
        assert each["text"] in page.read_text()
        assert each["text"] in printed.out
    assert "8 comparisons, each at 99.38 %: all together hold at 95 %" in printed.out
    assert "speed-up [99.38 %]" in found["table"][0]
    assert found["job"]["arms"] == sorted(names[2:6])
    # Four batches of 4 are the samples of one of 16: the same mean loss, to rounding.
    torch.testing.assert_close(found["losses"]["small"], found["losses"]["fp32"])
    assert found["losses"]["sgd"][1:] != found["losses"]["fp32"][1:]
    # A later run is held to the record, for arms of one's own too.
    held = ("--steps", "16", "--baseline", str(record), "--fail-on", "speedup/sgd:-99.9%")
    status, printed = bench(FOUR, *held)
    assert "speedup/sgd since the baseline" in printed.out
    status, printed = bench(FOUR, *held[:-1], "speedup/other:-5%")
    assert status == 2
    assert "'speedup/other' is no metric of the baseline" in printed.err


def test_an_arm_is_added_without_a_change_of_the_task(bench, tmp_path):
    (tmp_path / "changes.py").write_text("def same(model):\n    return model\n")
    words = ("--steps", "12", "--arm", f"same={tmp_path / 'changes.py'}:same", "--arm", "fp8")
    status, printed = bench("{}", *words, "--arm", "muon", "--against", "amp")
    assert status == 0
    assert "\nspeedup/same " in printed.out
    assert "same against amp, in samples a second" in printed.out
    assert "\nfp8: n/a; arms['fp8']: the device: expected a GPU with fp8 units" in printed.out
    assert "\nmuon  " in printed.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--arm", "x"], "'x' is neither NAME=FILE.py:function nor one of compiled, muon, fp8"),
        (["--arm", "amp=x.py:f"], "'amp=x.py:f' is not NAME=FILE.py:function, with a name of its"),
        (["--arm", "a:b=x.py:f"], "'a:b=x.py:f' is not NAME=FILE.py:function"),
        (["--against", "sgd"], "'sgd' is none of fp32, lean, amp, amp+fastamp"),
        (["--until", "equal", "--until-loss", "2"], "cannot be used with --until"),
    ],
)
def test_options_that_make_no_sense_are_refused(bench, words, said):
    status, printed = bench("{}", *words)
    assert status == 2
    assert said in printed.err


# Wrong arms


OTHERS = (
    "the change: expected the parameters of the model that it is given, as they are: no other, new"
    " or frozen ones, got others"
)
WRONG = {
    "fail": "the change: its call on the model raised ArithmeticError: of the user's own",
    "lambda model: None": "the change: expected the changed model, got None",
    "lambda model: nn.Linear(64, 3)": OTHERS,
    "lambda model: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))": OTHERS,
    "lambda model: __import__('copy').deepcopy(model)": OTHERS,
    "lambda model: model.requires_grad_(False)": OTHERS,
    "lambda model: model[0].weight.data.mul_(0.5) is None or model": OTHERS,
    "lambda model: model.append(nn.Linear(3, 3))": OTHERS,
    "lambda model: torch.set_num_threads(torch.get_num_threads() + 1) or model": "the change: expec"
    "ted torch.get_num_threads() as it was, for all arms, got",
    "{'loader': torch.utils.data.DataLoader(data, 16, num_workers=1)}": "loader: expected loaders w"
    "ithout workers, which would work while other arms train, got 1 workers",
    "{'loader': torch.utils.data.DataLoader(data, 16), 'batch_size': 8}": "batch_size: expected",
    "{'other_samples': True}": "expected some of optimizer, dtype, batch_size",
    "{'dtype': None, 'precision': 'bf16'}": "expected dtype or precision, got both",
    "{'loader': (torch.randn(60, 64), torch.arange(60) % 3)}": "loader: expected the 64 samples of"
    " the task in an epoch, or other_samples=True, got 60",
    "{'lr': 1}": "expected some of optimizer, dtype, batch_size, accumulate, loader, precision, ot",
    "{'batch_size': 0}": "expected an integer above 0, got 0",
    "{'precision': 'fp7'}": "expected one of fp32, lean, bf16, fp16, got 'fp7'",
    "{'optimizer': fail}": "options['optimizer']: its call raised ArithmeticError: of the user's",
    "lambda model: model.register_forward_hook(fail) and model": "model: its call on a batch raise",
    "5": "expected a function of the model or a dict, got 5",
}


@pytest.mark.parametrize("change", WRONG)
def test_a_wrong_arm_ends_in_one_line_that_names_it(bench, change):
    threads = torch.get_num_threads()
    status, printed = bench(f"{{'wrong': {change}}}", "--steps", "6")
    assert status == 2
    line = printed.err.splitlines()[-1]
    torch.set_num_threads(threads)
    assert "breaks its contract: arms['wrong']" in line
    assert WRONG[change] in line


def test_arms_that_a_later_call_of_make_lacks_are_an_error(bench):
    own = "{} if seed else {'same': lambda model: model}"
    status, printed = bench(own, "--steps", "6", "--until", "equal")
    assert status == 2
    assert "arms['same']: make: expected the arms of its first call" in printed.err


def test_the_arm_that_others_change_cannot_be_left_out(bench):
    own = "{'sgd': {'optimizer': lambda m: torch.optim.SGD(m.parameters(), lr=0.1)}}"
    own += ' or 0; options_ = {"optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1)}'
    status, printed = bench(own, "--steps", "6", "--against", "lean")
    assert status == 2
    assert "arms['sgd']: options['optimizer']: expected torch's AdamW" in printed.err


def test_a_name_of_ours_and_one_used_twice_are_no_arms(bench):
    status, printed = bench("{1: fail}", "--steps", "6", name="number")
    assert status == 2
    assert "options['arms']: expected names of letters and digits" in printed.err
    status, printed = bench("{'lean': fail}", "--steps", "6")
    assert status == 2
    assert "options['arms']: expected names of letters and digits, none of fp32," in printed.err
    own = "{'muon': lambda model: model}"
    status, printed = bench(own, "--arm", "muon", name="other")
    assert status == 2
    assert "arms['muon']: expected one change, got two" in printed.err


# What a change does


def test_a_dict_replaces_the_options_of_the_task():
    data = torch.utils.data.TensorDataset(torch.randn(8, 64), torch.arange(8) % 3)
    change = {"precision": "bf16", "batch_size": 4, "loader": data, "other_samples": True}
    made = make_trainer(change, model=nn.Linear(64, 3))
    assert (made.dtype, made.training.batch_size) == (torch.bfloat16, 4)
    assert made.training.data is data
    assert make_trainer({"dtype": torch.float16}, model=nn.Linear(64, 3)).scaler.is_enabled()


def test_muon_takes_hidden_matrices_and_leaves_the_others_to_adamw():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    made = make_trainer(arms.BUILT_IN["muon"], name="muon")
    muon, adamw = made.optimizers
    embedding, hidden, head = made.model
    assert muon.param_groups[0]["params"] == [hidden.weight]
    assert muon.param_groups[0]["lr"] == adamw.param_groups[0]["lr"] == 1e-3
    others = [embedding.weight, hidden.bias, head.weight, head.bias]
    assert list(map(id, adamw.param_groups[0]["params"])) == list(map(id, others))
    for model, optimizer, said in (
        (nn.Linear(64, 3), None, "expected matrices of hidden layers, for Muon"),
        (None, lambda m: torch.optim.SGD(m.parameters()), "expected AdamW, whose rate Muon's is"),
    ):
        with pytest.raises(tasks.BrokenTask, match=said):
            make_trainer(arms.BUILT_IN["muon"], name="muon", model=model, optimizer=optimizer)


@pytest.mark.parametrize("step", ["stock", "fastamp", "naive"])
def test_several_optimizers_are_clipped_to_one_norm(step):
    def halves(model):
        first, *rest = model.parameters()
        return [torch.optim.SGD([first], lr=1.0), torch.optim.SGD(rest, lr=1.0)]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3))
    before = [p.detach().clone() for p in model.parameters()]
    config = Config(name="own", step=step, is_own=True)
    made = make_trainer({"optimizer": halves}, config=config, model=model, max_norm=0.25)
    made.train([(torch.randn(16, 64), torch.arange(16) % 3)])
    moved = [new.detach() - old for new, old in zip(model.parameters(), before, strict=True)]
    norm = torch.linalg.vector_norm(torch.stack([*map(torch.linalg.vector_norm, moved)]))
    assert norm.item() == pytest.approx(0.25, rel=1e-4)
    if step == "fastamp":
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_conversion_of_the_weights_is_the_same_model():
    model = make_trainer(nn.Module.bfloat16, model=nn.Linear(64, 3)).model
    assert model.weight.dtype == torch.bfloat16


def test_arms_of_other_batches_take_as_many_samples():
    trainers = {}
    for name, change in {
        "plain": lambda model: model,
        "large": {"batch_size": 32},
        "parts": {"batch_size": 8, "accumulate": 2},
    }.items():
        trainers[name] = make_trainer(change, model=nn.Linear(64, 3), batch_size=16)
    batches = measure.open_batches(trainers, seed=0)
    for name, trainer in trainers.items():
        batches[name].go_to_visit_of(trainer)
        trainer.train(batches[name])
    amounts = measure.set_steps(batches, 4)
    assert amounts == dict.fromkeys(trainers, 4.0)
    assert {name: each.steps for name, each in batches.items()} == {
        "plain": 4,
        "large": 2,
        "parts": 4,
    }


def test_where_a_loader_is_changed_every_arm_draws_its_own_batches_on_the_clock():
    drawn = []

    class Loader:
        def __iter__(self):
            for step in range(4):
                drawn.append(step)
                yield torch.randn(16, 64), torch.arange(16) % 3

    change = {"loader": Loader(), "other_samples": True}
    trainers = {
        "plain": make_trainer(lambda model: model, model=nn.Linear(64, 3)),
        "own": make_trainer(change, model=nn.Linear(64, 3)),
    }
    batches = measure.open_batches(trainers, seed=0)
    assert batches["plain"] is not batches["own"]
    batches["own"].go_to_visit_of(trainers["own"])
    assert drawn == []
    trainers["own"].train(batches["own"])
    assert drawn == [0]


def test_a_verdict_needs_an_interval_beside_1_and_says_memory_and_loss():
    race = Race(arms=["fp32", "own"])
    found = measure.Results(
        parameters=1,
        batch_sizes=[16],
        peaks={"fp32": 2**27, "own": 2**26},
        race=race,
        losses={"fp32": [2.0], "own": [1.5]},
        scores={"fp32": [], "own": []},
        profiles={},
    )
    for times, said in (((2.0, 1.0), "faster"), ((1.0, 2.0), "slower"), ((1.0, 1.0), "equal")):
        visits = dict(zip(race.arms, map(measure.Visit, times), strict=True))
        race.builds = [Build(arms=race.arms, rounds=[visits] * 4)] * 5
        speedup, peak = targets.judge_arms(found, ["own"], "fp32")
        assert speedup.verdict.startswith(said)
        assert speedup.reason.endswith("50 % less memory, loss 1.5000 against 2.0000")
        assert (peak.name, peak.interval.value) == ("peak_memory/own", 2**26)
    found.samples.update(fp32=16, own=64)
    speedup, _ = targets.judge_arms(found, ["own"], "fp32")
    assert speedup.reason.endswith("64 samples against 16: losses are not compared")


def test_more_comparisons_widen_every_interval():
    visits = [{"a": 1.0, "b": 1.0 + 0.1 * (i % 7)} for i in range(60)]
    rounds = [{arm: measure.Visit(time_s) for arm, time_s in each.items()} for each in visits]
    builds = [Build(arms=["a", "b"], rounds=[each] * 2) for each in rounds]
    one, many = (Race(arms=["a", "b"], builds=builds, comparisons=m).ratio("b") for m in (1, 8))
    assert many.low < one.low < one.value == many.value < one.high < many.high


def test_the_gpt_has_matrices_for_muon():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    shape = Shape(layers=2, heads=1, width=16, block_size=8)
    training = tasks.make_training(
        lambda device, seed: make_gpt(device, seed, shape=shape, batch_size=2), "cpu", 0
    )
    optimizers = arms._split(training, training.model)
    count = [sum(len(group["params"]) for group in each.param_groups) for each in optimizers]
    assert count[0] == 8
    assert sum(count) == len([*training.model.parameters()])
