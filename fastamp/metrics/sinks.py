"""Sinks: callables that accept a list of (name, step, value), and write it somewhere."""

import csv
import importlib
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable
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

    header = b""
    row: re.Pattern[bytes]  # a whole one, with its newline
    start = b""  # of every row

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).absolute()
        self._half_at: int | None = None  # where a batch that was written in part begins
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+b") as file:
            file.seek(0)
            nbytes, rest = self._measure(file)
            half = rest[: len(self.start)] == self.start[: len(rest)] and not self._is_whole(rest)
            if rest and not (nbytes and half):
                msg = f"path: {self._path} is not a file that {type(self).__name__} has written"
                raise ValueError(msg)
            file.truncate(nbytes)  # a killed process may have left half a row
            if not nbytes:
                file.write(self.header)

    def _append(self, text: str) -> None:
        """Write rows. If only a part could be written, the next call removes it first.

        A file that was removed or emptied begins anew.
        """
        with self._path.open("ab", buffering=0) as file:
            if self._half_at is not None and self._half_at < file.tell():
                file.truncate(self._half_at)
            self._half_at = file.seek(0, os.SEEK_END)
            # Surrogates, which stand for bytes that are not text, are written as escapes.
            content = text.encode(errors="backslashreplace")
            rows = memoryview(content if self._half_at else self.header + content)
            while rows:
                rows = rows[file.write(rows) :]
            self._half_at = None

    def _measure(self, file: Iterable[bytes]) -> tuple[int, bytes]:
        """Return the length in bytes of the rows that this class wrote, and what follows them."""
        nbytes, row = 0, b""
        for line in file:
            row += line
            if self._is_whole(row):
                is_header = self.header and not nbytes
                if row != self.header if is_header else not self.row.fullmatch(row):
                    break
                nbytes, row = nbytes + len(row), b""
        return nbytes, row

    def _is_whole(self, row: bytes) -> bool:
        return row.endswith(b"\n")


class JsonLines(_Lines):
    """Append every scalar to a file, one `{"name": ..., "step": ..., "value": ...}` per line.

    inf and NaN, which JSON cannot write as numbers, are the strings "inf", "-inf" and "nan". Only
    one process may write to a file; an existing file is continued.

    Args:
        path: of the file; its folder is made if needed.

    Raises:
        OSError: the file cannot be written.
        ValueError: the file exists and holds something else.

    Example:
        >>> from pathlib import Path
        >>> fastamp.JsonLines("metrics.jsonl")([("train/loss", 0, 2.5)])
        >>> print(Path("metrics.jsonl").read_text(), end="")
        {"name": "train/loss", "step": 0, "value": 2.5}
    """

    row = re.compile(rb'\{"name": ".*", "step": -?\d+, "value": [-+\w."]+\}\n')
    start = b'{"name": '

    def __call__(self, scalars: list[Scalar]) -> None:
        """Append one line for each (name, step, value)."""
        lines = []
        for name, step, value in scalars:
            number = value if math.isfinite(value) else str(value)
            lines.append(json.dumps({"name": name, "step": step, "value": number}) + "\n")
        self._append("".join(lines))


class Csv(_Lines):
    """Append every scalar to a CSV file with the columns name, step and value.

    Only one process may write to a file; an existing file is continued.

    Args:
        path: of the file; its folder is made if needed.

    Raises:
        OSError: the file cannot be written.
        ValueError: the file exists and holds something else.

    Example:
        >>> from pathlib import Path
        >>> fastamp.Csv("metrics.csv")([("train/loss", 0, 2.5)])
        >>> print(Path("metrics.csv").read_text(), end="")
        name,step,value
        train/loss,0,2.5
    """

    header = b"name,step,value\n"
    row = re.compile(rb'(?:[^",\r\n]*|"(?:[^"]|"")*"),-?\d+,[-+\w.]+\n')

    def __call__(self, scalars: list[Scalar]) -> None:
        """Append one line for each (name, step, value)."""
        rows = io.StringIO()
        has_return = any("\r" in name for name, _, _ in scalars)  # quoted from Python 3.13 on
        csv.writer(
            rows,
            lineterminator="\n",
            quoting=csv.QUOTE_NONNUMERIC if has_return else csv.QUOTE_MINIMAL,
        ).writerows(scalars)
        self._append(rows.getvalue())

    def _is_whole(self, row: bytes) -> bool:
        return row.endswith(b"\n") and row.count(b'"') % 2 == 0  # a quoted name may have newlines


class TensorBoard:
    """Write every scalar to an event file for TensorBoard.

    Args:
        folder: of the run.

    Raises:
        ImportError: TensorBoard is not installed; it comes with the extra `tensorboard`.

    Example:
        >>> tracker = fastamp.MetricsTracker(sinks=[fastamp.TensorBoard("runs/first")])
        >>> tracker.log_scalar("train/loss", 2.5, 0)
        >>> tracker.close()
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._writer = require("torch.utils.tensorboard", "tensorboard").SummaryWriter(folder)

    def __call__(self, scalars: list[Scalar]) -> None:
        """Write the batch, and flush it to the operating system."""
        for name, step, value in scalars:
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
