"""Curves drawn into a file, without a display."""

import os
from typing import Any

from fastamp.metrics.sinks import require


def plot_curves(path: str | os.PathLike[str], curves: dict[str, Any]) -> None:
    """Draw one panel for each name, of its steps and values."""
    figures = require("matplotlib.figure", "plot")
    figure = figures.Figure(figsize=(8, 2.5 * len(curves)), layout="constrained")
    for index, (name, curve) in enumerate(curves.items()):
        panel = figure.add_subplot(len(curves), 1, index + 1, title=name, xlabel="step")
        panel.plot(*curve, marker=".")
    figure.savefig(path)
