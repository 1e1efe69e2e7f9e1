"""A folder that one process saves in: locked from its first save until the process ends."""

import atexit
import errno
import fcntl
import json
import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastamp._files import open_regular

WAIT_S = 60.0
_POLL_S = 0.2
_UNSUPPORTED = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}
_held: dict[tuple[int, int], int | None] = {}  # folders, with the descriptors of their locks


def lock(folder: Path) -> None:
    """Lock a folder for this process, or return at once if it holds the lock.

    Waits up to a minute for another process, and says so in the log. If the file system has no
    locks, a file with host, process and start time takes the place of one.

    Raises:
        OSError: another process holds the lock.
    """
    status = folder.stat()
    key = (status.st_dev, status.st_ino)
    if key in _held:
        return
    deadline_s, has_said = time.monotonic() + WAIT_S, False
    while True:
        taken, descriptor = _try(folder)
        if taken:
            _held[key] = descriptor
            return
        if time.monotonic() > deadline_s:
            msg = f"another process saves in {folder}, and has not ended within {WAIT_S:.0f} s"
            raise OSError(errno.EAGAIN, msg)
        if not has_said:
            has_said = True
            logging.getLogger(__name__).warning("waiting for another process to leave %s", folder)
        time.sleep(_POLL_S)


def _forget() -> None:
    """Leave the locks to the parent: a forked process would hold them until its own end."""
    for descriptor in _held.values():
        if descriptor is not None:
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)


def _try(folder: Path) -> tuple[bool, int | None]:
    """Try to take the lock; return whether it is taken, and its descriptor."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        return error.errno in _UNSUPPORTED and _lease(folder), None
    return True, descriptor


def _lease(folder: Path) -> bool:
    """Make the file in place of a lock; remove it first if its process, on this host, has ended."""
    path, mine = folder / ".lease", {"host": socket.gethostname(), **_describe(os.getpid())}
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(descriptor, "w") as file:
            json.dump(mine, file)
        atexit.register(path.unlink, missing_ok=True)
        return True
    with suppress(OSError, ValueError, KeyError, TypeError):
        with open_regular(path) as opened:
            held = json.load(opened)
        if held["host"] == mine["host"] and held != {**held, **_describe(held["pid"])}:
            path.unlink(missing_ok=True)
    return False


def _describe(pid: int) -> dict[str, Any]:
    """Return a process's number and start time, None if it has ended: numbers are used again."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return {"pid": pid, "start": int(fields[19])}  # in ticks since the machine's start
    return {"pid": pid, "start": None}
