"""The result of a training run: curves, counts and times."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Curve(NamedTuple):
    """Steps, from 1, and values, for `pyplot.plot(*curve)`: at most 4,096, the ends among them.

    Example:
        >>> print(fastamp.train.Curve(np.array([1, 2]), np.array([0.5, 0.25])).values.min())
        0.25
    """

    steps: NDArray[np.int64] = np.empty(0, np.int64)
    values: NDArray[np.float64] = np.empty(0)


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What `fastamp.fine_tune` returns, of the whole run if it was resumed; `str` is the summary.

    Args:
        train_loss: mean over the targets of a step that count; NaN if none does.
        val_loss: mean over the validation set's targets that count, whatever its batches' size.
        metrics: the numbers of `TrainConfig.evaluate`, by name.
        grad_norm: before clipping; empty without loss scaling and `max_norm`: it is not computed.
        loss_scale: a point for every change; empty without loss scaling.
        lr: the learning rate.
        steps: steps of the optimizer, including skipped ones.
        skipped_steps: steps skipped because a gradient was not finite.
        best_checkpoint: with `TrainConfig.keep_best` the one with the best `TrainConfig.metric`.
        precision: of the run, as `fastamp.compute_effective_precision` names it.

    Example:
        >>> data = torch.randn(8, 4), torch.randn(8, 1)
        >>> fastamp.fine_tune(torch.nn.Linear(4, 1), data).skipped_steps
        0
    """

    train_loss: Curve
    val_loss: Curve
    metrics: dict[str, Curve]
    grad_norm: Curve
    loss_scale: Curve
    lr: Curve
    steps: int
    skipped_steps: int
    best_checkpoint: Path | None
    precision: str

    def summary(self) -> str:
        """Return the result as text."""
        lines = [f"{self.steps} steps in {self.precision}, {self.skipped_steps} skipped"]
        curves = {name: getattr(self, name) for name in ("train_loss", "val_loss", "loss_scale")}
        shown = {name: v for name, (_, v) in {**curves, **self.metrics}.items() if len(v)}
        for name, v in shown.items():
            lines.append(f"{name}: {v[0]:.6g} to {v[-1]:.6g}, min {v.min():.6g}, max {v.max():.6g}")
        if self.best_checkpoint is not None:
            lines.append(f"best: {self.best_checkpoint.stem}")
        return "\n".join(lines)

    __str__ = summary
