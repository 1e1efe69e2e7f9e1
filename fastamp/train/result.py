"""What a training run came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fastamp.metrics.sinks import require

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray

    from fastamp.metrics import MetricsTracker

__all__ = ["Curve", "TrainResult"]


class Curve(NamedTuple):
    """A scalar over the steps: at most 4,096 points, the first and the last among them."""

    steps: NDArray[np.int64]
    """Steps of the optimizer that were done, from 1."""
    values: NDArray[np.float64]


def curve_of(tracker: MetricsTracker, name: str) -> Curve:
    """Return a tracker's history, empty where nothing was logged."""
    if name in tracker.summary():
        return Curve(*tracker.history(name))
    return Curve(np.empty(0, np.int64), np.empty(0))


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What `fastamp.fine_tune` returns.

    Curves and counts are of the whole run, also of what came before it was resumed; times, memory
    and throughput are of this call. `str` of it is the summary.
    """

    train_loss: Curve
    """Mean over the batches of a step."""
    val_loss: Curve
    """Mean over the validation set."""
    grad_norm: Curve
    """Before clipping; NaN where nobody measured it."""
    loss_scale: Curve
    """A point for every change; empty without loss scaling."""
    lr: Curve
    steps: int
    """Of the optimizer, skipped ones included."""
    skipped_steps: int
    """Because a gradient was not finite."""
    precision: str
    """In which the model ran, as `fastamp.compute_effective_precision` names it."""
    samples_per_s: float
    """While training: evaluations and checkpoints are left out."""
    peak_memory_nbytes: int | None
    """Allocated by torch on a GPU; on a CPU None."""
    phase_s: dict[str, float]
    """Seconds in "data", "forward", "backward", "step", "evaluate" and "checkpoint"; of the GPU
    where there is one."""
    wait_share: float
    """The part of the time of training in which the loop waited for data."""

    def summary(self) -> str:
        """Return the result as text."""
        lines = [f"{self.steps} steps in {self.precision}, {self.skipped_steps} skipped"]
        for name in ("train_loss", "val_loss"):
            values = getattr(self, name).values
            if len(values):
                lines.append(f"{name}: {values[0]:.4f} to {values[-1]:.4f}, min {values.min():.4f}")
        if len(self.loss_scale.values):
            lines.append(f"loss_scale: {self.loss_scale.values[-1]:g}")
        lines.append(
            f"{self.samples_per_s:,.1f} samples/s, data wait {100 * self.wait_share:.0f} %"
        )
        if self.peak_memory_nbytes is not None:
            lines.append(f"peak memory: {self.peak_memory_nbytes / 2**20:,.0f} MiB")
        phases = (f"{name} {seconds:.3g}" for name, seconds in self.phase_s.items())
        return "\n".join([*lines, f"seconds: {', '.join(phases)}"])

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the curves into a file; its suffix (.png, .svg, .pdf) says of which kind.

        Raises:
            ImportError: matplotlib is not installed; it comes with the extra `plot`.
        """
        panels = {
            "loss": ["train_loss", "val_loss"],
            "grad_norm": ["grad_norm"],
            "loss_scale": ["loss_scale"],
            "lr": ["lr"],
        }
        figure = require("matplotlib.figure", "plot").Figure(figsize=(8, 10), layout="constrained")
        for axes, (title, names) in zip(figure.subplots(len(panels)), panels.items(), strict=True):
            for name in names:
                axes.plot(*getattr(self, name), label=name, marker="." if name != "lr" else None)
            axes.set(title=title, xlabel="step")
            axes.legend()
        figure.savefig(path)

    __str__ = summary
