"""Checkpoints of a loop of one's own: to the bit, refused whole, written before a signal."""

from __future__ import annotations

import copy
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from support.streams import Stream
from support.trainable import CrashError, Loop, crash, make_model, names
from torch.utils.data import DataLoader

import fastamp


def crash_at(step):
    return lambda now: crash() if now == step else None


@pytest.fixture(scope="module")
def expected():
    return Loop(None).run()


def test_a_loop_that_crashed_again_and_again_comes_to_the_bit_to_the_same(expected, tmp_path):
    """In an epoch of 12 steps, after its last one, and in the next one; what is drawn counts."""
    for step in (2, 6, 13, 14, 20):
        with pytest.raises(CrashError):
            Loop(tmp_path).run(every=2, at_step=crash_at(step))
        assert names(tmp_path)[-1:] == [f"step-{(step - 1) // 2 * 2:08d}.pt"] * (step > 2)
        random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002 - of another program
    assert Loop(tmp_path).run(every=2) == expected
    assert names(tmp_path) == [f"step-{step:08d}.pt" for step in (16, 18, 20)]
    assert Loop(tmp_path).run(every=2) == expected  # it has ended, and stays


class InFloat32(torch.optim.Optimizer):
    """Keeps float32 means of bfloat16 parameters, as Adafactor does, in containers."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                mean = state.setdefault("means", [{"of": parameter.grad.float() * 0}])[0]["of"]
                mean.lerp_(parameter.grad.float(), 0.1)
                parameter.sub_((self.param_groups[0]["lr"] * mean).bfloat16())


@pytest.mark.parametrize("name", ["optimizer", "another"])
def test_float32_states_of_bfloat16_parameters_resume_to_the_bit(name, tmp_path):
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()

    def train(folder, start, stop):
        model = make_model().bfloat16().eval()
        optimizer = InFloat32(model.parameters(), 0.5)
        checkpointer = fastamp.Checkpointer(folder, model=model, **{name: optimizer})
        assert (checkpointer.restore() or 0) == start
        for _ in range(start, stop):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        checkpointer.save(stop)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    train(tmp_path / "parts", 0, 5)
    parts = train(tmp_path / "parts", 5, 9)
    assert torch.equal(parts, train(tmp_path / "whole", 0, 9))


def snapshot(loop):
    numpy = np.random.get_state()[1].tobytes()  # noqa: NPY002 - the program's
    states = copy.deepcopy([part.state_dict() for part in loop.parts.values()])
    leaves = [*torch.utils._pytree.tree_leaves(states), torch.get_rng_state()]
    kept = [x.numpy().tobytes() if isinstance(x, torch.Tensor) else x for x in leaves]
    return kept, numpy, random.getstate()


OTHERS = {
    r"its mean is another one: missing keys: module\.0\.\w+, .*; unexpected keys: module\.2": {
        "mean": torch.optim.swa_utils.AveragedModel(torch.nn.Sequential(torch.nn.BatchNorm1d(1)))
    },
    r"it has 0\.weight='torch\.float32 \[16, 8\]', this run 'torch\.float32 \[9, 8\]'": {
        "model": torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))
    },
    r"it has 0\.weight='torch\.float32 \[16, 8\]', this run 'torch\.bfloat16 \[16, 8\]'": {
        "model": make_model().bfloat16()
    },
    "it has optimizer='AdamW', this run 'SGD'": {
        "optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    },
    r"it also has scaler: give it too, or restore\(only=\('model',\)\)": {"scaler": None},
    r"it has no another: restore\(only=\.\.\.\) names": {"another": torch.nn.Linear(1, 1)},
    "it has scheduler='CosineAnnealingLR', this run 'StepLR'": {
        "scheduler": torch.optim.lr_scheduler.StepLR(
            torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), 1
        )
    },
    "it has best='min', this run 'max'": {"best": "max"},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    loop = Loop(folder, best="min")
    loop.run(steps=5)
    loop.checkpointer.save(5, metric=1.0)
    loop.run(steps=6)
    return folder


@pytest.mark.parametrize("problem", OTHERS)
def test_what_is_whole_and_of_another_loop_is_refused_before_anything_changes(problem, finished):
    loop = Loop(finished, **OTHERS[problem])
    before = snapshot(loop)
    with pytest.raises(fastamp.CheckpointError, match=rf"06\.pt: {problem}") as raised:
        loop.checkpointer.restore()
    assert str(raised.value).endswith("; another folder starts anew")
    assert snapshot(loop) == before


def test_another_loader_refuses_its_state_before_anything_changes(finished):
    rows = torch.utils.data.TensorDataset(torch.ones(5))
    loop = Loop(finished, loader=fastamp.DataLoader(rows, 8, shuffle=True))
    before = snapshot(loop)
    with pytest.raises(ValueError, match=r"06\.pt: loader: state: its length is 96"):
        loop.checkpointer.restore()
    assert snapshot(loop) == before


def test_a_part_is_asked_before_anything_changes(tmp_path):
    class Picky(Meter):
        def check_state_dict(self, state):
            msg = f"no {state['value']}"
            raise ValueError(msg)

    model = make_model()
    fastamp.Checkpointer(tmp_path, model=model, meter=Picky()).save(1)
    before = model[0].weight.clone()
    torch.nn.init.zeros_(model[0].weight)
    with pytest.raises(fastamp.CheckpointError, match=r"01\.pt: no 0\.5; another folder"):
        fastamp.Checkpointer(tmp_path, model=model, meter=Picky()).restore()
    assert not model[0].weight.equal(before)


@pytest.mark.parametrize("name", ["optimizer", "another"])
def test_layers_that_have_changed_places_are_told_by_their_names(name, tmp_path):
    """torch gives each moment to the parameter at its place."""

    class Pair(torch.nn.Module):
        def __init__(self, *names):
            super().__init__()
            for each in names:
                setattr(self, each, torch.nn.Linear(2, 2, bias=False))

    def checkpointer_of(model):
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        return fastamp.Checkpointer(tmp_path, model=model, **{name: optimizer})

    checkpointer_of(Pair("a", "b")).save(1)
    problem = r"it has \w+\[0\]='model.a.weight', this run 'model.b.weight'"
    with pytest.raises(fastamp.CheckpointError, match=problem):
        checkpointer_of(Pair("b", "a")).restore()


def test_weights_are_taken_out_of_any_run(finished):
    loop, model = Loop(finished), make_model()
    loop.checkpointer.restore()
    torch.nn.init.zeros_(model[0].weight)
    before, checkpointer = torch.get_rng_state(), fastamp.Checkpointer(finished, model=model)
    assert checkpointer.restore(only=("model",)) == 6
    assert torch.equal(model[0].weight, loop.model[0].weight)
    assert torch.equal(torch.get_rng_state(), before)
    for only in (["modell"], "model"):
        with pytest.raises(ValueError, match=r"only: expected .*, such as only=\('model',\), got"):
            checkpointer.restore(only=only)


def test_a_part_can_be_added_to_a_run(finished):
    loop = Loop(finished, another=torch.nn.Linear(1, 1))
    torch.nn.init.zeros_(loop.model[0].weight)
    others = [*loop.parts, "rng"]
    assert loop.checkpointer.restore(only=others) == 6
    assert loop.model[0].weight.any()
    drawn = torch.rand(1)
    Loop(finished).checkpointer.restore()
    assert torch.equal(torch.rand(1), drawn)


def test_a_folder_that_may_only_be_read_is_restored_and_nothing_is_written(finished, tmp_path):
    folder = tmp_path / "missing"
    assert Loop(folder).checkpointer.restore() is None
    assert not folder.exists()
    before = names(finished), finished.stat().st_mtime_ns
    assert Loop(finished).checkpointer.restore() == 6
    assert (names(finished), finished.stat().st_mtime_ns) == before


@pytest.mark.parametrize("framework", ["accelerate", "fabric"])
def test_an_optimizer_that_a_framework_has_wrapped_is_the_one_inside(framework, tmp_path):
    model = make_model()
    inside = torch.optim.AdamW(model.parameters())
    if framework == "accelerate":
        accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
        wrapped = accelerator.prepare(inside)
    else:
        fabric = pytest.importorskip("lightning.fabric")
        fabric = fabric.Fabric(accelerator="cpu", devices=1)
        _, wrapped = fabric.setup(torch.nn.Linear(1, 1), torch.optim.AdamW(model.parameters()))
    fastamp.Checkpointer(tmp_path, model=model, optimizer=wrapped).save(1)
    assert fastamp.Checkpointer(tmp_path, model=model, optimizer=inside).restore() == 1


def test_the_best_one_is_kept_and_can_be_restored(tmp_path):
    loop, metrics = Loop(tmp_path, keep=1, best="min"), [5.0, 3.0, float("nan"), 4.0, None]
    weights = []
    for step, metric in enumerate(metrics, 1):
        torch.nn.init.constant_(loop.model[0].weight, step)
        loop.checkpointer.save(step, metric=None if metric is None else torch.tensor(metric))
        weights.append(loop.model[0].weight.clone())
    assert names(tmp_path) == ["step-00000002.pt", "step-00000005.pt"]
    again = Loop(tmp_path, keep=1, best="min")
    assert again.checkpointer.restore() == 5
    assert again.checkpointer.restore(best=True) == 2
    assert torch.equal(again.model[0].weight, weights[1])
    again.checkpointer.save(3, metric=3.5)
    assert names(tmp_path) == ["step-00000002.pt", "step-00000003.pt"]
    again.checkpointer.save(4, metric=-1)
    assert names(tmp_path) == ["step-00000004.pt"]
    Loop(tmp_path / "none").checkpointer.save(1)
    with pytest.raises(fastamp.CheckpointError, match="best: there is none until step 1: no save"):
        Loop(tmp_path / "none").checkpointer.restore(best=True)


def test_the_best_is_not_forgotten_by_a_run_that_asks_for_none(tmp_path):
    first = Loop(tmp_path, keep=1, best="max").checkpointer
    first.save(1, metric=2.0)
    first.save(2, metric=1.0)
    other = Loop(tmp_path, keep=1).checkpointer
    assert other.best_path is None
    other.restore()
    other.save(3)
    assert other.best_path == tmp_path / "step-00000001.pt"
    again = Loop(tmp_path, keep=1, best="max").checkpointer
    again.restore()
    again.save(4, metric=1.5)
    assert names(tmp_path) == ["step-00000001.pt", "step-00000004.pt"]
    with pytest.raises(fastamp.CheckpointError, match="it has best='max', this run 'min'"):
        Loop(tmp_path, best="min").checkpointer.restore()


def test_a_checkpoint_of_a_later_step_is_not_overtaken(tmp_path):
    first = Loop(tmp_path)
    first.checkpointer.save(6)
    for loop in (first, Loop(tmp_path)):
        with pytest.raises(ValueError, match=rf"step: {tmp_path} has step 6 already, got 3: r"):
            loop.checkpointer.save(3)
    assert names(tmp_path) == ["step-00000006.pt"]


class Meter:
    """A part of the user's own."""

    value = 0.5

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Frozen(torch.nn.Sequential):
    """A frozen model with an adapter, of which the state holds only the adapter."""

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return {name: tensor for name, tensor in state.items() if name.startswith("1.")}


def test_a_model_whose_state_leaves_out_parameters_is_refused_at_the_start(tmp_path):
    model = Frozen(make_model().requires_grad_(False), torch.nn.Linear(2, 2))
    text = r"model: expected no parameter left out of its state_dict, got \['0\.0\.weight', "
    with pytest.raises(ValueError, match=text):
        fastamp.Checkpointer(tmp_path, model=model)


UNREAD = [np.zeros(3), np.float64(1), {"best": Path("a path")}, {np.int64(1): 2}]
NOT_PICKLED = [lambda: 0, threading.Lock()]


@pytest.mark.parametrize("value", UNREAD + NOT_PICKLED, ids=lambda value: type(value).__name__)
def test_what_could_not_be_read_again_is_refused_at_the_save_where_it_appears(value, tmp_path):
    meter = Meter()
    checkpointer = fastamp.Checkpointer(tmp_path, model=make_model(), meter=meter, keep=1)
    checkpointer.save(1)
    meter.value = value
    is_pickled = any(value is one for one in UNREAD)
    problem = "nothing is saved: " + ("it holds an object of" if is_pickled else ".*pickle")
    with pytest.raises(fastamp.CheckpointError, match=problem):
        checkpointer.save(2)
    assert names(tmp_path) == ["step-00000001.pt"]
    assert checkpointer.restore() == 1
    assert meter.value == 0.5
    checkpointer.save(2)
    assert names(tmp_path) == ["step-00000002.pt"]


def test_a_models_versions_are_kept(tmp_path):
    """A module that migrates older states would migrate its own."""
    model = torch.nn.BatchNorm1d(2)
    fastamp.Checkpointer(tmp_path, model=model).save(1)
    state = torch.load(tmp_path / "step-00000001.pt", weights_only=True)["model"]
    assert state._metadata == model.state_dict()._metadata


def test_compiled_and_wrapped_models_have_the_keys_of_the_model_inside(tmp_path):
    model = make_model()
    fastamp.Checkpointer(tmp_path, model=torch.compile(model, backend="eager")).save(1)
    other = torch.nn.Sequential(*make_model())
    torch.nn.init.zeros_(other[0].weight)
    assert fastamp.Checkpointer(tmp_path, model=other).restore() == 1
    assert torch.equal(other[0].weight, model[0].weight)


WRONG_STEPS = [(-1, None, "step: .*0, got -1"), (1, 0, "every: .*1, got 0")]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"model": torch.optim.SGD([torch.ones(1)])}, TypeError, "model: expected a module, got"),
        ({"optimizer": 5}, TypeError, "optimizer: expected state_dict and"),
        ({"loader": DataLoader([1])}, TypeError, "loader: .* torchdata's StatefulDataLoader, got"),
        ({"rng": make_model()}, ValueError, "rng: expected another name"),
        ({"keep": 0}, ValueError, "keep: expected an integer of at least 1, got 0"),
        ({"best": "loss"}, ValueError, "best: expected None, 'min' or 'max', got 'loss'"),
        ({"best": []}, ValueError, "best: expected None, 'min' or 'max', got "),
        ({"folder": None}, TypeError, "NoneType"),
        ({"folder": "s3://a/b"}, ValueError, "folder: expected a path of a .*, got 's3://a/b'"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_wrong_arguments_are_refused_by_name(options, error, text, tmp_path):
    with pytest.raises(error, match=text):
        fastamp.Checkpointer(**({"folder": tmp_path / "run", "model": make_model()} | options))
    assert names(tmp_path) == []
    checkpointer = fastamp.Checkpointer(tmp_path, model=make_model())
    for step, every, problem in WRONG_STEPS:
        with pytest.raises(ValueError, match=problem):
            checkpointer.save(step, every=every)
    assert names(tmp_path) == []


def test_a_stream_that_workers_read_is_refused_at_the_start(tmp_path):
    loader = fastamp.DataLoader(Stream([torch.zeros(2)]), 1, num_workers=1)
    with pytest.raises(TypeError, match="torchdata's StatefulDataLoader"):
        fastamp.Checkpointer(tmp_path, model=make_model(), loader=loader)
    config = fastamp.TrainConfig(epochs=1, checkpoint_dir=tmp_path, schedule="constant")
    with pytest.raises(TypeError, match="torchdata's StatefulDataLoader"):
        fastamp.fine_tune(make_model(), loader, config=config)
