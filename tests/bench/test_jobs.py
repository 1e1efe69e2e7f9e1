"""The built-in jobs, and the race of a naive loop, a good one with torch alone, and fastamp's."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import re
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.fake_clock import FakeClock
from support.processes import run_python
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import fastamp
from fastamp.bench import feeds, job_table, tasks, text
from fastamp.bench.__main__ import main
from fastamp.bench.jobs import JOBS, JobRow, language, networks, vision
from fastamp.bench.race import Build, Interval, Plan, Race, Visit
from fastamp.bench.record import measure
from fastamp.bench.tasks import BrokenTask, make_training

LOOPS = {config.name: config for config in job_table.list_loops("stock", "fp32")}
LOOPS["indexed"] = job_table.list_loops("indexed", "fp32")[0]


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Make the data of all jobs small."""
    monkeypatch.setattr(networks, "ROWS", 600)
    monkeypatch.setattr(networks, "STATES", 300)
    for module in (networks, vision):
        monkeypatch.setattr(module, "HELD_OUT", 40)
    monkeypatch.setattr(vision, "COUNT", 300)
    monkeypatch.setattr(vision, "PATCHED", 100)
    monkeypatch.setattr(vision, "PHOTOS", 10)
    shape = language.Shape(layers=3, heads=2, width=32, block_size=8)
    monkeypatch.setattr(language, "DEEP", shape)
    monkeypatch.setitem(language.SHAPES, "cpu", shape)
    (tmp_path / "text").write_bytes(bytes(range(200)) * 50)
    load = partial(text.load_corpus, str(tmp_path))
    monkeypatch.setattr(language, "load_corpus", lambda _, block_size: load(block_size=block_size))


@pytest.fixture
def quick(monkeypatch):
    """Race for three blocks of two steps, without a trial of workers."""
    monkeypatch.setattr(job_table, "PLAN", Plan(rounds=8, warmup=2, builds=(3,)))
    for name in ("LEAST_STEPS", "MOST_STEPS", "AGREE_STEPS", "WORKER_STEPS"):
        monkeypatch.setattr(job_table, name, 2)
    monkeypatch.setattr(job_table, "TRIALS", Plan(rounds=3, warmup=1))
    monkeypatch.setattr(job_table, "no_speed_reason", lambda *_: "not asked")
    monkeypatch.setattr(job_table, "list_ways", lambda _, loader: [(loader, {})])


def make_rows(_device, _seed):
    """Return a linear model of 64 rows."""
    rows = torch.randn(64, 3)
    data = TensorDataset(rows, rows.sum(1, keepdim=True))
    return nn.Linear(3, 1), data, nn.functional.mse_loss, {"batch_size": 4, "max_norm": 0.5}


def train(arm, training):
    loop = job_table.make_loop(LOOPS[arm], training, "cpu", steps=2, seed=0)
    loop.visit()
    return loop


def agree(losses, *, is_same=True):
    precisions = dict.fromkeys(losses, "fp32")
    job_table.check_losses(losses, precisions, is_same=is_same)


@pytest.mark.parametrize("name", JOBS)
def test_all_loops_of_a_job_have_the_same_losses(name, small):
    training = make_training(JOBS[name].make, "cpu", 0)
    data = feeds.find_data(training)
    arms = [arm for arm in LOOPS if arm != "indexed" or data.columns() is not None]
    assert ("indexed" in arms) == (name in {"mlp", "tabular", "groups", "rl"})
    losses = {arm: list(map(float, train(arm, training).losses)) for arm in arms}
    assert {len(each) for each in losses.values()} == {2}
    assert data.is_repeatable() == (name not in {"cnn", "images"})
    agree(losses, is_same=data.is_repeatable())
    if training.evaluate is not None:
        with torch.no_grad():
            found = training.evaluate(training.model)
        shares = found["accuracy"] if isinstance(found, dict) else found
        assert all(0 <= share <= 1 for share in shares)


def test_only_rows_that_are_tensors_and_nothing_else_are_indexed_by_hand():
    x, y = torch.randn(20, 3), torch.arange(20)
    image = torch.zeros(20, 1, 8, 8)
    crop = [fastamp.RandomCrop(2)]
    for dataset, is_indexed in (
        (TensorDataset(x, y), True),
        (fastamp.ArrayDataset(x, y), True),
        (fastamp.ArrayDataset({"x": x, "y": y}), True),
        (fastamp.ArrayDataset({"x": (x, x), "y": y}), False),
        (fastamp.ArrayDataset(x.numpy(), y), False),
        (fastamp.ArrayDataset(image, y, augment=crop), False),
        ([*zip(x, y, strict=True)], False),
    ):
        task = tasks.Training(model=nn.Linear(3, 1), data=dataset, loss=None, batch_size=4)
        data = feeds.find_data(task)
        assert (("indexed", {}) in feeds.list_ways(data, "stock")) == is_indexed
        assert ("indexed", {}) not in feeds.list_ways(data, "fastamp")
        if is_indexed:
            pair = [feeds.make_feed(k, task, "cpu", steps=5, seed=1) for k in ("stock", "indexed")]
            for ours, theirs in zip(*(feed.begin() for feed in pair), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    data = feeds.find_data(replace(task, data=DataLoader(TensorDataset(x, y), 4, collate_fn=list)))
    assert ("indexed", {}) not in feeds.list_ways(data, "stock")


@pytest.mark.parametrize(
    ("times_ms", "base", "has_workers"),
    [
        ({"stock": 10, "indexed": 9}, "indexed", False),
        ({"stock": 9, "indexed": 10}, "stock", False),
        ({"stock": 10, "indexed": 11, "workers": 9}, "stock", True),
        ({"stock": 10, "indexed": 9.2, "workers": 9}, "indexed", False),
    ],
)
def test_the_good_loop_is_the_faster_one_of_torch_alone(monkeypatch, times_ms, base, has_workers):
    clock = FakeClock(monkeypatch)
    monkeypatch.setattr(job_table, "no_speed_reason", lambda *_: "not asked")

    def make(config, *, steps, workers):
        time_s = steps * times_ms.get("workers" if workers else config.loader, 100) / 1e3
        return SimpleNamespace(visit=partial(clock.spend, time_s))

    data = feeds.find_data(make_training(make_rows, "cpu", 0))
    chosen = job_table._choose(make, data, "cpu", None)
    assert (chosen["base"], bool(chosen["workers"]["stock"])) == (base, has_workers)
    stock, _, ours = job_table.list_loops(chosen["base"], chosen["precision"])
    assert (stock.name, stock.loader, ours.loader) == ("stock", base, "fastamp")


def test_losses_that_differ_break_the_contract_in_one_line():
    agree({"stock": [2.0, 1.0], "fastamp": [2.0, 1.001]})
    wanted = "in the fastamp loop: does the task draw random numbers"
    with pytest.raises(BrokenTask, match=wanted) as error:
        agree({"stock": [2.0, 1.0], "fastamp": [2.0, 1.01]})
    assert "\n" not in str(error.value)
    mixed = partial(job_table.check_losses, precisions={"stock": "bf16", "naive": "fp32"})
    mixed({"stock": [2.0, 1.0], "naive": [2.0, 1.01]}, is_same=True)
    for other, is_same in (([2.0, 1.2], True), ([2.0, 2.0], False)):
        with pytest.raises(BrokenTask, match="in the naive loop"):
            mixed({"stock": [2.0, 1.0], "naive": other}, is_same=is_same)


def test_all_loops_draw_the_same_numbers_of_pythons_generator(quick, monkeypatch):
    model, data, _, options = make_rows("cpu", 0)

    def loss(output, target):
        return nn.functional.mse_loss(output, target) * random.random()

    monkeypatch.setitem(JOBS, "drawing", JobRow(lambda *_: (model, data, loss, options)))
    race = job_table._race("drawing", "cpu", 0)
    assert {*race.builds[0].found["losses"]} == {*job_table.ARMS}
    assert len(race.builds) == 3


def test_samples_that_are_no_numbers_need_only_a_collate_fn():
    loader = DataLoader(["a", "bc"] * 8, 4, collate_fn=lambda rows: torch.tensor([*map(len, rows)]))
    training = make_training(lambda *_: (nn.Linear(1, 1), loader, None), "cpu", 0)
    assert not feeds.find_data(training).is_repeatable()


def test_a_dataset_that_fails_late_is_named_and_so_is_a_loss(quick, monkeypatch):
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            return torch.ones(3), torch.ones(1) if index < 60 else 1 / (index - index)

    model, data, loss, options = make_rows("cpu", 0)
    for made, line in (
        ((model, Rows(), loss, options), "dataset: its next batch raised ZeroDivisionError"),
        ((model, data, lambda *_: 1 / 0, options), "loss: its computation raised ZeroDivision"),
    ):
        monkeypatch.setitem(JOBS, "broken", JobRow(lambda *_, made=made: made))
        tasks.find_make.cache_clear()
        with pytest.raises(BrokenTask, match=line):
            job_table._race("broken", "cpu", 0)


def test_a_model_that_cannot_be_copied_is_one_line_and_status_2(tmp_path, capsys):
    path = tmp_path / "locked_model.py"
    path.write_text("""import threading
from torch import nn, ones
def make(device, seed):
    model = nn.Linear(1, 1)
    model.lock = threading.Lock()
    return model, (ones(64, 1), ones(64, 1)), nn.functional.mse_loss
""")
    assert main(["jobs", f"{path}:make", "--device", "cpu"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"argument task: '{path}:make' breaks its contract: model: its copy for each arm" in line


def test_each_loop_has_the_optimizer_that_people_give_it():
    training = make_training(make_rows, "cpu", 0)
    made = {
        arm: train(arm, training).optimizers[0].param_groups[0]["fused"] for arm in job_table.ARMS
    }
    assert made == {"naive": None, "stock": True, "fastamp": True}
    rates = [0.1, 0.2]
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates]
    fused = tasks.with_fused(torch.optim.SGD(groups, momentum=0.9), fused=True)
    assert [group["lr"] for group in fused.param_groups] == rates
    assert all(group["fused"] and group["momentum"] == 0.9 for group in fused.param_groups)
    plain = torch.optim.RMSprop(groups)
    assert tasks.with_fused(plain, fused=True) is plain


def test_a_loader_of_the_users_is_read_by_all_loops(quick, monkeypatch):
    seen = []

    def collate(samples):
        seen.append(len(samples))
        return default_collate(samples)

    model, data, loss, options = make_rows("cpu", 0)
    loader = DataLoader(data, 8, collate_fn=collate)
    training = make_training(lambda *_: (model, loader, loss, options), "cpu", 0)
    found = {arm: list(map(float, train(arm, training).losses)) for arm in job_table.ARMS}
    assert set(seen) == {8}
    assert len(seen) >= 6
    agree(found)
    batches = [tuple(data[:4]), tuple(data[4:8]), tuple(data[8:12])]
    monkeypatch.setitem(
        JOBS, "given", JobRow(lambda *_: (model, iter_again(batches), loss, options))
    )
    assert len(job_table._race("given", "cpu", 0).builds) == 3


class iter_again:  # noqa: N801 - an iterable of batches without a length
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def test_the_table_has_a_row_for_each_job(small, quick, tmp_path, capsys):
    path, page = tmp_path / "found.json", tmp_path / "page.html"
    words = ["jobs", "rl", "mlp", "--device", "cpu", "--json", str(path), "--report", str(page)]
    assert main(words) == 0
    found = json.loads(path.read_text())
    names = ["rl", "mlp"]
    assert [row["job"] for row in found["table"]] == names
    assert {each["name"] for each in found["measurements"]} == {
        key
        for name in names
        for key in (
            f"speedup/{name}/fastamp",
            *(f"over_naive/{name}/{arm}" for arm in ("stock", "fastamp")),
        )
    }
    for name in names:
        assert len({len(losses) for losses in found["details"][name]["losses"].values()}) == 1
    judged = [each for each in found["measurements"] if each["reason"]]
    assert [each["name"] for each in judged] == [f"speedup/{name}/fastamp" for name in names]
    assert all(name in page.read_text() for name in names)
    assert judged[1]["text"] in capsys.readouterr().out


def job_race(times_s, *, spread=0.001, workers=False, model_share=0.5):
    """Return the race of a job: five builds, whose times differ by a little."""
    builds = []
    for number in range(5):
        factor = {"naive": 1.0, "stock": 1.0, "fastamp": 1 + spread * (number - 2)}
        rounds = [{arm: Visit(time_s * factor[arm]) for arm, time_s in times_s.items()}] * 4
        kinds = {"stock": {"num_workers": 2}} if workers else {}
        found = {"workers": kinds, "model_share": model_share, "steps": 1, "failures": []}
        builds.append(Build(arms=[*times_s], rounds=rounds, found=found))
    return Race(arms=[*times_s], builds=builds)


def judged(race, name="job"):
    return {each.name: each for each in job_table._judge("cpu", name, race)}


@pytest.mark.parametrize(("naive_s", "base", "ratio"), [(2.0, "stock", 1.5), (1.2, "naive", 1.2)])
def test_torch_at_its_best_is_the_fastest_of_its_own_loops_the_naive_one_too(naive_s, base, ratio):
    race = job_race({"stock": 1.5, "naive": naive_s, "fastamp": 1.0})
    found = judged(race)["speedup/job/fastamp"]
    assert (found.base, found.verdict) == (base, "faster")
    assert found.interval.value == pytest.approx(ratio, rel=1e-3)
    assert job_table._row("job", race, judged(race))["which is"] == base


@pytest.mark.parametrize(
    ("model_share", "workers", "verdict"),
    [(0.5, False, "faster"), (0.96, False, "cannot tell"), (0.96, True, "faster")],
)
def test_a_gain_beyond_all_that_was_replaced_is_noise(model_share, workers, verdict):
    times_s = {"stock": 1.5, "naive": 2.0, "fastamp": 1.0}
    race = job_race(times_s, model_share=model_share, workers=workers)
    found = judged(race)["speedup/job/fastamp"]
    assert found.verdict == verdict
    said = job_table.say_in_words({found.name: found}, ["job"])
    if verdict == "faster":
        assert said.endswith("fastamp makes job 1.50x as fast.")
    else:
        assert found.reason.startswith("1.50x is noise, since what it replaces takes 4 % of the ")
        assert "cannot be judged in job (1.50x [" in said


def test_a_wide_interval_is_not_called_nothing_that_can_be_measured():
    ratios = {"a": (0.86, 2.63), "b": (0.99, 1.01), "c": (0.045, 667.0), "d": (1.1, 1.2)}
    metrics = {}
    for name, (low, high) in ratios.items():
        ratio = Interval(value=(low * high) ** 0.5, low=low, high=high)
        metrics[f"speedup/{name}/fastamp"] = measure("", ratio, "fastamp", "stock")
    said = job_table.say_in_words(metrics, [*ratios])
    assert "makes d 1.15x as fast" in said
    assert "changes b by less than 2 %" in said
    assert "cannot be judged in a (1.50x [0.86, 2.63]) and c (5.48x [0.0" in said


def test_a_loss_that_became_nan_is_a_failure_with_its_own_words(quick, monkeypatch, capsys):
    model, data, _, options = make_rows("cpu", 0)
    steps = itertools.count()

    def loss(output, target):
        broken = math.nan if next(steps) > 40 else 1.0
        return nn.functional.mse_loss(output, target) * broken

    monkeypatch.setitem(JOBS, "broken", JobRow(lambda *_: (model, data, loss, options)))
    tasks.find_make.cache_clear()
    assert main(["jobs", "broken", "--device", "cpu"]) == 1
    shown = capsys.readouterr().out
    assert re.search(
        r"broken: the training of \w+ has failed: its loss is nan from step \d+ of", shown
    )
    assert "Compared with torch" not in shown


def test_a_job_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["jobs", "mlps"])
    assert exit_.value.code == 2
    assert "argument task: 'mlps' is none of gpt, mlp, tabular" in capsys.readouterr().err


def test_without_pillow_the_images_are_refused_before_any_work_and_no_default(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    monkeypatch.setattr(job_table, "_race", None)
    with pytest.raises(SystemExit) as exit_:
        main(["jobs", "mlp", "images"])
    assert exit_.value.code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "s' cannot run: PIL.Image cannot be imported" in line
    assert "pip install 'fastamp[images]'" in line
    job, _ = job_table.prepare(argparse.Namespace(names=[], seed=0))
    assert job["jobs"] == [name for name in JOBS if name != "images"]


def test_a_folder_of_the_users_called_datasets_is_not_hugging_faces(tmp_path):
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "__init__.py").touch()
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    done = run_python(f"{code}\nfrom fastamp.bench import loader\nprint(*loader.DATA)")
    assert done.stdout == "tensors columns windows tokens images augmented dicts collate slow\n"


@pytest.mark.cuda
@pytest.mark.usefixtures("device")
def test_jobs_run_on_a_gpu(small, quick, tmp_path):
    path = tmp_path / "found.json"
    assert main(["jobs", "groups", "gpt", "--json", str(path)]) == 0
    assert "speedup/groups/fastamp" in {
        each["name"] for each in json.loads(path.read_text())["measurements"]
    }
