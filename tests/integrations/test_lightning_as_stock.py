"""The precision plugin trains every kind of module as Lightning's own does."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.trainers import (
    LOSS,
    MARKS,
    OVERFLOWS,
    SGD,
    batches,
    fit,
    make_model,
    make_module,
    make_plugin,
    pl,
)
from support.training import assert_same_but_for_rounding

import fastamp

__all__ = ["batches", "pl"]  # fixtures
pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning"),
]
LBFGS = partial(torch.optim.LBFGS, lr=0.1, max_iter=3)


class Sharp(torch.optim.SGD):
    """Sharpness-aware: takes a second gradient, away from where it updates."""

    @torch.no_grad()
    def step(self, closure):
        parameters = self.param_groups[0]["params"]
        with torch.enable_grad():
            loss = closure()
        moves = [0.05 * p.grad.sign() for p in parameters]
        torch._foreach_add_(parameters, moves)
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(parameters, moves)
        super().step()
        return loss


def run_the_closure_first(_self, _epoch, _batch_idx, optimizer, closure):
    closure()
    optimizer.step()


def step_every_second_time(_self, _epoch, batch_idx, optimizer, closure):
    optimizer.step(closure=closure) if batch_idx % 2 else closure()


def leave_out_the_second_batch(self, batch, batch_idx):
    return None if batch_idx == 1 else LOSS(self.model(batch[0]), batch[1])


def step_two_by_hand(self, batch, _batch_idx):
    """Optimize two halves of the model in turn, the second one with a closure."""
    first, second = self.optimizers()
    with first.toggle_model():
        self.manual_backward(LOSS(self.model(batch[0]), batch[1]))
        first.step()
        first.zero_grad()

    def closure():
        second.zero_grad()
        loss = LOSS(self.model(batch[0]), batch[1])
        self.manual_backward(loss)
        return loss

    with second.toggle_model():
        self.returned = [*getattr(self, "returned", ()), second.step(closure=closure)]


def configure_two(self):
    self.automatic_optimization = False
    return SGD(self.model[0].parameters()), SGD(self.model[2].parameters())


HALVES = {"training_step": step_two_by_hand, "configure_optimizers": configure_two}
BOTH, BF16 = ("16-mixed", "bf16-mixed"), ("bf16-mixed",)
UNSCALED = ("bf16-mixed", "32-true")
ACCUMULATE, CLIP = {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}
CASES = {
    "clipped": (BOTH, SGD, {}, CLIP),
    "by value": (BOTH, SGD, {}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "accumulated": (BOTH, SGD, {}, ACCUMULATE),
    "closure first": (BF16, SGD, {"optimizer_step": run_the_closure_first}, CLIP),
    "every second time": (BOTH, SGD, {"optimizer_step": step_every_second_time}, {}),
    "partly left out": (BOTH, SGD, {"training_step": leave_out_the_second_batch}, ACCUMULATE),
    "lbfgs clipped": (BF16, LBFGS, {}, CLIP),
    "second gradient": (UNSCALED, partial(Sharp, lr=0.1), {}, {}),
    "second gradient clipped": (BF16, partial(Sharp, lr=0.1), {}, CLIP),
    "by hand": (BOTH, SGD, HALVES, {}),
}
ROWS = [(name, precision) for name, case in CASES.items() for precision in case[0]]


def train(pl, case, plugin, batches):
    _, make_optimizer, members, options = CASES[case]
    module = make_module(pl, make_optimizer, scheduler=None, **members)
    if "configure_optimizers" in members:
        module.automatic_optimization = False
    trainer = fit(pl, module, batches, plugins=[plugin], **options)
    return module, trainer


@pytest.mark.parametrize(("case", "precision"), ROWS)
def test_it_trains_as_lightnings_own(pl, batches, monkeypatch, case, precision):
    finite = [batch for i, batch in enumerate(batches) if i not in OVERFLOWS][:4]
    scaler = None
    if precision == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    with monkeypatch.context() as patch:  # torch rounds the norm
        patch.setattr(torch.nn.utils, "clip_grad_norm_", fastamp.clip_grad_norm_)
        stock = pl.plugins.Precision()
        if precision != "32-true":
            stock = pl.plugins.MixedPrecision(precision, "cpu", scaler)
        expected, by_stock = train(pl, case, stock, finite)
    module, trainer = train(pl, case, make_plugin(precision), finite)
    assert_same_but_for_rounding(module.model.state_dict(), expected.model.state_dict())
    assert not torch.equal(module.model[0].weight, make_model()[0].weight)
    assert trainer.global_step == by_stock.global_step
    assert getattr(module, "returned", None) == getattr(expected, "returned", None)
    if module.scheduler:
        assert module.scheduler.last_epoch == expected.scheduler.last_epoch


def test_a_closure_run_by_the_module_is_refused_in_fp16(pl, batches):
    module = make_module(pl, SGD, optimizer_step=run_the_closure_first)
    with pytest.raises(RuntimeError, match="in fp16 call optimizer"):
        fit(pl, module, batches[:1], plugins=[make_plugin()])


def test_fabric_is_told_what_to_call():
    fabric = pytest.importorskip("lightning.fabric")
    made = fabric.Fabric(accelerator="cpu", devices=1, plugins=[make_plugin()])
    with pytest.raises(TypeError, match=r"in Fabric call fastamp\.optimizer_step or"):
        made.setup(make_model())
