"""`Folder`: the names of a run's checkpoints, and which of them stay; not what is in them."""

import errno
import math
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fastamp._files import sync

_NAME = re.compile(r"step-([0-9]{8,})\.pt")


class Folder:
    """The checkpoints of one run in one folder, `step-00000123.pt` and the like.

    All that is in the folder when the run begins is the run's own. Nothing is written before
    `begin`. `keep` is how many of the newest checkpoints to keep.
    """

    def __init__(self, path: str | os.PathLike[str], *, keep: int) -> None:
        if "://" in os.fspath(path):
            msg = f"folder: expected a path of a mounted file system, got {path!r}"
            raise ValueError(msg)
        self.path = Path(path).expanduser().absolute()
        self._keep = keep
        with self.named("cannot be read"):
            self._steps = self._list()  # those that may be restored, oldest first
            self._leftovers = [*self.path.glob(".step-*.part")]  # of runs that were killed
        self._own = {*self._steps}  # those that this run may remove

    def path_of(self, step: int) -> Path:
        """Return the path of a step's checkpoint."""
        return self.path / f"step-{step:08d}.pt"

    def newest(self, before: float = math.inf) -> int | None:
        """Return the step of the newest checkpoint before a step, None without any."""
        return max((step for step in self._steps if step < before), default=None)

    def go_back(self, step: int) -> None:
        """Note that a step's checkpoint is restored; `publish` removes the later ones."""
        self._steps = [each for each in self._steps if each <= step]

    def begin(self) -> Path:
        """Return a new name to write a checkpoint under; make the folder if it is missing."""
        made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        for path in made:
            sync(path.parent)
        self._refuse_others()
        while self._leftovers:
            self._leftovers.pop().unlink(missing_ok=True)
        return self.path / f".step-{secrets.token_hex(4)}.part"

    def publish(self, part: Path, step: int, best: int | None) -> None:
        """Rename what is written and synced to a step's checkpoint, and remove old checkpoints.

        The checkpoint of the step `best` is kept beside the newest ones.
        """
        self._refuse_others()
        part.replace(self.path_of(step))
        self._own.add(step)
        sync(self.path)
        steps = sorted({*self._steps, step})
        kept = {*steps[-self._keep :], *(each for each in steps if each == best)}
        self._steps = sorted(kept)
        for old in self._own - kept:
            self.path_of(old).unlink(missing_ok=True)
        self._own = kept

    @contextmanager
    def named(self, problem: str) -> Iterator[None]:
        """Let an OSError name the folder and the problem."""
        try:
            yield
        except OSError as error:
            msg = f"{self.path}: {problem}: {error.strerror or error}"
            raise OSError(error.errno, msg) from error

    def _refuse_others(self) -> None:
        others = [step for step in self._list() if step not in self._own]
        if others:
            name = self.path_of(others[-1]).name
            msg = f"another run has saved {name} in this folder since this run began"
            raise FileExistsError(errno.EEXIST, msg)

    def _list(self) -> list[int]:
        names = []
        with suppress(FileNotFoundError):
            names = [path.name for path in self.path.iterdir()]
        return sorted(int(found[1]) for found in map(_NAME.fullmatch, names) if found)
