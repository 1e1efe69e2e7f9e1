"""Sinks: callables that accept a list of (name, step, value), and write it somewhere."""

import csv
import importlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

Scalar: TypeAlias = tuple[str, int, float]
Sink: TypeAlias = Callable[[list[Scalar]], object]


def require(module: str, extra: str) -> Any:
    """Import a module of an extra, or raise an ImportError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        msg = f"{module} cannot be imported ({error}): pip install 'fastamp[{extra}]'"
        raise ImportError(msg) from error


class _Lines:
    """A text file that is appended to, and closed between batches, so that it survives a kill."""

    start: str  # the first characters of every such file

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+b") as file:
            file.seek(0)
            found = file.read(len(self.start)).decode(errors="replace")
            if not self.start.startswith(found):
                msg = f"path: expected a file that starts with {self.start!r}, got {self._path}"
                raise ValueError(msg)
            file.seek(0)
            n_whole = sum(len(line) for line in file if line.endswith(b"\n"))
            file.truncate(n_whole)  # a killed process may have left half a line
            if n_whole == 0 and self.start.endswith("\n"):
                file.write(self.start.encode())


class JsonLines(_Lines):
    """Append every scalar to a file, one `{"name": ..., "step": ..., "value": ...}` per line.

    inf and NaN, which JSON cannot write as numbers, are the strings "inf", "-inf" and "nan". Only
    one process may write to a file; an existing file is continued.

    Args:
        path: of the file; its folder is made if needed.

    Raises:
        OSError: the file cannot be written.
        ValueError: the file exists and holds something else.
    """

    start = '{"name": '

    def __call__(self, scalars: list[Scalar]) -> None:
        """Append one line for each (name, step, value)."""
        with self._path.open("a", encoding="utf-8", newline="") as file:
            for name, step, value in scalars:
                number = value if math.isfinite(value) else str(value)
                file.write(json.dumps({"name": name, "step": step, "value": number}) + "\n")


class Csv(_Lines):
    """Append every scalar to a CSV file with the columns name, step and value.

    Args and Raises: as `JsonLines`.
    """

    start = "name,step,value\n"

    def __call__(self, scalars: list[Scalar]) -> None:
        """Append one line for each (name, step, value)."""
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(scalars)


class TensorBoard:
    """Write every scalar to an event file for TensorBoard.

    Args:
        folder: of the run.

    Raises:
        ImportError: TensorBoard is not installed; it comes with the extra `tensorboard`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._writer = require("torch.utils.tensorboard", "tensorboard").SummaryWriter(folder)

    def __call__(self, scalars: list[Scalar]) -> None:
        """Write the batch, and flush it to the operating system."""
        for name, step, value in scalars:
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
