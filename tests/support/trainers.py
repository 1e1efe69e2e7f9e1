"""Lightning's Trainers, and batches that overflow, for the integrations' tests."""

from __future__ import annotations

import logging
import math
from functools import partial

import pytest
import torch

import fastamp

MARKS = [
    # Lightning 2.6 asks torch 2.13's pytree in the way of torch 2.6, and wants workers
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
]
N_BATCHES, OVERFLOWS = 12, (3, 7)
LOSS = torch.nn.functional.cross_entropy
FUSED = partial(torch.optim.AdamW, lr=1e-2, fused=True)
SGD = partial(torch.optim.SGD, lr=1e-2)


@pytest.fixture
def pl():
    """Return Lightning, without its Trainers' messages about the hardware."""
    package = pytest.importorskip("lightning.pytorch")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    return package


@pytest.fixture(scope="module")
def batches():
    """Return batches of which some make gradients that are not finite, and a finite loss."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(N_BATCHES, 8, 16, generator=generator)
    inputs[OVERFLOWS, 0, 0] = math.inf
    return list(zip(inputs, torch.randint(4, (N_BATCHES, 8), generator=generator), strict=True))


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))


def make_scaler():
    return fastamp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)


def train_by_hand(batches, dtype, make_optimizer=FUSED, accumulate=1):
    """Train with one call of fastamp's for each step; in fp16 with a scaler, in None in FP32."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = make_scaler() if dtype is torch.float16 else fastamp.GradScaler("cpu", enabled=False)
    norms = []
    for i, (x, y) in enumerate(batches):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = LOSS(model(x), y) / accumulate
        scaler.scale(loss).backward()
        if (i + 1) % accumulate == 0 or i + 1 == len(batches):
            scaler.step(optimizer, max_norm=0.1, zero_grad=True)
            scaler.update()
            norms.append(scaler.last_step.norm.item())
            if not scaler.last_step.skipped:
                schedule.step()
    return model, scaler, schedule, norms


def make_plugin(precision="16-mixed"):
    from fastamp.integrations.lightning import AmpPrecision

    scaler = make_scaler() if precision == "16-mixed" else None
    return AmpPrecision(precision, "cpu", scaler)


def make_module(pl, make_optimizer=FUSED, interval="step", **members):
    """Make a module whose class has the given members too."""

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model()

        def training_step(self, batch, _batch_idx):
            return LOSS(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            optimizer = make_optimizer(self.parameters())
            if interval is None:
                return optimizer
            self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            config = {"scheduler": self.scheduler, "interval": interval}
            return {"optimizer": optimizer, "lr_scheduler": config}

    for name, member in members.items():
        setattr(Module, name, member)
    return Module()


def fit(pl, module, batches, *, ckpt_path=None, val=None, **options):
    quiet = dict.fromkeys(["enable_progress_bar", "enable_model_summary"], False)
    defaults = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "devices": 1}
    trainer = pl.Trainer(accelerator="cpu", **{**quiet, **defaults, **options})
    loaders = [
        data and torch.utils.data.DataLoader(data, batch_size=None) for data in (batches, val)
    ]
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return trainer


class Recorder:
    """What a logger was told, in the shape of Lightning's."""

    def __new__(cls, pl):
        def log_metrics(self, metrics, step):
            self.rows.append((step, dict(metrics)))

        members = {"name": "recorder", "version": 0, "log_metrics": log_metrics}
        members["log_hyperparams"] = lambda *_: None
        recorder = type("Recorder", (pl.loggers.logger.Logger,), members)()
        recorder.rows = []
        return recorder


def logged(recorder, name):
    return [(step, row[name]) for step, row in recorder.rows if name in row]
