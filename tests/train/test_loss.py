"""A loss that has parameters: they are trained and saved with the model."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.trainable import CrashError, crash, make_data, make_model, outcome, run
from torch.nn import functional

import fastamp
from fastamp import ModelCall


class Weighted(torch.nn.Module):
    """Cross entropy with a learned factor of each class; it may end a run."""

    def __init__(self, crash_at=0):
        super().__init__()
        self.factor, self.calls, self.crash_at = torch.nn.Parameter(torch.ones(2)), 0, crash_at

    def forward(self, output, target):
        self.calls += torch.is_grad_enabled()
        if self.calls == self.crash_at:
            crash()
        return functional.cross_entropy(self.factor * output, target)


WAYS = {
    "loss_fn": lambda loss: {"loss_fn": loss},
    "a method": lambda loss: {"loss_fn": loss.forward},
    "model_call": lambda loss: {"loss_fn": None, "model_call": ModelCall(loss)},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_parameters_of_a_loss_are_trained_saved_and_resumed(way, tmp_path):
    ends = []
    for folder, crash_at in ((None, 0), (tmp_path, 10), (tmp_path, 0)):
        loss = Weighted(crash_at)
        fields = {"max_steps": 8, "checkpoint_every": 2, **WAYS[way](loss)}
        if crash_at:
            with pytest.raises(CrashError):
                run(folder, **fields)
        else:
            ends.append(([*outcome(*run(folder, **fields))], loss.factor.tolist()))
    assert ends[0] == ends[1]
    assert ends[0][1] != [1.0, 1.0]


def test_a_loss_is_trained_as_by_hand():
    model, loss = make_model()[:1], Weighted()
    parameters = [*model.parameters(), *loss.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    x, y = make_data(8)
    loss(model(x)[:, :2], y).backward()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    optimizer.step()
    ours, trained = make_model()[:1], Weighted()
    result = fastamp.fine_tune(
        torch.nn.Sequential(*ours, Cut()),
        (x, y),
        config=fastamp.TrainConfig(
            loss_fn=trained,
            max_norm=0.5,
            max_steps=1,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ),
    )
    assert result.grad_norm.values.tolist() == pytest.approx([norm.item()])
    torch.testing.assert_close(trained.factor, loss.factor)
    torch.testing.assert_close(ours[0].weight, model[0].weight)


class Cut(torch.nn.Module):
    def forward(self, x):
        return x[:, :2]


def test_a_loss_that_is_a_method_of_the_model_is_not_trained_twice(tmp_path):
    class WithLoss(torch.nn.Sequential):
        def loss(self, output, target):
            return functional.cross_entropy(output, target)

    model = WithLoss(*make_model())
    run(tmp_path, model=model, max_steps=2, loss_fn=model.loss)
    state = torch.load(tmp_path / "step-00000002.pt", weights_only=True)
    assert "loss_fn" not in state


def call(loss, output, target):
    """Call a loss in a way that does not tell which module it is."""
    return loss(output, target)


def test_parameters_that_no_checkpoint_would_hold_are_refused(tmp_path):
    loss = Weighted()

    def optimizer(parameters):
        return torch.optim.SGD([*parameters, *loss.parameters()], 0.1)

    fields = {"optimizer": optimizer, "loss_fn": partial(call, loss), "max_steps": 2}
    with pytest.raises(ValueError, match="optimizer: expected parameters of the model or"):
        run(tmp_path, **fields)
