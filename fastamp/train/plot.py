"""Curves drawn into a file, without a display."""

import io
import os
from pathlib import Path
from typing import Any

from fastamp._files import write
from fastamp.metrics.sinks import require


def plot_curves(path: str | os.PathLike[str], curves: dict[str, Any]) -> None:
    """Draw one panel for each name, of its steps and values; write the file whole or not at all."""
    figures = require("matplotlib.figure", "plot")
    figure = figures.Figure(figsize=(8, 2.5 * len(curves)), layout="constrained")
    for index, (name, curve) in enumerate(curves.items()):
        panel = figure.add_subplot(len(curves), 1, index + 1, xlabel="step", title=name)
        panel.plot(*curve, marker=".")
    target, content = Path(path), io.BytesIO()
    if not target.suffix:  # as savefig does
        target = target.with_name(f"{target.name}.{figure.canvas.get_default_filetype()}")
    figure.savefig(content, format=target.suffix[1:])
    write(target, content.getvalue())
