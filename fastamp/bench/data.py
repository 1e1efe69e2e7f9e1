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

from fastamp.bench.options import BadArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

__all__ = ["Corpus", "load_corpus", "training_batches", "validation_batches"]

VALIDATION_PART = 10  # one byte in so many
# Third-party code, and tests, which some distributions leave out of the standard library.
EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and, after the cut, bytes to validate on: no byte is in both."""

    source: str
    files: int
    sha256: str
    train: npt.NDArray[np.uint8]
    validation: npt.NDArray[np.uint8]

    def describe(self) -> dict[str, object]:
        """Return where the bytes come from and how many there are, without the bytes."""
        return {
            "source": self.source,
            "files": self.files,
            "sha256": self.sha256,
            "train_bytes": len(self.train),
            "validation_bytes": len(self.validation),
        }


def load_corpus(path: str | None, *, block_size: int) -> Corpus:
    """Read the text and keep its tail for validation.

    Args:
        path: a file, or a folder whose files are all read; None for the sources of the running
            interpreter's standard library. Files are joined in the order of their relative paths.
        block_size: the length of a window in bytes; both parts must hold more than one.

    Raises:
        BadArgumentError: there is nothing to read at `path`, or too little.
    """
    if path is None:
        source = f"standard library of Python {platform.python_version()}"
        root = Path(sysconfig.get_path("stdlib"))
        files = _files(root, "*.py", EXCLUDED)
    else:
        source, root = path, Path(path)
        if not (root.is_file() or root.is_dir()):
            raise BadArgumentError(option="--data", value=path, problem="is no file and no folder")
        files = _files(root, "*", set()) if root.is_dir() else [root]
    if not files:
        raise BadArgumentError(option="--data", value=str(root), problem="holds no file to read")
    try:
        text = b"".join(file.read_bytes() for file in files)
    except OSError as error:
        raise BadArgumentError(
            option="--data", value=error.filename, problem=f"cannot be read: {error}"
        ) from error
    tail = len(text) // VALIDATION_PART
    if tail <= block_size:
        least = (block_size + 1) * VALIDATION_PART
        problem = f"holds {len(text)} bytes, too few: --block-size {block_size} needs {least}"
        raise BadArgumentError(option="--data", value=str(root), problem=problem)
    data = np.frombuffer(text, dtype=np.uint8)
    digest = hashlib.sha256(text).hexdigest()
    return Corpus(source, len(files), digest, train=data[:-tail], validation=data[-tail:])


def _files(root: Path, pattern: str, excluded: set[str]) -> list[Path]:
    found = ((file.relative_to(root), file) for file in root.rglob(pattern) if file.is_file())
    kept = [
        (name.as_posix(), file) for name, file in found if not excluded.intersection(name.parts)
    ]
    return [file for _, file in sorted(kept)]


def training_batches(
    data: npt.NDArray[np.uint8], *, batch_size: int, block_size: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches drawn at random, the same for the same seed, without end."""
    rng = np.random.default_rng(seed)
    while True:
        yield _windows(data, rng.integers(0, len(data) - block_size, batch_size), block_size)


def validation_batches(
    data: npt.NDArray[np.uint8], *, windows: int, batch_size: int, block_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of windows that start at equal distances over the whole of `data`."""
    starts = np.linspace(0, len(data) - block_size - 1, windows).astype(np.int64)
    for first in range(0, windows, batch_size):
        yield _windows(data, starts[first : first + batch_size], block_size)


def _windows(
    data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bytes and, one place on, the bytes to predict: two int64 [starts, block_size]."""
    window = torch.from_numpy(data[starts[:, None] + np.arange(block_size + 1)].astype(np.int64))
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()
