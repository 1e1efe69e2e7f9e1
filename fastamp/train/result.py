"""The result of a training run: curves, counts and times."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Curve(NamedTuple):
    """A scalar over the steps, from 1: at most 4,096 points, the first and the last among them.

    `pyplot.plot(*curve)` draws it.

    Example:
        >>> print(fastamp.train.Curve(np.array([1, 2]), np.array([0.5, 0.25])).values.min())
        0.25
    """

    steps: NDArray[np.int64] = np.empty(0, np.int64)
    values: NDArray[np.float64] = np.empty(0)


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What `fastamp.fine_tune` returns, of the whole run if it was resumed; `str` is the summary.

    Example:
        >>> config = fastamp.TrainConfig(max_steps=2, device="cpu")
        >>> data = torch.randn(8, 4), torch.randn(8, 1)
        >>> fastamp.fine_tune(torch.nn.Linear(4, 1), data, config=config).skipped_steps
        0
    """

    train_loss: Curve
    """Mean over the targets of a step that count; NaN if none does."""
    val_loss: Curve
    """Mean over the validation set's targets that count, whatever the size of its batches."""
    metrics: dict[str, Curve]
    """The numbers of `TrainConfig.evaluate`, by name."""
    grad_norm: Curve
    """Before clipping; empty without loss scaling and `max_norm`, as it is not computed."""
    loss_scale: Curve
    """A point for every change; empty without loss scaling."""
    lr: Curve
    steps: int
    """Steps of the optimizer, including skipped ones."""
    skipped_steps: int
    """Steps skipped because a gradient was not finite."""
    best_checkpoint: Path | None
    """With `TrainConfig.keep_best`: the checkpoint with the best `TrainConfig.metric`."""
    precision: str
    """Of the run, as `fastamp.compute_effective_precision` names it."""

    def summary(self) -> str:
        """Return the result as text."""
        lines = [f"{self.steps} steps in {self.precision}, {self.skipped_steps} skipped"]
        for name in ("train_loss", "val_loss", "loss_scale"):
            values = getattr(self, name).values
            if len(values):
                lines.append(f"{name}: {values[0]:.6g} to {values[-1]:.6g}, min {values.min():.6g}")
        return "\n".join(lines)

    __str__ = summary
