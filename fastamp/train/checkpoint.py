"""Checkpoints: one file each, complete or absent."""

import errno
import os
import re
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from fastamp._files import sync_folder
from fastamp.train.lock import lock
from fastamp.train.ranks import Ranks
from fastamp.train.state_file import (
    NOT_PICKLED,
    Check,
    CheckpointError,
    DamagedError,
    find_kinds,
    find_strange,
    is_ours,
    read_file,
    write_file,
)

# A checkpoint of several ranks is a folder; one that ends with ".old" is about to be replaced.
_NAME = re.compile(r"step-[0-9]{8,}(\.pt)?|\.step-[0-9]{8,}\.old")


class Checkpoints:
    """The checkpoints of one run in one folder, `step-00000123.pt` and the like.

    Args:
        folder: is made if needed. The first save locks it for this process, and removes files that
            killed runs left half-written. Files of anybody else are never removed.
        keep: how many of the newest checkpoints to keep.
        resume: False starts anew: older checkpoints are removed when the first one is written.
        ranks: of the run. An error on one rank is raised on all.
        argument: what errors call the folder.
        anew: what errors say about starting anew.

    Raises:
        OSError: the folder cannot be made or written to.
    """

    suffix = ".pt"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int,
        resume: bool = True,
        ranks: Ranks,
        argument: str = "checkpoint_dir",
        anew: str = "resume=False starts anew",
    ) -> None:
        self._argument, self._anew = argument, anew
        self._folder, self._keep, self._ranks = Path(folder).absolute(), keep, ranks
        self._tested: set[type] = set()  # in checkpoints that were read back
        found = ranks.first(self._prepare)
        self._mine: list[Path] = found if resume else []
        self._known = {*found}  # checkpoints that this run may remove
        self._damaged: set[Path] = set()  # and those that it has passed over

    @property
    def newest_step(self) -> int:
        """The step of the newest checkpoint that is not known to be damaged; -1 without any."""
        return _step_of(self._mine[-1]) if self._mine else -1

    def path_of(self, step: int) -> Path:
        """Return the path of a step's checkpoint."""
        return self._folder / f"step-{step:08d}{self.suffix}"

    def save(self, step: int, state: dict[str, Any], kept_step: int | None = None) -> None:
        """Write a checkpoint under a temporary name, then rename it.

        The checkpoint of `kept_step` is kept beside the newest ones.

        Raises:
            OSError: it cannot be written; the other checkpoints are unchanged.
            CheckpointError: it could not be read back; the other checkpoints are unchanged.
        """
        path = self.path_of(step)
        try:
            token = self._ranks.first(lambda: self._enter(path))
        except OSError as error:
            raise self._explain(error, f"{path.name} cannot be written") from error
        part = path.with_name(f".{path.name}.{token}.part")
        try:
            self._write(part, state)
            kinds = find_kinds(state)
            if self._ranks.first(lambda: not kinds <= self._tested):
                self._test(part, state)
                self._tested |= kinds
            mine = [*(each for each in self._mine if _step_of(each) != step), path]
            kept = {*mine[-self._keep :], *(each for each in mine if _step_of(each) == kept_step)}
            self._ranks.first(lambda: self._publish(part, path, kept))
            self._mine = mine
        except OSError as error:
            raise self._explain(error, f"{path.name} cannot be written") from error
        finally:
            _remove(part)

    def load(self, check: Check, stacklevel: int = 2) -> dict[str, Any] | None:
        """Return the state of the newest checkpoint, None if there is none.

        Damaged ones are passed over, with one warning, and removed after the next is saved.
        `stacklevel` is the warning's.

        Raises:
            CheckpointError: all are damaged, or the newest whole one does not pass the check.
        """
        problems: list[str] = []
        while self._mine:
            try:
                state = self._read(self._mine[-1], check)
            except DamagedError as error:
                problems.append(str(error))
                self._damaged.add(self._mine.pop())
                continue
            except CheckpointError as error:
                msg = f"{error}; {self._anew}"
                raise CheckpointError(msg) from error
            if problems and self._ranks.rank == 0:
                text = f"{'; '.join(problems)}; resumed from {self._mine[-1]}"
                warnings.warn(text, stacklevel=stacklevel)
            return state
        if problems:
            msg = f"{'; '.join(problems)}; there is no whole one; {self._anew}"
            raise CheckpointError(msg)
        return None

    def go_back(self, step: int) -> None:
        """Let `load` return an earlier checkpoint; the next save removes the later ones."""
        earlier = [path for path in self._mine if _step_of(path) <= step]
        if not earlier or _step_of(earlier[-1]) != step:
            msg = f"{self._folder}: the checkpoint of step {step} is gone"
            raise CheckpointError(msg)
        self._mine = earlier

    def restore(
        self,
        state: dict[str, Any],
        parts: dict[str, tuple[Any, dict[str, Any]]],
        model: nn.Module,
        optimizer: Optimizer | None,
    ) -> None:
        """Load what `load` returned: parts by name, with their states; then optimizer and model.

        Raises:
            CheckpointError: a part of the user's own class refuses its state.
        """
        for name, (part, kept) in parts.items():
            self._attempt(name, partial(part.load_state_dict, kept))
        self._attempt("model", lambda: self._restore(state, model, optimizer))

    def _attempt(self, name: str, action: Callable[[], object]) -> None:
        """Let every error name the checkpoint and the entry, on all ranks."""

        def explained() -> None:
            try:
                action()
            except Exception as error:  # the user's own classes can raise anything
                problem = f"its [{name!r}] cannot be loaded: {type(error).__name__}: {error}"
                msg = f"{self._mine[-1]}: {problem}; {self._anew}"
                raise CheckpointError(msg) from error

        self._ranks.together(explained)

    def _restore(
        self, state: dict[str, Any], model: nn.Module, optimizer: Optimizer | None
    ) -> None:
        if optimizer is not None:
            optimizer.load_state_dict(state["optimizer"])
        model.load_state_dict(state["model"])

    def _prepare(self) -> list[Path]:
        """Make the folder, check that it can be written to, and return the checkpoints in it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder) as probe:
                probe.write(b"\0")
        except OSError as error:
            raise self._explain(error, "cannot be written to") from error
        return self._list()

    def _enter(self, path: Path) -> str:
        """Lock the folder, tidy it up, and return a token for a name that nobody can foresee."""
        lock(self._folder)
        if not self._tested:
            for new in filter(is_ours, {*self._list()} - self._known):
                msg = f"another process has saved {new.name} since this run began: run it again"
                raise FileExistsError(errno.EEXIST, msg)
            for leftover in self._folder.glob(".step-*.part"):
                _remove(leftover)
        token = secrets.token_hex(4)
        if os.path.lexists(path) and not is_ours(path):
            if path not in self._damaged:
                msg = "there is something that fastamp has not written"
                raise FileExistsError(errno.EEXIST, msg)
            path.replace(path.with_name(f"{path.name}.{token}.damaged"))
        return token

    def _write(self, part: Path, state: dict[str, Any]) -> None:
        try:
            write_file(part, state)
        except NOT_PICKLED as error:
            self._refuse(state, error)

    def _test(self, part: Path, state: dict[str, Any]) -> None:
        """Read a file back; raise an error that names an entry that cannot be."""
        try:
            self._read(part, lambda _: None)
        except DamagedError as error:
            self._refuse(state, error, f"{part}: ")

    def _refuse(self, state: dict[str, Any], error: Exception, prefix: str = "") -> NoReturn:
        """Raise an error that names the entry of a state that a checkpoint cannot hold."""
        name = find_strange(state)
        if name is None:
            raise error
        problem = str(error).removeprefix(prefix)
        msg = f"{self._argument}={self._folder}: nothing is saved: its [{name!r}] {problem}"
        raise CheckpointError(msg) from error

    def _publish(self, part: Path, path: Path, kept: set[Path]) -> None:
        """Rename a finished checkpoint, and remove those that are not kept."""
        aside = path.with_name(f".{path.name}.old")
        if path.is_dir():  # it would prevent the renaming
            path.replace(aside)
        if part.is_dir():
            sync_folder(part)  # the names in it
        part.replace(path)
        sync_folder(self._folder)
        self._known |= {path, aside}
        for old in filter(self._may_go, self._known - kept):
            gone = old.with_name(f".{old.name}.part")  # may be left in half
            _remove(gone)
            old.replace(gone)
            if gone.is_dir():  # else a loss of power may leave half of it under its old name
                sync_folder(self._folder)
            _remove(gone)

    def _may_go(self, path: Path) -> bool:
        """Say whether a file or folder is ours, or an empty file that has been passed over."""
        is_empty = path in self._damaged and path.is_file() and not path.stat().st_size
        return is_empty or is_ours(path)

    def _read(self, path: Path, check: Check) -> dict[str, Any]:
        state: dict[str, Any] = self._ranks.together(lambda: self._read_own(path, check))
        return state

    def _read_own(self, path: Path, check: Check) -> dict[str, Any]:
        if path.is_dir():
            msg = f"{path}: was written by several ranks: torchrun --nproc-per-node 1 resumes it"
            raise (CheckpointError if is_ours(path) else DamagedError)(msg)
        return read_file(path, check)

    def _list(self) -> list[Path]:
        paths = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(paths, key=lambda path: (_step_of(path), path.name))

    def _explain(self, error: OSError, problem: str) -> OSError:
        return OSError(error.errno, f"{self._argument}={self._folder}: {problem}: {error.strerror}")


def _step_of(path: Path) -> int:
    return int("".join(filter(str.isdigit, path.name)))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):  # a leftover is removed by the next run
            path.unlink()
