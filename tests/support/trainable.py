"""A tiny run with all that a checkpoint has to keep, for tests and the processes they kill."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import fastamp

CURVES = ("train_loss", "val_loss", "grad_norm", "loss_scale", "lr")
SCALARS = ("train/loss", "val/loss", "train/grad_norm", "train/loss_scale", "train/lr")


class CrashError(Exception):
    pass


def crash():
    raise CrashError


def names(folder):
    """Name what is in a folder."""
    return sorted(path.name for path in Path(folder).iterdir())


def make_data(n=96):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 8, generator=generator)
    return x, (x.sum(dim=1) > 0).long()


def make_model():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = [torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2)]
        return torch.nn.Sequential(*layers)


def loud(output, target):
    """A loss whose gradients overflow until the loss scale has come down."""
    return 1000 * torch.nn.functional.cross_entropy(output, target)


def act_at(step, action, loss_fn=loud, *, accumulate=2):
    """Return a loss that does something in a step, and how often it was called in training."""
    calls = [0]

    def loss(output, target):
        if torch.is_grad_enabled():
            calls[0] += 1
            if calls[0] == (step - 1) * accumulate + 1:
                action()
        return loss_fn(output, target)

    return loss


def run(folder=None, data=None, model=None, held_out=None, **fields):
    """Train with a live scaler that overflows at first, dropout, accumulation and a schedule."""
    settings = {"max_steps": 40, "batch_size": 8, "accumulate": 2, "warmup_steps": 5, "lr": 0.01}
    settings |= {"precision": "16-mixed", "checkpoint_every": 3, "checkpoint_dir": folder}
    settings |= {"progress": False}
    settings |= {} if "loss_fn" in fields else {"loss_fn": loud}
    fields |= {} if folder else {"checkpoint_every": None}
    config = fastamp.TrainConfig(**(settings | fields))
    model = make_model() if model is None else model
    data = make_data() if data is None else data
    held_out = make_data(20) if held_out is None else held_out
    has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    shared = torch.nn.parallel.DistributedDataParallel(model) if has_ranks else model
    return model, fastamp.fine_tune(shared, data, held_out, config)


def outcome_of_finished(folder, fields):
    """Return the outcome of a run, from its newest checkpoint if it has finished before."""
    model = make_model()
    try:
        return outcome(*run(folder, model=model, **fields))
    except ValueError as error:
        if "nothing is left to train" not in str(error):
            raise
    state = torch.load(max(Path(folder).glob("step-*.pt")), weights_only=True)
    tracker = fastamp.MetricsTracker()
    tracker.load_state_dict(state["tracker"])
    curves = {name: tracker.history(scalar) for name, scalar in zip(CURVES, SCALARS, strict=True)}
    skipped = int(tracker.summary()["train/skipped_steps"].last)
    counts = {"steps": state["step"], "skipped_steps": skipped}
    return outcome(model, SimpleNamespace(**curves, **counts))


class Loop:
    """A loop of one's own: a live scaler that overflows at first, dropout, averages, a schedule."""

    def __init__(self, folder, **options):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)  # noqa: NPY002 - what it draws from
        self.model = make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.scaler = fastamp.GradScaler("cpu", growth_interval=3)
        dataset = torch.utils.data.TensorDataset(*make_data())
        self.loader = fastamp.DataLoader(dataset, 8, shuffle=True)
        self.mean = torch.optim.swa_utils.AveragedModel(self.model)
        self.parts = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "loader": self.loader,
            "scheduler": self.scheduler,
            "mean": self.mean,
        }
        self.checkpointer = None
        if folder is not None:
            self.checkpointer = fastamp.Checkpointer(folder, **(self.parts | options))

    def run(self, steps=20, every=3, at_step=lambda _: None):
        """Train to the end, from where the newest checkpoint is; `at_step` is called in a step."""
        if self.checkpointer is None:
            for _ in self._steps(0, steps, at_step):
                pass
            return self.outcome()
        step = self.checkpointer.restore() or 0
        with self.checkpointer.on_signal():
            for done in self._steps(step, steps, at_step):
                self.checkpointer.save(done, every=every)
        return self.outcome()

    def _steps(self, step, steps, at_step):
        while step < steps:
            for x, y in self.loader:
                at_step(step + 1)
                noise = random.random() + np.random.rand()  # noqa: NPY002 - the program's
                with torch.autocast("cpu", torch.float16):
                    loss = loud(self.model(x + noise), y)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer, max_norm=1.0)
                self.scaler.update()
                if not self.scaler.last_step.skipped:
                    self.scheduler.step()
                self.optimizer.zero_grad()
                self.mean.update_parameters(self.model)
                step += 1
                yield step
                if step == steps:
                    break

    def outcome(self):
        """Return all that two loops must have in common to the bit."""
        states = [part.state_dict() for name, part in self.parts.items() if name != "loader"]
        leaves = [*torch.utils._pytree.tree_leaves(states), *torch.rand(2), random.random()]
        return [x.numpy().tobytes() if isinstance(x, torch.Tensor) else x for x in leaves]


def outcome(model, result):
    """Return all that two runs must have in common to the bit."""
    weights = [tensor.numpy().tobytes() for tensor in model.state_dict().values()]
    curves = [part.tobytes() for name in CURVES for part in getattr(result, name)]
    return [*weights, *curves, result.steps, result.skipped_steps]


def newest(folder):
    """Return the step of the newest checkpoint."""
    return max((int(p.stem[5:]) for p in folder.glob("step-*.pt")), default=0)
