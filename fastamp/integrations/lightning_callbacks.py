"""Callbacks for Lightning's Trainer that log what the steps found, and the precision to W&B.

Lightning's package is `lightning.pytorch`, or `pytorch_lightning`, its older name. Both have the
same names and unrelated classes, so a process works with one of them.
"""

import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fastamp.metrics import MetricsTracker
from fastamp.metrics.sinks import Scalar, require
from fastamp.step import GradScaler

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
EVENTS = ("train/loss_scale", "train/gradient_overflow", "train/skipped_steps")


def _import_lightning() -> Any:
    """Import the package that the program imported first, else the one that is installed."""
    imported = [name for name in list(sys.modules) if name in PACKAGES]
    installed = [name for name in PACKAGES if find_spec(name.partition(".")[0])]
    return require([*imported, *installed, *PACKAGES][0], "lightning")


pl = _import_lightning()


class AmpCallback(pl.Callback):  # type: ignore[misc, name-defined]
    """Log overflows, the loss scale, norms and the throughput to the loggers of a Trainer.

    - When it changes: "train/loss_scale".
    - At every overflow: "train/gradient_overflow" and "train/skipped_steps".
    - Every `log_every_n_steps` batches: "train/batches_per_s", "train/samples_per_s" if a batch
      holds tensors, and "train/grad_norm", the last finite one.

    Only every `log_every_n_steps` batches does the callback wait for the device and call the
    loggers. The scaler counts steps: batches that a module leaves out have no number.

    Example:
        >>> import lightning.pytorch as pl
        >>> options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        >>> trainer = pl.Trainer(callbacks=[AmpCallback()], **options)
    """

    tracker: MetricsTracker
    """Holds what was logged; made when training starts."""
    _start_s = 0.0

    def on_train_start(self, trainer: Any, _module: Any) -> None:
        """Watch the scaler."""
        self.tracker = MetricsTracker(sinks=[partial(_log, trainer.loggers)])
        if isinstance(trainer.scaler, GradScaler):
            self.tracker.watch(trainer.scaler, first_step=trainer.global_step)
        self._n_batches, self._n_samples, self._start_s = 0, 0, time.perf_counter()

    def on_train_batch_end(
        self, trainer: Any, _module: Any, _outputs: Any, batch: Any, _batch_idx: int
    ) -> None:
        """Count, and log every `log_every_n_steps` batches."""
        self._n_samples += _count_samples(batch)
        self._n_batches += 1
        if self._n_batches == trainer.log_every_n_steps:
            step, now_s = max(trainer.global_step - 1, 0), time.perf_counter()
            for name, count in (("batches", self._n_batches), ("samples", self._n_samples)):
                if count:
                    rate = count / (now_s - self._start_s)
                    self.tracker.log_scalar(f"train/{name}_per_s", rate, step)
            # The wait for the device counts towards the next batches.
            self._n_batches, self._n_samples, self._start_s = 0, 0, now_s
            self.tracker.flush()

    def on_validation_start(self, *_: Any) -> None:
        """Stop the clock."""
        self._paused_s = time.perf_counter()

    def on_validation_end(self, *_: Any) -> None:
        """Restart the clock."""
        self._start_s += time.perf_counter() - self._paused_s

    def on_train_end(self, *_: Any) -> None:
        """Log the rest, also after an exception."""
        if hasattr(self, "tracker"):
            self.tracker.close()

    on_exception = on_train_end


def _count_samples(batch: Any) -> int:
    """Return the length of a batch's first tensor that has one, else 0."""
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    return next((len(x) for x in leaves if isinstance(x, torch.Tensor) and x.ndim), 0)


def _log(loggers: Iterable[Any], scalars: list[Scalar]) -> None:
    """Pass every event, and the last finite value of everything else, to Lightning's loggers.

    An overflow is an event; its norm, inf or NaN, would spoil a logger's curve.
    """
    scalars = [scalar for scalar in scalars if math.isfinite(scalar[2])]
    last = {name: step for name, step, _ in scalars}
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    for name, step, value in scalars:
        if name in EVENTS or step == last[name]:
            rows[step][name] = value
    for step, row in sorted(rows.items()):
        for logger in loggers:
            logger.log_metrics(row, step=step)


class AmpWandbCallback(pl.Callback):  # type: ignore[misc, name-defined]
    """Log a Trainer's precision to W&B at the end of every training epoch.

    "amp/precision" is its name, as "16-mixed"; "amp/enabled" whether it is mixed; "amp/loss_scale"
    the scaler's scale, None without scaling. Without an active run nothing is logged.
    `AmpCallback` logs every change of the scale with its step.

    Example:
        >>> import lightning.pytorch as pl
        >>> options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        >>> trainer = pl.Trainer(callbacks=[AmpWandbCallback()], **options)
    """

    def on_train_epoch_end(self, trainer: Any, _module: Any) -> None:
        """Log one row."""
        run = getattr(sys.modules.get("wandb"), "run", None)
        if run is None:
            return
        precision, scaler = str(trainer.precision), trainer.scaler
        is_scaling = scaler is not None and scaler.is_enabled()
        is_mixed = precision in {"16", "bf16"} or "mixed" in precision
        scale = scaler.get_scale() if is_scaling else None
        run.log({"amp/precision": precision, "amp/enabled": is_mixed, "amp/loss_scale": scale})
