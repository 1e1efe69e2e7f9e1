"""`fastamp.fine_tune` on real data, and step by step against hand-written loops."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import re
import sys
import time

import numpy as np
import pytest
import torch
from support.stream_model import Model
from support.trainable import make_data, make_model, run
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import fastamp
from fastamp import ModelCall, TrainConfig, fine_tune
from fastamp.train.batches import Batches


def test_a_step_makes_few_calls_of_python():
    """A loop by hand of the same parts makes some 58, most of them the model's and autograd's."""
    if "cpu" not in fastamp.backends():
        pytest.skip("needs the compiled core")
    names, n = [], itertools.count()

    def note(frame, event, _):
        if event == "call":
            names.append(frame.f_code.co_name)

    def loss_fn(output, target):
        place = next(n)
        if place in (20, 40):
            sys.setprofile(note if place == 20 else None)
        return functional.cross_entropy(output, target)

    layers = [torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 2))
    config = TrainConfig(epochs=1, batch_size=8, device="cpu", loss_fn=loss_fn, log_every=1000)
    fine_tune(model, make_data(8 * 50), config=config)
    assert len(names) <= 20 * 91


def digits():
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    return (x[:1500], y[:1500]), (x[1500:], y[1500:])


def classifier():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))


def test_it_is_the_loop_that_one_would_write(backend, device):
    """To the bit: fine_tune is fastamp's scaler, loader and torch's optimizer, and no more."""
    (x, y), (val_x, val_y) = digits()
    model = classifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1, fused=True)
    scaler = fastamp.GradScaler(device, enabled=False)
    losses, norms, total = [], [], 3 * math.ceil(1500 / 64)
    for epoch in range(3):
        data = fastamp.ArrayDataset(x, y)
        loader = fastamp.DataLoader(data, 64, shuffle=True, device=device, seed=7)
        loader.set_epoch(epoch)
        for inputs, target in loader:
            done = len(losses)
            part = (done - 5) / (total - 5)
            factor = (done + 1) / 5 if done < 5 else (1 + math.cos(math.pi * part)) / 2
            optimizer.param_groups[0]["lr"] = 2e-3 * factor
            with torch.autocast(device, dtype=torch.bfloat16):
                output = model(inputs)
            loss = functional.cross_entropy(output.float(), target)
            loss.backward()
            scaler.step(optimizer, max_norm=0.5)
            norms.append(scaler.last_step.norm.item())
            losses.append(loss.item())
            optimizer.zero_grad()
    ours = classifier()
    options = {"lr": 2e-3, "weight_decay": 0.1, "max_norm": 0.5, "warmup_steps": 5, "seed": 7}
    config = TrainConfig(epochs=3, batch_size=64, precision="bf16-mixed", device=device, **options)
    held_out = DataLoader(TensorDataset(val_x, val_y), len(val_x))
    result = fine_tune(ours, (x, y), held_out, config)
    assert result.train_loss.values.tolist() == losses
    with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
        output = model(val_x.to(device)).float()
    expected = functional.cross_entropy(output, val_y.to(device)).item()
    assert result.val_loss.values[-1] == pytest.approx(expected, rel=1e-12)
    assert result.grad_norm.values.tolist() == norms
    assert all(map(torch.equal, ours.parameters(), model.parameters()))


def overflow_at(module, calls):
    """Let the gradient of a module's weight hold an inf in some backward passes, from 1."""
    count = [0]

    def hook(grad):
        count[0] += 1
        if count[0] in calls:
            grad = grad.clone()
            grad.view(-1)[3] = math.inf
        return grad

    return module.weight.register_hook(hook)


@pytest.mark.parametrize("precision", ["16-mixed", "32-true"])
@pytest.mark.parametrize("optimizer", ["adamw", lambda p: torch.optim.SGD(p, 0.1)])
def test_an_overflow_is_logged_and_the_schedule_waits(precision, optimizer, backend, device):
    model, seen = make_model(), []
    handle = overflow_at(model[0], {1, 4})
    config = TrainConfig(
        max_steps=6,
        optimizer=optimizer,
        schedule="linear",
        precision=precision,
        device=device,
        log_every=1,
        tracker=fastamp.MetricsTracker(sinks=[seen.extend]),
    )
    result = fine_tune(model, make_data(), config=config)
    handle.remove()
    assert (result.steps, result.skipped_steps) == (6, 2)
    factors = result.lr.values / result.lr.values[0]
    assert factors * 6 == pytest.approx([6, 6, 5, 4, 4, 3])
    assert [step for name, step, _ in seen if name == "train/gradient_overflow"] == [1, 4]
    assert [v for name, _, v in seen if name == "train/skipped_steps"] == [1, 2]
    scales = [65536.0, 32768.0, 16384.0] if precision == "16-mixed" else []
    assert result.loss_scale.values.tolist() == scales
    assert np.isinf(result.grad_norm.values).tolist() == [True, False, False, True, False, False]
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_tracker_is_told_when_each_loss_was_computed():
    """Not when it was flushed, which is once, at the end."""
    seen, times_s = [], []

    def loss_fn(output, target):
        times_s.append(time.time())
        return functional.cross_entropy(output, target)

    tracker = fastamp.MetricsTracker(sinks=[seen.extend])
    config = TrainConfig(max_steps=4, loss_fn=loss_fn, log_every=100, tracker=tracker)
    fine_tune(make_model(), make_data(), config=config)
    found = [scalar.time_s for scalar in seen if scalar[0] == "train/loss"]
    assert len(found) == 4
    assert sorted([*times_s, *found]) == [*itertools.chain(*zip(times_s, found, strict=True))]


def test_everything_is_left_as_it_was_found(tmp_path):
    model = make_model()
    model[1].eval()
    random_before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    modes = []

    def loss_fn(output, target):
        modes.append((torch.is_grad_enabled(), model.training, model[1].training))
        return functional.cross_entropy(output, target)

    run(model=model, max_steps=2, eval_every=1, accumulate=1, loss_fn=loss_fn)
    training, evaluating = (True, True, False), (False, False, False)
    assert modes == [training, *[evaluating] * 3] * 2
    assert [module.training for module in model] == [True, False, True]
    assert torch.equal(torch.get_rng_state(), random_before[0])
    assert np.random.get_state()[1].tolist() == random_before[1]  # noqa: NPY002
    assert all(p.grad is None for p in model.parameters())
    model.eval()
    run(model=model, max_steps=1)
    assert not any(module.training for module in model)


def test_gradients_from_before_are_dropped():
    fresh, used = make_model(), make_model()
    used(make_data()[0]).sum().backward()
    for model in (fresh, used):
        run(model=model, max_steps=1, precision="32-true")
    assert all(map(torch.equal, fresh.parameters(), used.parameters()))


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "adagrad"])
def test_optimizers_are_torchs_and_adams_are_fused(name, monkeypatch):
    made, kind = [], torch.optim.Optimizer
    init = kind.__init__
    monkeypatch.setattr(kind, "__init__", lambda *args: made.append(args) or init(*args))
    run(optimizer=name, max_steps=2, weight_decay=0.03)
    ((optimizer, _, defaults),) = made
    is_fused = True if name.startswith("adam") else None
    assert (type(optimizer).__name__.lower(), defaults["fused"]) == (name, is_fused)
    assert defaults["weight_decay"] == 0.03


def test_a_compiled_model_is_trained_as_the_plain_one():
    compiled, plain = make_model(), make_model()
    for model in (torch.compile(compiled, backend="eager"), plain):
        fine_tune(model, make_data(), config=TrainConfig(max_steps=2))
    assert all(map(torch.equal, compiled.parameters(), plain.parameters()))


def test_evaluations_come_when_they_are_due():
    val = make_data(30)
    for fields, steps in [({}, [12, 24]), ({"eval_every": 5}, [5, 10, 15, 20, 24])]:
        model = make_model()
        result = fine_tune(model, make_data(), val, TrainConfig(epochs=2, batch_size=8, **fields))
        assert result.val_loss.steps.tolist() == steps
        model.eval()
        expected = functional.cross_entropy(model(val[0]), val[1]).item()
        assert result.val_loss.values[-1] == pytest.approx(expected, rel=1e-6)  # of batches of 8


def test_the_result_is_bounded_and_pickles():
    data = (torch.randn(4200, 1), torch.randn(4200, 1))
    config = TrainConfig(batch_size=1, log_every=1000, epochs=1)
    held_out = tuple(column[:50] for column in data)
    result = fine_tune(torch.nn.Linear(1, 1), data, held_out, config)
    assert (result.steps, len(result.train_loss.steps)) == (4200, 2101)
    assert re.match(r"4200 steps in 32-true, 0 skipped\ntrain_loss: \d\S+ to", str(result))
    assert str(pickle.loads(pickle.dumps(result))) == result.summary()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_size": 0}, "batch_size: expected int above 0, got 0"),
        ({"max_steps": 1.5}, "max_steps: expected int or None above 0, got 1.5"),
        ({"lr": "fast"}, "lr: expected float above 0, got 'fast'"),
        ({"max_norm": 0}, "max_norm: expected float or None above 0, got 0"),
        ({"weight_decay": -1}, "weight_decay: expected float of at least 0, got -1"),
        ({"optimizer": "lion"}, "one of adamw, adam, sgd, adagrad or a callable, got 'lion'"),
        ({"schedule": "step"}, "schedule: expected one of cosine, linear, constant, got 'step'"),
        ({"precision": "bf16-true"}, "precision: expected one of .*bf16-mixed, got 'bf16-true'"),
        ({"loss_fn": max, "model_call": ModelCall()}, "loss_fn: expected None beside"),
        ({"model_call": ModelCall}, "model_call: expected ModelCall or None, got <class"),
        ({"resume": "no"}, "resume: expected bool, got 'no'"),
        (
            {"checkpoint_every": 3},
            "checkpoint_every: expected a checkpoint_dir beside it, got None",
        ),
        ({"metric": "auc"}, "metric: expected 'loss' without evaluate, got 'auc'"),
        ({"metric": "auc", "evaluate": max, "patience": 1}, "mode: .* metric='auc', got None"),
        ({"seed": 2**63}, "seed: expected int of at least 0, got 9223372036854775808"),
        ({"epochs": np.bool_(1)}, "epochs: expected int above 0, got True"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(fields, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**fields)


@pytest.mark.parametrize("kind", [TrainConfig, fastamp.TrainResult])
def test_help_describes_every_field(kind):
    described = re.findall(r"^        (\w+): ", kind.__doc__, re.MULTILINE)
    assert described == [*kind.__dataclass_fields__]


def test_numpys_numbers_are_pythons():
    given = {"lr": 0.5, "max_norm": 2.0, "epochs": 2, "precision": 32, "use_amp": False}
    kinds = np.float32, np.int32, np.int64, np.int16, np.bool_
    numpys = {name: kind(given[name]) for name, kind in zip(given, kinds, strict=True)}
    config = TrainConfig(**numpys)
    assert config == TrainConfig(**given)
    assert [type(getattr(config, name)) for name in given] == [*map(type, given.values())]


class Weighted(torch.nn.Module):
    """A loss with a learned factor of each class."""

    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(2))

    def forward(self, output, target):
        return functional.cross_entropy(self.factor * output, target)


def test_the_parameters_of_a_loss_are_trained_saved_and_resumed(tmp_path):
    ends, fields = [], {"schedule": "constant", "precision": "32-true"}
    for folder, max_steps in ((None, 8), (tmp_path, 4), (tmp_path, 8)):
        loss = Weighted()
        run(folder, loss_fn=loss.forward if folder else loss, max_steps=max_steps, **fields)
        ends.append(loss.factor.tolist())
    assert ends[0] == ends[2] != ends[1] != [1.0, 1.0]


def test_a_loss_of_the_models_own_is_trained_once(tmp_path):
    model = make_model()
    model[0].loss = Weighted()
    run(tmp_path, model=model, loss_fn=model[0].loss.forward, max_steps=2, precision="32-true")
    assert (model[0].loss.factor != 1).any()
    assert "loss_fn" not in torch.load(tmp_path / "step-00000002.pt", weights_only=True)


@pytest.mark.parametrize(
    ("data", "fields", "error", "message"),
    [
        (7, {}, TypeError, "train_data: expected a Dataset, tensors, .* got int"),
        ([], {}, ValueError, "train_data: the list has no sample"),
        ((torch.ones(4, 2), torch.ones(3)), {}, ValueError, r"train_data\[1\]: has 3 rows"),
        (DataLoader([1], 2, drop_last=True), {}, ValueError, "the DataLoader has no batch"),
        (make_data(8), {"loss_fn": torch.nn.MSELoss}, TypeError, r"loss_fn: .* MSELoss\(\)"),
        (iter([make_data(8)]), {"epochs": 2}, ValueError, "an iterator can be read only once"),
        (iter([]), {"schedule": "cosine"}, ValueError, "schedule: 'cosine' needs max_steps"),
        ((torch.ones(8, 8), torch.ones(8)), {}, ValueError, r"output \(8, 2\), target \(8,\) of"),
        ({"x": torch.ones(4, 8), "y": [0] * 4}, {}, TypeError, r"train_data\['y'\].* got int"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(data, fields, error, message):
    model = make_model()
    with pytest.raises(error, match=message):
        fine_tune(model, data, config=TrainConfig(**{"schedule": "constant", **fields}))
    with pytest.raises(ValueError, match="model: expected a parameter that requires a gradient"):
        fine_tune(torch.nn.Dropout(), make_data())
    with pytest.raises(ValueError, match="val_data: the Tensor has no sample"):
        fine_tune(model, make_data(), torch.ones(0, 8))


def test_an_optimizer_of_other_parameters_is_refused():
    model = make_model()
    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), 0.1)
    with pytest.raises(ValueError, match="optimizer: expected a callable that"):
        run(model=model, optimizer=lambda _: optimizer)
    some = torch.optim.SGD(model[2].parameters(), 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    run(model=model, precision="32-true", optimizer=lambda _: some)
    assert [*map(torch.equal, model.parameters(), before)] == [True, True, False, False]


def test_a_batch_from_a_gpu_has_arrived_when_it_is_trained_on_the_cpu():
    model = Model(0)
    with model.installed():
        batch = torch.empty(4, 2, device="cuda:0").fill_(1.0)
        config = TrainConfig(device="cpu")
        loader = DataLoader([batch], batch_size=None)
        ((moved, n),) = Batches("train_data", loader, config, shuffle=False)
        assert (moved.sum().item(), n) == (8.0, 4)
    assert model.found == []
