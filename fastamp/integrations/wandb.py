"""Weights & Biases: a sink for the tracker, and a Lightning callback that logs the precision."""

from collections import defaultdict
from importlib import import_module
from typing import Any

from fastamp.metrics.sinks import Logged, require

__all__ = ["AmpWandbCallback", "WandbSink"]  # noqa: F822 - from __getattr__

STEP = "fastamp/step"


class WandbSink:
    """Log the scalars of a `fastamp.MetricsTracker` to a run of W&B, one row for each step.

    Charts have the tracker's steps on the x axis: the column "fastamp/step". The time of a row is
    when its first scalar was logged. W&B's own step is not set, so that the loop may log too.

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

    def __call__(self, scalars: list[Logged]) -> None:
        """Log a batch of a tracker."""
        rows: dict[int, dict[str, float]] = defaultdict(dict)
        for scalar in scalars:
            name, step, value = scalar
            rows[step][name] = value
            rows[step].setdefault("_timestamp", scalar.time_s)
            if name not in self._known:
                self._known.add(name)
                if name and "*" not in name:  # W&B cannot define these: they get its own steps
                    self._run.define_metric(name, step_metric=STEP)
        for step, row in rows.items():
            self._run.log({STEP: step, **row})


def __getattr__(name: str) -> Any:
    """Hand on `AmpWandbCallback`, which needs Lightning; the sink does not."""
    if name != "AmpWandbCallback":
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return import_module("fastamp.integrations.lightning_callbacks").AmpWandbCallback
