"""The text: bytes read in a fixed order, split into training and validation."""

import hashlib
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fastamp.bench.options import refuse

Bytes = npt.NDArray[np.uint8]

VALIDATION_PART = 10  # the last tenth is held out
# Third-party code, and tests, which some distributions leave out of the standard library.
EXCLUDED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and, after the cut, bytes to validate on: no byte is in both."""

    source: str
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
        argparse.ArgumentError: `path` holds no text, or too little.
    """
    if path is None:
        source = f"standard library of Python {platform.python_version()}"
        root, ending, excluded = Path(sysconfig.get_path("stdlib")), ".py", EXCLUDED
    else:
        source, root, ending, excluded = path, Path(path), "", set()
    try:
        files = [root] if root.is_file() else _find(root, ending, excluded)
        text = b"".join(file.read_bytes() for file in files)
    except OSError as error:  # the name may be too long
        refuse("--data", str(error.filename or root), f"cannot be read: {error.strerror}")
    tail = len(text) // VALIDATION_PART
    if tail <= block_size:
        least = (block_size + 1) * VALIDATION_PART
        problem = f"holds {len(text)} bytes, too few: windows of {block_size} need {least}"
        refuse("--data", str(root), problem)
    data = np.frombuffer(text, dtype=np.uint8)
    digest = hashlib.sha256(text).hexdigest()
    return Corpus(source, digest, train=data[:-tail], validation=data[-tail:])


def _find(root: Path, ending: str, excluded: set[str]) -> list[Path]:
    """Return the files in a folder, in the order of their paths."""

    def fail(error: OSError) -> None:
        raise error

    found = []
    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if name not in excluded]
        files = (Path(folder, name) for name in names if name.endswith(ending))
        found += [file for file in files if file.is_file()]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())
