"""The arms of a task: each precision by torch and by fastamp, each with a task of its own."""

from __future__ import annotations

import argparse
import itertools

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

import fastamp
from fastamp.bench import environment, measure, tasks, trainer
from fastamp.bench.trainer import Arm, Trainer, list_arms

HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset
loss = nn.functional.cross_entropy
def data():
    return TensorDataset(torch.randn(64, 4), torch.arange(64) % 3)
"""


@pytest.fixture
def task(tmp_path):
    """Return a function that writes a task's file and returns its name."""
    count = itertools.count()

    def write(text, name="make"):
        path = tmp_path / f"arms_{next(count)}_{tmp_path.name}.py"
        path.write_text(HEAD + text)
        return f"{path}:{name}"

    return write


def run_losses(task, *, is_ours, steps=3, precision="fp32"):
    """Return the losses of an arm."""
    runner = Trainer(Arm(name="x", task=task, is_ours=is_ours, precision=precision))
    runner.steps = steps
    runner.prepare()
    runner.visit()
    return [loss.item() for loss in runner.losses]


@pytest.mark.parametrize(
    ("features", "precisions"), [({"amx_bf16"}, ["fp32", "bf16"]), (set(), ["fp32"])]
)
def test_a_cpu_has_the_precisions_that_it_has_units_for(features, precisions, monkeypatch):
    monkeypatch.setattr(environment, "cpu_features", lambda: features)
    assert trainer.choose_precisions("cpu") == precisions
    found = list_arms("x", precisions, [("mine", "y")])
    pairs = [f"{who} {p}" for p in precisions for who in ("torch", "fastamp")]
    assert [arm.name for arm in found] == [*pairs, "mine"]
    assert [arm.is_ours for arm in found[:2]] == [False, True]
    assert (found[-1].task, found[-1].precision, found[-1].is_ours) == ("y", precisions[-1], False)


def test_an_arm_is_named_beside_its_task(task):
    place = task("def make(*_): pass")
    assert trainer.read_arm(f"mine={place}") == ("mine", place)
    for text in (place, "=x.py", "fp32=x.py", "mine="):
        with pytest.raises(argparse.ArgumentTypeError, match=r"is not NAME=FILE\.py:make"):
            trainer.read_arm(text)


def test_the_users_sampler_and_workers_are_those_of_both_arms():
    def begin(_):
        """Is called in each worker."""

    data = TensorDataset(torch.arange(512))
    chosen = SubsetRandomSampler([*range(99)])
    options = {"num_workers": 1, "worker_init_fn": begin, "collate_fn": list, "drop_last": True}
    theirs = DataLoader(data, 8, sampler=chosen, **options)
    ours = tasks.with_fastamp(theirs, "cpu")
    assert isinstance(ours, fastamp.DataLoader)
    for name in ("dataset", "batch_size", "sampler", *options):
        assert getattr(ours, name) is getattr(theirs, name)
    rows = [
        row.item()
        for batch in tasks.with_fastamp(DataLoader(data, 8, sampler=chosen), "cpu")
        for row in batch[0]
    ]
    assert sorted(rows) == [*range(99)]
    batches = [[3, 1], [2]]
    by_batch = tasks.with_fastamp(DataLoader(data, batch_sampler=batches), "cpu")
    assert [batch[0].tolist() for batch in by_batch] == batches


def test_a_stream_and_other_batches_have_their_own_loader():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(6))

    ours = tasks.with_fastamp(DataLoader(Stream(), 4), "cpu")
    assert [batch.tolist() for batch in ours] == [[0, 1, 2, 3], [4, 5]]
    batches = [[1], [2]]
    assert tasks.with_fastamp(batches, "cpu") is batches
    own = fastamp.DataLoader([1, 2], 2)
    assert tasks.with_fastamp(own, "cuda") is own


def test_a_loss_that_refers_to_the_model_is_that_of_its_own_arm(task):
    text = """
def make(device, seed):
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    def penalized(output, target):
        return loss(output, target) + sum(p.abs().sum() for p in model.parameters())
    return model, data(), penalized, {"batch_size": 16}
"""
    place = task(text)
    theirs, ours = (run_losses(place, is_ours=is_ours) for is_ours in (False, True))
    assert ours == pytest.approx(theirs, rel=1e-5)
    training = tasks.make_training(tasks.find_make(place), "cpu", 0)
    optimizer, by_hand = tasks.make_optimizers(training)[0], []
    for x, y in itertools.islice(tasks.make_loader(training, 0, device="cpu"), 3):
        optimizer.zero_grad()
        found = training.loss(training.model(x), y)
        found.backward()
        optimizer.step()
        by_hand.append(found.item())
    assert theirs == pytest.approx(by_hand, rel=1e-5)


def test_what_an_arm_sets_for_the_process_is_in_force_in_that_arm_alone(task):
    text = """
def make(device, seed):
    def look(output, target):
        torch.seen = torch.is_anomaly_enabled(), torch.get_num_threads()
        return loss(output, target)
    return nn.Linear(4, 3), data(), look
def slow(device, seed):
    torch.autograd.set_detect_anomaly(True)
    torch.set_num_threads(1)
    return make(device, seed)
"""
    place, before = task(text), (torch.is_anomaly_enabled(), torch.get_num_threads())
    torch.set_num_threads(2)
    plain = Trainer(Arm(name="plain", task=place))
    slow = Trainer(Arm(name="slow", task=place.replace(":make", ":slow")))
    try:
        for runner, wanted in ((slow, (True, 1)), (plain, (False, 2)), (slow, (True, 1))):
            runner.visit()
            assert torch.seen == wanted
            assert (torch.is_anomaly_enabled(), torch.get_num_threads()) == (False, 2)
    finally:
        torch.set_num_threads(before[1])
        del torch.seen


def test_a_precision_in_which_the_model_fails_is_left_out_and_fp32_is_not(task):
    text = """
class Only(nn.Linear):
    def forward(self, x):
        output = super().forward(x)
        assert output.dtype == torch.float32, "half is not for me"
        return output
def make(device, seed):
    return Only(4, 3), data(), loss
def broken(device, seed):
    return nn.Linear(5, 3), data(), loss
def right(device, seed):
    return nn.Linear(4, 3), data(), loss
"""
    place = task(text)
    own = [("mine", place.replace(":make", ":right"))]
    found = measure.race_task(list_arms(place, ["fp32", "bf16"], own), 8)
    assert found.race.arms == ["torch fp32", "fastamp fp32", "mine"]
    assert found.arms[-1].base == "torch fp32"
    assert {*found.left_out} == {"torch bf16", "fastamp bf16"}
    assert "AssertionError: half is not for me" in found.left_out["torch bf16"]
    broken = place.replace(":make", ":broken")
    with pytest.raises(tasks.BrokenTask, match="model: its call on a batch"):
        measure.race_task(list_arms(broken, ["fp32"]), 8)
    with pytest.raises(tasks.BrokenTask, match="--arm mine: model: its call on a batch"):
        measure.race_task(list_arms(place, ["fp32"], [("mine", broken)]), 8)


def test_arms_that_do_not_fit_beside_the_others_are_left_out_and_told_why(task):
    text = """
count = []
def make(device, seed):
    count.append(1)
    def full(output, target):
        if len(count) > 2:
            raise MemoryError("none is left")
        return loss(output, target)
    return nn.Linear(4, 3), data(), full
"""
    found = measure._begin(list_arms(task(text), ["fp32", "bf16"]))
    assert [*found[0]] == ["torch fp32", "fastamp fp32"]
    assert found[1]["torch bf16"].startswith("batch_size: a step does not fit into memory; loss:")


def test_a_task_is_made_once_for_each_arm_of_a_build_and_its_noise_is_raced_as_it_is(task):
    text = """
torch.made = []
class Noisy(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.randn(4), i % 3
def make(device, seed):
    torch.made.append(seed)
    return nn.Linear(4, 3), Noisy(), loss
"""
    found = measure.race_task(list_arms(task(text), ["fp32"]), 8)
    assert [len(curve) for curve in found.losses.values()] == [8, 8]
    assert torch.made == [0] * 2 * 3  # arms, builds
    del torch.made


def test_both_arms_draw_the_same_numbers_and_have_the_same_losses(task):
    text = """
def make(device, seed):
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 3))
    return model, DataLoader(data(), 16, shuffle=True), loss, {"max_norm": 0.1}
"""
    made = task(text)
    pair = [Trainer(Arm(name="x", task=made, is_ours=is_ours)) for is_ours in (False, True)]
    for _ in range(9):
        for runner in pair:
            runner.prepare()
            runner.visit()
    theirs, ours = ([loss.item() for loss in runner.losses] for runner in pair)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert len({*theirs}) == 9


def test_an_evaluate_without_an_accuracy_gives_a_loss(task):
    options = '{"evaluate": lambda _: {"loss": 2.5}}'
    text = f"def make(*_): return nn.Linear(4, 3), data(), loss, {options}"
    score = Trainer(Arm(name="x", task=task(text))).evaluate()
    assert score.loss == 2.5
    assert score.accuracy != score.accuracy  # it is NaN


def test_the_main_job_is_one_model_by_name_and_by_default():
    model, *_ = tasks.find_make("gpt")("cpu", 0)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(11.2, abs=0.1)
