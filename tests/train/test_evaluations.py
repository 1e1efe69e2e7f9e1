"""Metrics of one's own, and runs that end early by them."""

from __future__ import annotations

import math

import pytest
import torch
from support.trainable import make_data

from fastamp import TrainConfig, fine_tune

N, FOLDS, EPOCHS = 60, 3, 12


def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))


def auc(model, x, y):
    """Return the share of pairs of a positive and a negative that the model orders rightly."""
    scores = model(x)[:, 1] - model(x)[:, 0]
    return (scores[y == 1, None] > scores[None, y == 0]).double().mean().item()


def fold(k):
    """Return a fold's data to train on and to evaluate on."""
    x, y = make_data(N)
    held_out = torch.arange(N) % FOLDS == k
    y = (x[:, 0] > 0).long()
    return (x[~held_out], y[~held_out]), (x[held_out], y[held_out])


def by_hand(k, patience):
    """Train with torch alone, in full batches, and return the AUC after each epoch."""
    (x, y), held_out = fold(k)
    model, found = make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(EPOCHS):
        model.train()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            found.append(auc(model, *held_out))
        best = found.index(max(found))
        if len(found) - 1 - best >= patience:
            break
    return found


def by_fine_tune(k, folder=None, **fields):
    data, held_out = fold(k)
    dataset = torch.utils.data.TensorDataset(*data)
    settings = {"epochs": EPOCHS, "max_norm": None, "schedule": "constant", "metric": "auc"}
    settings |= {"optimizer": lambda p: torch.optim.SGD(p, lr=0.05), "mode": "max"}
    settings |= {"evaluate": lambda model: {"auc": auc(model, *held_out)}}
    settings |= {"checkpoint_dir": folder, "device": "cpu"}
    loader = torch.utils.data.DataLoader(dataset, len(dataset))
    return fine_tune(make_model(), loader, config=TrainConfig(**(settings | fields)))


def test_folds_with_auc_and_early_stopping_are_those_written_by_hand():
    lengths = set()
    for k in range(FOLDS):
        expected = by_hand(k, 2)
        result = by_fine_tune(k, patience=2)
        assert result.metrics["auc"].values.tolist() == expected
        assert (result.steps, result.skipped_steps) == (len(expected), 0)
        assert len(result.grad_norm.steps) == 0
        lengths.add(len(expected))
    assert min(lengths) < EPOCHS


def test_patience_is_resumed_and_a_run_that_it_ended_has_finished(tmp_path):
    numbers = [0.5, 0.7, 0.6, 0.7, 0.9, 0.9]
    seen = []

    def evaluate(_):
        seen.append(numbers[len(seen)])
        return {"auc": seen[-1]}

    by_fine_tune(0, tmp_path, epochs=3, evaluate=evaluate, patience=2)
    result = by_fine_tune(0, tmp_path, evaluate=evaluate, patience=2)
    assert result.metrics["auc"].values.tolist() == numbers[:4]
    with pytest.raises(ValueError, match=r"at step 4 of 12: more patience resumes, another"):
        by_fine_tune(0, tmp_path, evaluate=evaluate, patience=2)


@pytest.mark.parametrize(("mode", "best"), [("min", 1), ("max", 2)])
def test_the_best_checkpoint_is_that_of_the_metric(mode, best, tmp_path):
    numbers = iter([0.1, 0.3, 0.2, math.nan])
    fields = {"evaluate": lambda _: {"auc": next(numbers)}, "mode": mode}
    result = by_fine_tune(0, tmp_path, epochs=4, keep=9, keep_best=True, **fields)
    assert result.best_checkpoint == tmp_path / f"step-{best:08}.pt"


@pytest.mark.parametrize(("metric", "mode", "best"), [("auc", "max", 1), ("loss", None, 0)])
@pytest.mark.parametrize(("has_folder", "keeps"), [(False, True), (True, True), (False, False)])
def test_the_model_has_the_best_weights_at_the_end(metric, mode, best, has_folder, keeps, tmp_path):
    numbers, weights = iter([0.1, 0.3, 0.2]), []

    def evaluate(model):
        weights.append([tensor.clone() for tensor in model.state_dict().values()])
        return {metric: next(numbers)}

    model, (data, _) = make_model(), fold(0)
    fields = {"keep_best": keeps, "patience": 3, "metric": metric, "mode": mode}
    fields |= {"evaluate": evaluate, "checkpoint_dir": tmp_path if has_folder else None}
    result = fine_tune(model, data, data, config=TrainConfig(device="cpu", **fields))
    assert f"{metric}: 0.1 to 0.2, min 0.1, max 0.3" in str(result)
    assert str(result).endswith(f"\nbest: step-0000000{2 * best + 2}") == has_folder
    expected, other = (weights[best], weights[2]) if keeps else (weights[2], weights[best])
    assert all(map(torch.equal, model.state_dict().values(), expected))
    assert not any(map(torch.equal, model.state_dict().values(), other))


def test_a_callback_sees_each_evaluation_and_ends_the_run():
    seen = []

    def look(step, numbers):
        seen.append((step, sorted(numbers)))
        return step == 4

    def evaluate(model):
        in_float32 = model(data[0]).dtype != torch.bfloat16
        return {"training": model.training, "grad": torch.is_grad_enabled(), "wide": in_float32}

    data, held_out = fold(0)
    config = {"batch_size": 8, "eval_every": 2, "on_evaluation": look, "evaluate": evaluate}
    config |= {"precision": "bf16-mixed", "device": "cpu"}
    result = fine_tune(make_model(), data, held_out, TrainConfig(**config))
    assert seen == [(step, ["grad", "loss", "training", "wide"]) for step in (2, 4)]
    assert result.steps == 4
    assert not any(curve.values.any() for curve in result.metrics.values())


def test_a_metric_that_nobody_computes_is_refused():
    for returned in (1.0, {"auc": "b"}):
        with pytest.raises(TypeError, match=f"evaluate: expected named numbers, .* got {returned}"):
            by_fine_tune(0, evaluate=lambda _, returned=returned: returned)
    with pytest.raises(ValueError, match="metric: expected one of auc, got 'f1'"):
        by_fine_tune(0, metric="f1", patience=1)
    for name, value in {"patience": 1, "keep_best": True}.items():
        with pytest.raises(ValueError, match="keep_best, patience: expected val_data, whose"):
            by_fine_tune(0, metric="loss", **{name: value})
