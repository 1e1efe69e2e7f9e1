"""`Folder`: the names of a run's checkpoints, and which of them stay; not what is in them."""

import errno
import math
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fastamp._files import sync

_NAME = re.compile(r"step-([0-9]{8,})\.pt")


class Folder:
    """The checkpoints of one run, with those it found: the newest stay. Only `publish` writes."""

    def __init__(self, path: str | os.PathLike[str], *, keep: int) -> None:
        if "://" in os.fspath(path):
            msg = f"folder: expected a path of a mounted file system, got {path!r}"
            raise ValueError(msg)
        self.path = Path(path).expanduser().absolute()
        self._keep = keep
        with self._named("cannot be read"):
            self._own = self._list()  # the steps that this run may restore and remove
            self._leftovers = [*self.path.glob(".step-*.part")]  # of runs that were killed

    def path_of(self, step: int) -> Path:
        """Return the path of a step's checkpoint."""
        return self.path / f"step-{step:08d}.pt"

    def newest(self, before: float = math.inf) -> int | None:
        """Return the step of the newest checkpoint before a step, None without any."""
        return max((step for step in self._own if step < before), default=None)

    def publish(self, step: int, best: int | None, write: Callable[[Path], None]) -> None:
        """Let a step's checkpoint be written, and rename it; the newest and the best one stay."""
        with self._named(f"{self.path_of(step).name} cannot be written"):
            made = [path for path in (self.path, *self.path.parents) if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            for path in made:
                sync(path.parent)
            while self._leftovers:
                self._leftovers.pop().unlink(missing_ok=True)
            part = self.path / f".step-{secrets.token_hex(4)}.part"
            try:
                write(part)
                if others := self._list() - self._own:
                    msg = f"another run has saved {self.path_of(max(others)).name} in this folder"
                    raise FileExistsError(errno.EEXIST, msg)
                part.replace(self.path_of(step))
            finally:
                part.unlink(missing_ok=True)
            self._own.add(step)
            sync(self.path)
            newest = sorted(each for each in self._own if each <= step)[-self._keep :]
            kept = {*newest} | (self._own & {best})
            for old in self._own - kept:
                self.path_of(old).unlink(missing_ok=True)
            self._own = kept

    @contextmanager
    def _named(self, problem: str) -> Iterator[None]:
        """Let an OSError name the folder and the problem."""
        try:
            yield
        except OSError as error:
            msg = f"{self.path}: {problem}: {error.strerror or error}"
            raise OSError(error.errno, msg) from error

    def _list(self) -> set[int]:
        names: list[str] = []
        with suppress(FileNotFoundError):
            names = [path.name for path in self.path.iterdir()]
        return {int(found[1]) for found in map(_NAME.fullmatch, names) if found}
