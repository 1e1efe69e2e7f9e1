"""Checkpoints: one file each, complete or absent."""

import errno
import os
import pickle
import re
import secrets
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from fastamp.train.lock import lock
from fastamp.train.ranks import Ranks

FindProblem: TypeAlias = Callable[[dict[str, Any]], str | None]

_FORMAT = "fastamp.train 2"
_OURS = _FORMAT.rpartition(" ")[0].encode()  # near the start of every file, of any version
_NAME = re.compile(r"step-[0-9]{8,}(\.pt)?")  # a folder where several ranks wrote it
RUN = "run.pt"  # in a folder: everything except the tensors of model and optimizer


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be resumed; the message names it, and the newest good one."""


class Checkpoints:
    """The checkpoints of one run in one folder, `step-00000123.pt` and the like.

    Args:
        folder: is made if needed. From the first save on it is locked for this process; then files
            that killed runs left half-written are removed, and files of anybody else never.
        keep: how many of the newest checkpoints to keep.
        resume: False starts anew: older checkpoints are removed when the first one is written.
        ranks: of the run. An error on one rank is raised on all.

    Raises:
        OSError: the folder cannot be made or written to.
    """

    suffix = ".pt"

    def __init__(
        self, folder: str | os.PathLike[str], *, keep: int, resume: bool, ranks: Ranks
    ) -> None:
        self._folder, self._keep, self._ranks = Path(folder).absolute(), keep, ranks
        self._is_tested = False  # whether a checkpoint of this run has been read again
        found = ranks.first(self._prepare)
        self._mine: list[Path] = found if resume else []
        self._known = {*found}  # what this run may remove

    def save(
        self, step: int, state: dict[str, Any], model: nn.Module, optimizer: Optimizer
    ) -> None:
        """Write a checkpoint under a temporary name, then rename it.

        Raises:
            OSError: it cannot be written; the other checkpoints are unchanged.
            CheckpointError: it is the first one, and could not be read again.
        """
        path = self._folder / f"step-{step:08d}{self.suffix}"
        try:
            token = self._ranks.first(lambda: self._enter(path))
        except OSError as error:
            raise self._explain(error, f"{path.name} cannot be written") from error
        part = path.with_name(f".{path.name}.{token}.part")
        self._mine = [*(mine for mine in self._mine if mine != path), path]
        try:
            self._write(part, state, model, optimizer)
            if not self._is_tested:
                self._read(part, lambda _: None)
                self._is_tested = True
            self._ranks.first(lambda: self._publish(part, path))
        except OSError as error:
            raise self._explain(error, f"{path.name} cannot be written") from error
        finally:
            _remove(part)

    def load(self, find_problem: FindProblem) -> dict[str, Any] | None:
        """Return the state of the newest checkpoint, None if there is none.

        Raises:
            CheckpointError: it cannot be read, or has a problem.
        """
        if not self._mine:
            return None
        newest, *others = reversed(self._mine)
        try:
            return self._read(newest, find_problem)
        except CheckpointError as error:
            offer = ""
            for path in others:
                with suppress(CheckpointError):
                    self._read(path, find_problem)
                    offer = f"; {path} is good: remove {newest.name} to resume from it"
                    break
            msg = f"{error}{offer}; resume=False starts anew"
            raise CheckpointError(msg) from error

    def restore(self, state: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
        """Load what `load` returned into the model and the optimizer."""
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

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
        """Lock the folder, tidy it up, and return a name that nobody can have foreseen."""
        lock(self._folder)
        if not self._is_tested:
            for new in filter(_is_ours, {*self._list()} - self._known):
                msg = f"another process has saved {new.name} since this run began: run it again"
                raise FileExistsError(errno.EEXIST, msg)
            for leftover in self._folder.glob(".step-*.part"):
                _remove(leftover)
        if os.path.lexists(path) and not _is_ours(path):
            raise FileExistsError(errno.EEXIST, "there is something that fastamp has not written")
        return secrets.token_hex(4)

    def _write(
        self, part: Path, state: dict[str, Any], model: nn.Module, optimizer: Optimizer
    ) -> None:
        write_file(part, state | {"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    def _publish(self, part: Path, path: Path) -> None:
        """Rename a finished checkpoint, and remove those that are not kept."""
        if path.is_dir():  # it would prevent the renaming
            _remove(path)
        part.replace(path)
        _sync_folder(self._folder)
        self._known.add(path)
        for old in filter(_is_ours, self._known - {*self._mine[-self._keep :]}):
            gone = old.with_name(f".{old.name}.part")  # half a folder is none of ours
            _remove(gone)
            _remove(old.replace(gone))

    def _read(self, path: Path, find_problem: FindProblem) -> dict[str, Any]:
        state: dict[str, Any] = self._ranks.together(lambda: self._read_own(path, find_problem))
        return state

    def _read_own(self, path: Path, find_problem: FindProblem) -> dict[str, Any]:
        if path.is_dir():
            msg = f"{path}: was written by several ranks: torchrun --nproc-per-node 1 resumes it"
            raise CheckpointError(msg)
        return read_file(path, find_problem)

    def _list(self) -> list[Path]:
        paths = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(paths, key=lambda path: int(path.stem.removeprefix("step-")))

    def _explain(self, error: OSError, problem: str) -> OSError:
        return OSError(error.errno, f"checkpoint_dir={self._folder}: {problem}: {error.strerror}")


def write_file(path: Path, state: dict[str, Any]) -> None:
    """Write a state to the disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
        try:
            torch.save({"format": _FORMAT, **state}, file)
        except RuntimeError as error:  # torch raises it in place of an OSError
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
        file.flush()
        os.fsync(file.fileno())


def read_file(path: Path, find_problem: FindProblem) -> dict[str, Any]:
    """Return the state in a file; raise a CheckpointError if it is damaged or has a problem."""
    state: Any = None
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load does not check the sums
        if damaged is None:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))
        of_what = f" of {kind[1]}" if kind else ""
        msg = f"{path}: holds an object{of_what}, which is neither a tensor nor a plain value"
        raise CheckpointError(msg) from error
    except Exception as error:  # unpickling a foreign file can raise anything
        msg = f"{path}: is cut short or no checkpoint: {error}"
        raise CheckpointError(msg) from error
    found = state.get("format") if isinstance(state, dict) else None
    problem = find_problem(state) if found == _FORMAT else f"expected {_FORMAT!r}, got {found!r}"
    if damaged or problem:
        msg = f"{path}: {f'is damaged in {damaged}' if damaged else problem}"
        raise CheckpointError(msg)
    return state  # type: ignore[no-any-return]


def _is_ours(path: Path) -> bool:
    """Say whether a file or folder carries our format, of any version, damaged or not."""
    file = path / RUN if path.is_dir() else path
    if path.is_symlink() or not file.is_file():  # a FIFO would block
        return False
    with file.open("rb") as opened:
        return _OURS in opened.read(4096)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
