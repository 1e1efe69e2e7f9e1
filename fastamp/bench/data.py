"""The text: bytes read in a fixed order, split into training and validation, cut into windows."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fastamp.bench.options import refuse

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from fastamp.bench.train import Job

    Bytes = npt.NDArray[np.uint8]

VALIDATION_PART = 10  # one byte in so many
# Third-party code, and tests, which some distributions leave out of the standard library.
EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and, after the cut, bytes to validate on: no byte is in both."""

    source: str
    files: int
    sha256: str
    train: Bytes
    validation: Bytes


def load_corpus(path: str | None, *, block_size: int) -> Corpus:
    """Read the text and keep its tail for validation.

    Args:
        path: a file, or a folder whose files are all read; None for the sources of the running
            interpreter's standard library. Files are joined in the order of their relative paths.
        block_size: the length of a window in bytes; both parts must hold more than one.

    Raises:
        argparse.ArgumentError: there is nothing to read at `path`, or too little.
    """
    if path is None:
        source = f"standard library of Python {platform.python_version()}"
        root, pattern, excluded = Path(sysconfig.get_path("stdlib")), "*.py", EXCLUDED
    else:
        source, root, pattern, excluded = path, Path(path), "*", set()
        if not (root.is_file() or root.is_dir()):
            refuse("--data", path, "is no file and no folder")
    names = (file.relative_to(root) for file in root.rglob(pattern) if file.is_file())
    kept = sorted(name.as_posix() for name in names if not excluded.intersection(name.parts))
    files = [root] if root.is_file() else [root / name for name in kept]
    if not files:
        refuse("--data", str(root), "holds no file to read")
    try:
        text = b"".join(file.read_bytes() for file in files)
    except OSError as error:
        refuse("--data", error.filename, f"cannot be read: {error}")
    tail = len(text) // VALIDATION_PART
    if tail <= block_size:
        least = (block_size + 1) * VALIDATION_PART
        problem = f"holds {len(text)} bytes, too few: --block-size {block_size} needs {least}"
        refuse("--data", str(root), problem)
    data = np.frombuffer(text, dtype=np.uint8)
    digest = hashlib.sha256(text).hexdigest()
    return Corpus(source, len(files), digest, train=data[:-tail], validation=data[-tail:])


def training_batches(data: Bytes, job: Job) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches drawn at random, the same for the same seed, without end."""
    rng = np.random.default_rng(job.seed)
    size = job.shape.block_size
    while True:
        yield _windows(data, rng.integers(0, len(data) - size, job.batch_size), size)


def validation_batches(
    data: Bytes, job: Job, windows: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of windows that start at equal distances over the whole of `data`."""
    size = job.shape.block_size
    starts = np.linspace(0, len(data) - size - 1, windows).astype(np.int64)
    for first in range(0, windows, job.batch_size):
        yield _windows(data, starts[first : first + job.batch_size], size)


def _windows(
    data: Bytes, starts: npt.NDArray[np.int64], block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bytes and, one place on, the bytes to predict: two int64 [starts, block_size]."""
    window = torch.from_numpy(data[starts[:, None] + np.arange(block_size + 1)].astype(np.int64))
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()
