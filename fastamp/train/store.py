"""`Store`: a folder of checkpoints. It knows their names, and which are ours, not their content."""

import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from fastamp._files import create, sync
from fastamp.train.state_file import CheckpointError, DamagedError, is_ours

T = TypeVar("T")
WAIT_S = 60.0  # for another process that saves in the folder
# A checkpoint of several ranks is a folder; one that ends with ".old" is about to be replaced.
_NAME = re.compile(r"step-[0-9]{8,}(\.pt)?|\.step-[0-9]{8,}\.old")
_NO_LOCKS = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}
_locks: dict[Path, FileLock] = {}  # of this process, until it ends


class Store:
    """The checkpoints of one run in one folder, `step-00000123.pt` and the like.

    Over ranks the first one calls `open`, `begin`, `publish` and `discard`; `paths` is the same on
    all of them.

    Args:
        folder: `open` makes it if needed. Files of anybody else in it are never removed.
        keep: how many of the newest checkpoints to keep.
        suffix: of their names.
        argument: what errors call the folder.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, keep: int, suffix: str, argument: str
    ) -> None:
        self._folder = Path(folder).expanduser().absolute()
        self._keep, self._suffix = keep, suffix
        self.title = f"{argument}={self._folder}"
        """How errors begin."""
        self.paths: list[Path] = []
        """The checkpoints that may be restored, oldest first. A run without any starts anew."""
        self._damaged: set[Path] = set()
        self._known: set[Path] = set()  # that this run may remove
        self._has_begun = False

    @property
    def newest_step(self) -> int:
        """The step of the newest checkpoint that is not known to be damaged; -1 without any."""
        return _step_of(self.paths[-1]) if self.paths else -1

    def path_of(self, step: int) -> Path:
        """Return the path of a step's checkpoint."""
        return self._folder / f"step-{step:08d}{self._suffix}"

    def open(self) -> list[Path]:
        """Make the folder, check that it can be written to, and return the checkpoints in it.

        Raises:
            OSError: it cannot be made, or no file in it can be written, or renamed.
        """
        probe = self._folder / f".step-{secrets.token_hex(4)}.part"
        with self.named("cannot be written to"):
            made = [path for path in (self._folder, *self._folder.parents) if not path.exists()]
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in made:
                sync(path.parent)
            try:
                with create(probe) as file:
                    file.write(b"\0")
                probe = probe.replace(probe.with_suffix(".renamed.part"))
            finally:
                _remove(probe)
            found = self._list()
        self._known = {*found}
        return found

    def begin(self, step: int) -> Path:
        """Return a name to write a step's checkpoint under, which nobody can foresee.

        The first call locks the folder for this process, and removes what killed runs have left.

        Raises:
            OSError: another process saves in the folder, or has done so since `open`; its file
                system has no locks; or something that is not ours is in the way.
        """
        _lock(self._folder)
        if not self._has_begun:
            for new in filter(is_ours, {*self._list()} - self._known):
                msg = f"another process has saved {new.name} since this run began: run it again"
                raise FileExistsError(errno.EEXIST, msg)
            for leftover in self._folder.glob(".step-*.part"):
                _remove(leftover)
            self._has_begun = True
        path, token = self.path_of(step), secrets.token_hex(4)
        if os.path.lexists(path) and not is_ours(path):
            if path not in self._damaged:
                msg = "there is something that fastamp has not written"
                raise FileExistsError(errno.EEXIST, msg)
            path.replace(path.with_name(f"{path.name}.{token}.damaged"))
        return path.with_name(f".{path.name}.{token}.part")

    def publish(self, part: Path, step: int, kept_step: int | None) -> list[Path]:
        """Rename what is written and synced, remove old checkpoints, and return the new `paths`.

        The checkpoint of `kept_step` is kept beside the newest ones.

        Raises:
            OSError: it cannot be renamed, or an old one cannot be removed.
        """
        path = self.path_of(step)
        paths = [*(each for each in self.paths if _step_of(each) != step), path]
        kept = {*paths[-self._keep :], *(each for each in paths if _step_of(each) == kept_step)}
        aside = path.with_name(f".{path.name}.old")
        if path.is_dir():  # it would prevent the renaming
            path.replace(aside)
        if part.is_dir():
            sync(part)  # the names in it
            sync(self._folder)
        part.replace(path)
        sync(self._folder)
        self._known |= {path, aside}
        for old in filter(self._may_go, self._known - kept):
            gone = old.with_name(f".{old.name.lstrip('.')}.part")  # may be left in half
            _remove(gone)
            old.replace(gone)
            if gone.is_dir():  # else a loss of power may leave half of it under its old name
                sync(self._folder)
            _remove(gone)
        return paths

    def discard(self, part: Path) -> None:
        """Remove what is written and not published."""
        _remove(part)

    def load(self, read: Callable[[Path], T]) -> tuple[T | None, list[str]]:
        """Read the newest checkpoint that is whole.

        Those for which `read` raises a DamagedError are passed over; `publish` removes them.

        Returns:
            What `read` returns, None without any; and what is wrong with the damaged ones.

        Raises:
            CheckpointError: all are damaged.
        """
        problems: list[str] = []
        while self.paths:
            try:
                return read(self.paths[-1]), problems
            except DamagedError as error:  # noqa: PERF203 - one pass, unless there is damage
                problems.append(str(error))
                self._damaged.add(self.paths.pop())
        if problems:
            msg = f"{'; '.join(problems)}; there is no whole one"
            raise CheckpointError(msg)
        return None, problems

    def go_back(self, step: int) -> None:
        """Let `load` read an earlier checkpoint; `publish` removes the later ones."""
        earlier = [path for path in self.paths if _step_of(path) <= step]
        if not earlier or _step_of(earlier[-1]) != step:
            msg = f"{self._folder}: the checkpoint of step {step} is gone"
            raise CheckpointError(msg)
        self.paths = earlier

    @contextmanager
    def named(self, problem: str) -> Iterator[None]:
        """Let an OSError name the folder and the problem."""
        try:
            yield
        except OSError as error:
            msg = f"{self.title}: {problem}: {error.strerror or error}"
            raise OSError(error.errno, msg) from error

    def _may_go(self, path: Path) -> bool:
        """Say whether a file or folder is ours, or an empty file that has been passed over."""
        is_empty = path in self._damaged and path.is_file() and not path.stat().st_size
        return is_empty or is_ours(path)

    def _list(self) -> list[Path]:
        paths = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(paths, key=lambda path: (_step_of(path), path.name))


def _lock(folder: Path) -> None:
    """Lock a folder for this process until it ends; wait up to a minute for another one.

    The lock is on the file `.lock`, which stays. A forked process neither holds it nor ends it.
    """
    file = folder.resolve() / ".lock"
    held = _locks.get(file)
    if held is not None and held.is_locked and file.exists():
        return
    lock = FileLock(file, thread_local=False, preserve_lock_file=True)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            text = "waiting for another process to leave %s"
            logging.getLogger(__name__).warning(text, folder)
            lock.acquire(timeout=WAIT_S)
    except Timeout:
        msg = f"another process saves in {folder}, and has not ended within {WAIT_S:.0f} s"
        raise OSError(errno.EAGAIN, msg) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        msg = f"its file system has no locks: {error.strerror}"
        raise OSError(error.errno, msg) from error
    _locks[file] = lock


def _step_of(path: Path) -> int:
    return int("".join(filter(str.isdigit, path.name)))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):  # a leftover is removed by the next run
            path.unlink()
