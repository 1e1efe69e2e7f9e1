"""Weights & Biases: a sink for the tracker, and a Lightning callback that logs the precision."""

import sys
from collections import defaultdict
from typing import Any

from fastamp.integrations.of_lightning import OfLightning
from fastamp.metrics.sinks import Scalar, require

__all__ = ["AmpWandbCallback", "WandbSink"]

STEP = "fastamp/step"


class WandbSink:
    """Log the scalars of a `fastamp.MetricsTracker` to a run of W&B, one row for each step.

    Charts have the tracker's steps on the x axis: the column "fastamp/step". W&B's own step is not
    set, so that the loop may log too, and late values are kept.

    Args:
        run: from `wandb.init`; None is the active run.

    Raises:
        ImportError: W&B is not installed; it comes with the extra `wandb`.
        ValueError: no run is active.

    Example:
        >>> import wandb
        >>> tracker = fastamp.MetricsTracker(sinks=[WandbSink(wandb.init(mode="disabled"))])
        >>> tracker.log_scalar("train/loss", 2.5, 0)
        >>> tracker.close()
    """

    def __init__(self, run: Any = None) -> None:
        self._run = run or require("wandb", "wandb").run
        if self._run is None:
            msg = "run: no run of W&B is active; call wandb.init first"
            raise ValueError(msg)
        self._run.define_metric(STEP)
        self._known: set[str] = set()

    def __call__(self, scalars: list[Scalar]) -> None:
        """Log a batch of (name, step, value)."""
        rows: dict[int, dict[str, float]] = defaultdict(dict)
        for name, step, value in scalars:
            rows[step][name] = value
            if name not in self._known:
                self._known.add(name)
                if name and "*" not in name:  # W&B cannot define these: they get its own steps
                    self._run.define_metric(name, step_metric=STEP)
        for step, row in rows.items():
            self._run.log({STEP: step, **row})


class AmpWandbCallback(OfLightning):
    """Log a Trainer's precision to W&B at the end of every training epoch.

    "amp/precision" is its name, as "16-mixed"; "amp/enabled" whether it is mixed; "amp/loss_scale"
    the scaler's scale, None without scaling. Without an active run nothing is logged.
    `AmpCallback` logs every change of the scale with its step.

    Raises:
        ImportError: Lightning is not installed; it comes with the extra `lightning`.

    Example:
        >>> import lightning.pytorch as pl
        >>> options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        >>> trainer = pl.Trainer(callbacks=[AmpWandbCallback()], **options)
    """

    base = "Callback"

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
