"""Files that are whole or not there: written beside the old one, then renamed over it."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def create(path: Path) -> Iterator[BinaryIO]:
    """Open a new file, never through a link; what the block writes is then on the disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it; raise an OSError for anything else, as a pipe, which would block."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file")
    return os.fdopen(descriptor, "rb")


def sync_folder(folder: Path) -> None:
    """Let the names in a folder reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
