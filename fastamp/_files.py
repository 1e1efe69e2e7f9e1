"""Files that are written whole or not at all: beside the old one, then renamed over it."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def create(path: Path) -> Iterator[BinaryIO]:
    """Open a new file, never through a link; at the end of the block it is synced to the disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write(path: Path, content: bytes) -> None:
    """Write a file beside the one that the path leads to, and rename it over that one.

    Devices and pipes are written directly, and so are files in a folder that is not writable.

    Raises:
        OSError: it cannot be written; a regular file that was not written directly is unchanged.
    """
    target = Path(os.path.realpath(path))
    # As /dev/stdout, which may lead to a file that somebody has open.
    folder = os.path.realpath(path.parent) + "/"
    is_open = path.is_symlink() and folder.startswith(("/dev/", "/proc/"))
    is_special = is_open or (path.exists() and not path.is_file())
    if is_special or not os.access(target.parent, os.W_OK):
        with path.open("ab" if is_special else "wb") as file:
            file.write(content)
        return
    part = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}.part")
    try:
        with create(part) as file:
            if target.exists():
                part.chmod(stat.S_IMODE(target.stat().st_mode))
            file.write(content)
        part.replace(target)
        sync(target.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        part.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Sync a closed file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
