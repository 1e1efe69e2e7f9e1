"""The built-in jobs, and the race of a naive loop, a good one with torch alone, and fastamp's."""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.processes import run_python
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from fastamp.bench import in_frameworks, job_table, loops
from fastamp.bench.__main__ import main
from fastamp.bench.jobs import JOBS, language, networks, vision
from fastamp.bench.race import Plan
from fastamp.bench.tasks import BrokenTask, make_training
from fastamp.train import text

WORKERS = {"dtype": None, "steps": 2, "seed": 0, "workers": {}}


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Make the data of all jobs small."""
    digits = SimpleNamespace(images=np.ones((300, 8, 8)), target=np.arange(300) % 10)
    found = SimpleNamespace(load_digits=lambda: digits)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", found)  # which takes seconds to import
    monkeypatch.setattr(networks, "ROWS", 600)
    monkeypatch.setattr(networks, "EPISODES", 16)
    monkeypatch.setattr(networks, "HORIZON", 20)
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
    for name in ("MAIN", "REPAIRS"):
        monkeypatch.setattr(job_table, name, Plan(rounds=8, warmup=2))
    for name in ("LEAST_STEPS", "MOST_STEPS", "AGREE_STEPS", "WORKER_STEPS"):
        monkeypatch.setattr(job_table, name, 2)
    monkeypatch.setattr(job_table, "TRIALS", Plan(rounds=3, warmup=1))
    monkeypatch.setattr(job_table, "no_speed_reason", lambda *_: "not asked")
    monkeypatch.setattr(loops, "list_workers", lambda *_: [{}])
    monkeypatch.setattr(job_table, "list_workers", lambda *_: [{}])
    monkeypatch.setattr(job_table, "list_peers", list)


def make_rows(_device, _seed):
    """Return a linear model of 64 rows."""
    rows = torch.randn(64, 3)
    data = TensorDataset(rows, rows.sum(1, keepdim=True))
    return nn.Linear(3, 1), data, nn.functional.mse_loss, {"batch_size": 4, "max_norm": 0.5}


def train(arm, training, **options):
    loop = loops.Loop(loops.list_parts(arm), training, "cpu", **WORKERS | options)
    loop.epoch()
    return loop


@pytest.mark.parametrize("name", JOBS)
def test_the_three_loops_of_a_job_have_the_same_losses(name, small):
    training = make_training(JOBS[name], "cpu", 0)
    losses = {arm: list(map(float, train(arm, training).losses)) for arm in loops.ARMS}
    assert [len(each) for each in losses.values()] == [2, 2, 2]
    is_same = loops.find_data(training).is_repeatable()
    assert is_same == (name not in {"cnn", "images"})
    job_table.check_losses(name, losses, is_same=is_same, dtype=None)
    if training.evaluate is not None:
        with torch.no_grad():
            found = training.evaluate(training.model)
        shares = found["accuracy"] if isinstance(found, dict) else found
        assert all(0 <= share <= 1 for share in shares)


def test_losses_that_differ_are_an_error_that_names_job_and_loop():
    check = partial(job_table.check_losses, "mlp", is_same=True)
    check({"stock": [2.0, 1.0], "fastamp": [2.0, 1.001]}, dtype=None)
    with pytest.raises(AssertionError, match="mlp, fastamp: Tensor-likes are not close"):
        check({"stock": [2.0, 1.0], "fastamp": [2.0, 1.01]}, dtype=None)
    check({"stock": [2.0, 1.0], "naive": [2.0, 1.01]}, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="mlp, naive"):
        check({"stock": [2.0, 1.0], "naive": [2.0, 1.2]}, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="cnn, naive"):
        job_table.check_losses(
            "cnn", {"stock": [2.0, 1.0], "naive": [2.0, 2.0]}, is_same=False, dtype=None
        )


def test_losses_of_a_users_task_that_differ_break_its_contract_in_one_line():
    check = partial(job_table.check_losses, "task.py:make", is_same=True, dtype=None)
    check({"stock": [2.0, 1.0], "fastamp": [2.0, 1.001]})
    with pytest.raises(
        BrokenTask, match="in the fastamp loop: does the task draw random numbers"
    ) as e:
        check({"stock": [2.0, 1.0], "fastamp": [2.0, 1.01]})
    assert "\n" not in str(e.value)


def test_all_loops_draw_the_same_numbers_of_pythons_generator(quick, monkeypatch):
    model, data, _, options = make_rows("cpu", 0)

    def loss(output, target):
        return nn.functional.mse_loss(output, target) * random.random()

    monkeypatch.setitem(JOBS, "drawing", lambda *_: (model, data, loss, options))
    found = job_table._measure("drawing", "cpu", 0)
    assert set(found.details["losses"]) > set(loops.ARMS)


def test_samples_that_are_no_numbers_need_only_a_collate_fn():
    loader = DataLoader(["a", "bc"] * 8, 4, collate_fn=lambda rows: torch.tensor([*map(len, rows)]))
    training = make_training(lambda *_: (nn.Linear(1, 1), loader, None), "cpu", 0)
    assert not loops.find_data(training).is_repeatable()


@pytest.mark.parametrize("command", ["jobs", "frameworks accelerate --task"])
def test_a_model_that_cannot_be_copied_is_one_line_and_status_2(command, tmp_path, capsys):
    pytest.importorskip("accelerate")
    path = tmp_path / "locked_model.py"
    path.write_text("""import threading
from torch import nn, ones
def make(device, seed):
    model = nn.Linear(1, 1)
    model.lock = threading.Lock()
    return model, (ones(64, 1), ones(64, 1)), nn.functional.mse_loss
""")
    assert main([*command.split(), f"{path}:make", "--device", "cpu"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"argument task: '{path}:make' breaks its contract: model: its copy for each arm" in line


def test_every_repair_has_a_loop_of_its_own_that_differs_in_that_part_alone():
    naive = loops.list_parts("naive")
    assert naive == dict.fromkeys(loops.PARTS, "naive")
    for part, known in loops.PARTS.items():
        for arm in known[1:]:
            parts = loops.list_parts(f"{part}: {arm}")
            assert {key: value for key, value in parts.items() if value != "naive"} == {part: arm}
    assert loops.list_parts("fastamp") == {
        **dict.fromkeys(loops.PARTS, "fastamp"),
        "precision": "stock",
    }


def test_each_loop_has_the_optimizer_that_people_give_it():
    training = make_training(make_rows, "cpu", 0)
    made = {arm: train(arm, training).optimizer for arm in loops.ARMS}
    assert {arm: each.param_groups[0]["fused"] for arm, each in made.items()} == {
        "naive": None,
        "stock": True,
        "fastamp": True,
    }
    rates = [0.1, 0.2]
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in rates]
    fused = loops.with_fused(torch.optim.SGD(groups, momentum=0.9), fused=True)
    assert [group["lr"] for group in fused.param_groups] == rates
    assert all(group["fused"] and group["momentum"] == 0.9 for group in fused.param_groups)
    plain = torch.optim.RMSprop(groups)
    assert loops.with_fused(plain, fused=True) is plain


@pytest.mark.parametrize("arm", [*loops.ARMS, "accelerate"])
def test_every_loop_clips_what_the_optimizer_holds_and_no_other_parameter(arm):
    model, data, loss, options = make_rows("cpu", 0)
    model = nn.Sequential(nn.Linear(3, 3), model)
    options |= {"max_norm": 1e-3}
    options["optimizer"] = lambda model: torch.optim.SGD(model[1].parameters(), lr=1.0)
    training = make_training(lambda *_: (model, data, loss, options), "cpu", 0)
    parts = loops.list_parts("stock" if arm == "accelerate" else arm)
    loop = loops.Loop(parts, training, "cpu", **WORKERS | {"steps": 1})
    if arm == "accelerate":
        pytest.importorskip(arm)
        with ExitStack() as closing:
            in_frameworks.FRAMEWORKS[arm](loop, closing)()
    else:
        loop.epoch()
    pairs = zip(loop.model.parameters(), model.parameters(), strict=True)
    moved = torch.cat([(new - old).detach().flatten() for new, old in pairs])
    assert moved.norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_fastamps_timer_counts_every_step():
    training = make_training(make_rows, "cpu", 0)
    loop = train("timing: fastamp", training, steps=5)
    assert loop.timer.summary()["step"].count == len(loop.losses) == 5


def test_a_loader_of_the_users_is_read_by_all_loops(quick, monkeypatch):
    seen = []

    def collate(samples):
        seen.append(len(samples))
        return default_collate(samples)

    model, data, loss, options = make_rows("cpu", 0)
    loader = DataLoader(data, 8, collate_fn=collate)
    training = make_training(lambda *_: (model, loader, loss, options), "cpu", 0)
    found = {arm: list(map(float, train(arm, training).losses)) for arm in loops.ARMS}
    assert set(seen) == {8}
    assert len(seen) >= 6
    job_table.check_losses("", found, is_same=True, dtype=None)
    batches = [tuple(data[:4]), tuple(data[4:8]), tuple(data[8:12])]
    monkeypatch.setitem(JOBS, "given", lambda *_: (model, iter_again(batches), loss, options))
    found = job_table._measure("given", "cpu", 0)
    assert not [arm for arm in found.repairs.arms if arm.startswith("loader")]


class iter_again:  # noqa: N801 - an iterable of batches without a length
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def test_the_table_has_a_row_for_each_job_and_each_repair(small, quick, tmp_path, capsys):
    path, page = tmp_path / "found.json", tmp_path / "page.html"
    words = ["jobs", "rl", "mlp", "--device", "cpu", "--json", str(path), "--report", str(page)]
    assert main(words) == 0
    found = json.loads(path.read_text())
    rows = [row["job"] for row in found["table"]]
    names = ["rl", "mlp"]
    assert rows == [*names, *(f"{name}: {part}" for name in names for part in loops.PARTS)]
    repairs = {f"{part}/{arm}" for part in ("loader", "step", "timing") for arm in loops.ARMS[1:]}
    assert {each["name"] for each in found["measurements"]} == {
        key
        for name in names
        for key in (
            f"speedup/{name}/fastamp",
            f"speedup/{name}/naive",
            *(f"over_naive/{name}/{arm}" for arm in {"stock", "fastamp"} | repairs),
            f"placebo/{name}",
            f"placebo/{name}, repairs",
        )
    }
    for name in names:
        assert len({len(losses) for losses in found["details"][name]["losses"].values()}) == 1
    judged = [each for each in found["measurements"] if each["verdict"]]
    assert [each["name"] for each in judged] == [f"speedup/{name}/fastamp" for name in names]
    assert all(row in page.read_text() for row in rows)
    assert "mlp (target >= 1.6x)" in capsys.readouterr().out.replace(
        judged[1]["text"].split(" (target")[0], "mlp"
    )


def test_a_job_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["jobs", "mlps"])
    assert exit_.value.code == 2
    assert "argument task: 'mlps' is none of gpt, mlp, tabular" in capsys.readouterr().err


def test_without_pillow_the_images_are_refused_before_any_work_and_no_default(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    monkeypatch.setattr(job_table, "_measure", None)
    for words in ("jobs mlp images", "loader --data collate photos"):
        with pytest.raises(SystemExit) as exit_:
            main(words.split())
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


def test_a_check_of_frameworks_that_are_not_installed_is_no_verdict(monkeypatch, capsys):
    monkeypatch.setitem(JOBS, "rows", make_rows)
    monkeypatch.setitem(sys.modules, "lightning", None)
    words = ["frameworks", "fabric", "--task", "rows", "--device", "cpu"]
    assert main([*words, "--check"]) == 3
    said = "fabric - (target >= 1x): n/a, not installed, pip install lightning\n"
    assert capsys.readouterr().out.count(said) == 1
    assert main(words) == 0


def test_an_agents_memory_ends_each_episode_where_the_pole_falls(small):
    _, data, *_ = networks.make_rl("cpu", 0)
    states, actions, returns = data.tensors
    assert len(states) > 16
    assert states[:, 2].abs().max() <= 0.21
    assert set(actions.flatten().tolist()) == {0, 1}
    assert 0 <= returns.min() < 1 < returns.max() < 1 / (1 - networks.DISCOUNT)


def test_the_digits_are_drawn_where_scikit_learn_is_missing(small, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    _, data, *_ = networks.make_mlp("cpu", 0)
    images, labels = data.tensors
    assert images.shape == (600, 784)
    assert images.std() > 0.2  # more than the noise
    assert set(labels.tolist()) == set(range(10))


@pytest.mark.cuda
def test_jobs_run_on_a_gpu(small, quick, tmp_path):
    path = tmp_path / "found.json"
    assert main(["jobs", "groups", "gpt", "--json", str(path)]) == 0
    assert "speedup/groups/fastamp" in {
        each["name"] for each in json.loads(path.read_text())["measurements"]
    }
