"""Lightning: the precision plugin and the module, in its Trainer."""

from __future__ import annotations

import copy
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from support.processes import run_python
from support.trainers import (
    FUSED,
    LOSS,
    MARKS,
    N_BATCHES,
    OVERFLOWS,
    SGD,
    Recorder,
    batches,
    fit,
    logged,
    make_model,
    make_module,
    make_plugin,
    make_scaler,
    pl,
    train_by_hand,
)
from support.training import assert_same_bits

from fastamp.step import StepReport

pytest.importorskip("lightning.pytorch")

from fastamp.integrations.lightning import AmpCallback, AmpPrecision, to_lightning_module

__all__ = ["batches", "pl"]  # fixtures
pytestmark = MARKS


DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16, "32-true": None}


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize(("make_optimizer", "accumulate"), [(FUSED, 1), (SGD, 5)])
def test_a_trainer_trains_as_the_loop_written_by_hand(
    pl, batches, precision, make_optimizer, accumulate
):
    dtype = DTYPES[precision]
    expected, scaler, schedule, _ = train_by_hand(batches, dtype, make_optimizer, accumulate)
    module, plugin = make_module(pl, make_optimizer), make_plugin(precision)
    options = {"gradient_clip_val": 0.1, "accumulate_grad_batches": accumulate}
    fit(pl, module, batches, plugins=[plugin], **options)
    assert_same_bits(module.model.state_dict(), expected.state_dict())
    assert plugin.scaler.state_dict() == scaler.state_dict()
    assert plugin.scaler.skipped_steps == scaler.skipped_steps == 2
    assert module.scheduler.get_last_lr() == schedule.get_last_lr()


@pytest.mark.parametrize("algorithm", [None, "norm", "value"])
def test_bf16_skips_whatever_is_clipped(pl, batches, algorithm):
    def overflow(self):
        if self.trainer.global_step == 1:
            self.model[0].weight.grad[0, 0] = math.inf  # which clipping to a value would hide

    module, plugin = make_module(pl, on_after_backward=overflow), make_plugin("bf16-mixed")
    options = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": algorithm} if algorithm else {}
    fit(pl, module, batches[:3], plugins=[plugin], **options)
    assert plugin.scaler.skipped_steps == 1
    assert all(p.isfinite().all() for p in module.parameters())


def test_hooks_before_the_step_see_unscaled_gradients(pl, batches):
    scaled, seen = [], []
    hooks = {
        "on_after_backward": lambda self: scaled.append(self.model[0].bias.grad.clone()),
        "on_before_optimizer_step": lambda self, _: seen.append(self.model[0].bias.grad.clone()),
    }
    fit(pl, make_module(pl, **hooks), batches[:2], plugins=[make_plugin()], gradient_clip_val=0.1)
    assert_same_bits(seen, [grad / 1024 for grad in scaled])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("by_hand", [True, False])
def test_what_comes_between_clip_and_step_sees_clipped_gradients(pl, batches, by_hand, precision):
    found = []

    def clip(self, optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm"):
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        found.append(torch.nn.utils.get_total_norm(p.grad for p in self.parameters()).item())
        for parameter in self.parameters():
            parameter.grad += 0.5

    def step_by_hand(self, batch, _):
        optimizer = self.optimizers()
        self.manual_backward(LOSS(self.model(batch[0]), batch[1]))
        clip(self, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    members = {"training_step": step_by_hand} if by_hand else {"configure_gradient_clipping": clip}
    trained = []
    for options in ({"precision": precision}, {"plugins": [make_plugin(precision)]}):
        module = make_module(pl, SGD, **members)
        module.automatic_optimization = not by_hand
        fit(pl, module, batches[:3], **options, **({} if by_hand else {"gradient_clip_val": 0.1}))
        trained.append(module.model.state_dict())
    assert found == pytest.approx([0.1] * 6, rel=1e-4)
    torch.testing.assert_close(*trained)


def test_a_scheduler_of_epochs_goes_on_and_one_of_steps_waits(pl, batches):
    made, stepped = {}, []

    def configure_optimizers(self):
        optimizer = FUSED(self.parameters())
        for interval in ("step", "epoch"):
            made[interval] = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": made[name], "interval": name} for name in made]

    def lr_scheduler_step(self, scheduler, metric):
        stepped.append(scheduler)
        scheduler.step()

    members = {"lr_scheduler_step": lr_scheduler_step, "configure_optimizers": configure_optimizers}
    data = [*batches[4:], *batches[:4]]  # the last step is skipped, too
    trainer = fit(pl, make_module(pl, **members), data, plugins=[make_plugin()])
    assert {name: each.last_epoch for name, each in made.items()} == {
        "step": N_BATCHES - len(OVERFLOWS),
        "epoch": 1,
    }
    assert len(stepped) == N_BATCHES - 1
    assert "update_lr_schedulers" not in vars(trainer.fit_loop.epoch_loop)


def test_without_such_a_scheduler_nothing_waits_for_the_step(pl, batches, monkeypatch):
    monkeypatch.setattr(StepReport, "skipped", property(lambda _: pytest.fail("it was read")))
    fit(pl, make_module(pl, interval=None), batches[:2], plugins=[make_plugin()])


def test_checkpoints_of_lightnings_own_plugin_go_on(pl, batches, tmp_path):
    path = tmp_path / "run.ckpt"
    stock = pl.plugins.MixedPrecision("16-mixed", "cpu", make_scaler())
    trainer = fit(pl, make_module(pl, SGD), batches, plugins=[stock])
    trainer.save_checkpoint(path)
    plugin = AmpPrecision("16-mixed", "cpu")
    module = make_module(pl, SGD, None)
    recorder = Recorder(pl)
    options = {"callbacks": AmpCallback(), "logger": recorder, "log_every_n_steps": 1}
    fit(pl, module, batches[:1], plugins=[plugin], max_epochs=2, ckpt_path=path, **options)
    assert logged(recorder, "train/loss_scale") == [(N_BATCHES, stock.scaler.get_scale())]
    assert stock.scaler.get_scale() != 65536.0


def test_what_cannot_work_is_refused(pl, batches):
    with pytest.raises(TypeError, match=r"scaler: expected a fastamp.GradScaler, got <torch"):
        AmpPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match=r"precision: .*'32-true'.*, got '64-true'"):
        AmpPrecision("64-true", "cpu")
    strategy = object.__new__(pl.strategies.DeepSpeedStrategy)
    module = SimpleNamespace(trainer=SimpleNamespace(strategy=strategy))
    with pytest.raises(TypeError, match="DeepSpeedStrategy scales by itself: use Trainer"):
        make_plugin().convert_module(module)
    module = make_module(pl, torch.optim.LBFGS, None)
    with pytest.raises(Exception, match="AMP and the LBFGS optimizer are not compatible"):
        fit(pl, module, batches, plugins=[make_plugin()])


OLDER_NAME = """
import logging, math, warnings
import pytorch_lightning as pl
import torch
from fastamp.integrations.lightning import AmpCallback, AmpPrecision, to_lightning_module

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
plugin, log = AmpPrecision("16-mixed", "cpu"), AmpCallback()
batches = [(torch.full((8, 4), x), torch.arange(8) % 2) for x in (1.0, math.inf, 2.0)]
quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
options = {"accelerator": "cpu", "max_epochs": 1, "gradient_clip_val": 0.1}
trainer = pl.Trainer(plugins=[plugin], callbacks=[log], **options, **dict.fromkeys(quiet, False))
loader = torch.utils.data.DataLoader(batches, batch_size=None)
trainer.fit(to_lightning_module(torch.nn.Linear(4, 2)), loader)
print(plugin.scaler.skipped_steps, log.tracker.history("train/skipped_steps")[0])
"""


def test_the_package_that_the_program_imported_first_is_taken():
    pytest.importorskip("pytorch_lightning")
    result = run_python(OLDER_NAME)
    assert result.stdout.strip() == "1 [1]", result.stderr


def test_plugins_modules_and_callbacks_are_pickled_and_copied_while_they_train(pl, batches):
    copies, callback, plugin = [], AmpCallback(), make_plugin()

    class Exports(pl.Callback):
        def on_train_batch_end(self, _trainer, module, *_):
            for made in (module, callback):
                copies.extend([pickle.loads(pickle.dumps(made)), copy.deepcopy(made)])

    module = to_lightning_module(make_model(), optimizer=FUSED)
    callbacks = [callback, Exports()]
    fit(pl, module, batches[:1], val=batches[:1], plugins=[plugin], callbacks=callbacks)
    for again in copies[:2]:
        assert_same_bits(again.state_dict(), module.state_dict())
    for again, other in zip(copies[2:], (pickle.loads(pickle.dumps(plugin)), plugin), strict=True):
        fit(pl, make_module(pl), batches, plugins=[copy.deepcopy(other)], callbacks=[again])
        assert again.tracker.history("train/skipped_steps")[1][-1] == len(OVERFLOWS)


def test_any_model_is_adapted(pl, batches):
    finite = [batch for i, batch in enumerate(batches) if i not in OVERFLOWS]
    recorder = Recorder(pl)
    module = to_lightning_module(make_model(), optimizer=FUSED)
    assert isinstance(module, pl.LightningModule)
    options = {"logger": recorder, "log_every_n_steps": 1, "max_epochs": 3, "val": finite}
    fit(pl, module, finite, plugins=[make_plugin()], **options)
    for name in ("train/loss", "val/loss"):
        losses = [value for _, value in logged(recorder, name)]
        assert losses[-1] < 0.9 * losses[0]
    module = to_lightning_module(make_model(), loss_fn=lambda out, _: out.mean())
    module.log = lambda *_: None
    assert torch.equal(module.training_step(batches[0], 0), module(batches[0][0]).mean())


def test_without_lightning_an_error_names_the_extra():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['lightning', 'pytorch_lightning']))\n"
        "from fastamp.integrations import wandb\n"
        "for made in ('lightning import AmpCallback', 'wandb import AmpWandbCallback'):\n"
        "    try: exec(f'from fastamp.integrations.{made}')\n"
        "    except ImportError as error: print(error)\n"
    )
    result = run_python(code)
    assert result.stdout.count("pip install 'fastamp[lightning]'") == 2, result.stderr
