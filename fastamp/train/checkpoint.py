"""Checkpoints: one file each, complete or absent."""

import errno
import os
import pickle
import re
import secrets
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from fastamp._files import create, open_regular, sync_folder
from fastamp.train.lock import lock
from fastamp.train.ranks import Ranks

Check: TypeAlias = Callable[[dict[str, Any]], object]
"""Raises a ValueError that says why a state cannot be resumed; the state is a checkpoint's."""

_FORMAT = "fastamp.train 3"
_OURS = _FORMAT.rpartition(" ")[0].encode()  # near the start of every file, of any version
# A folder where several ranks wrote it; one that ends with ".old" is about to be replaced.
_NAME = re.compile(r"step-[0-9]{8,}(\.pt)?|\.step-[0-9]{8,}\.old")
RUN = "run.pt"  # in a folder: everything except the tensors of model and optimizer


# Of a path that is damaged, or no file; others, as a missing permission, are the machine's.
_DAMAGED = {errno.ENOENT, errno.EINVAL, errno.EIO, errno.ELOOP, errno.ENOTDIR, errno.ENXIO}
_ENTRY_NBYTES = 30  # an archive's, at least, beside its content


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be resumed; the message names it."""


class DamagedError(CheckpointError):
    """A checkpoint that cannot be read: the one before it can be resumed."""


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
        self._damaged: set[Path] = set()  # what it has passed over

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
        self._mine = [*(mine for mine in self._mine if _step_of(mine) != step), path]
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

    def load(self, check: Check) -> dict[str, Any] | None:
        """Return the state of the newest checkpoint, None if there is none.

        Damaged ones are passed over, with one warning, and removed after the next is saved.

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
                msg = f"{error}; resume=False starts anew"
                raise CheckpointError(msg) from error
            if problems and self._ranks.rank == 0:
                text = f"{'; '.join(problems)}; resumed from {self._mine[-1]}"
                warnings.warn(text, stacklevel=6)  # where fine_tune is called
            return state
        if problems:
            msg = f"{'; '.join(problems)}; there is no whole one; resume=False starts anew"
            raise CheckpointError(msg)
        return None

    def restore(
        self,
        state: dict[str, Any],
        parts: dict[str, tuple[Any, dict[str, Any]]],
        model: nn.Module,
        optimizer: Optimizer,
    ) -> None:
        """Load what `load` returned: parts by name, with their states; then optimizer and model.

        Raises:
            CheckpointError: one of them, being of the user's own class, refuses it.
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
                msg = f"{self._mine[-1]}: {problem}; resume=False starts anew"
                raise CheckpointError(msg) from error

        self._ranks.together(explained)

    def _restore(self, state: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
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
        """Lock the folder, tidy it up, and return a name that nobody can have foreseen."""
        lock(self._folder)
        if not self._is_tested:
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

    def _write(
        self, part: Path, state: dict[str, Any], model: nn.Module, optimizer: Optimizer
    ) -> None:
        write_file(part, state | {"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    def _publish(self, part: Path, path: Path) -> None:
        """Rename a finished checkpoint, and remove those that are not kept."""
        aside = path.with_name(f".{path.name}.old")
        if path.is_dir():  # it would prevent the renaming
            path.replace(aside)
        if part.is_dir():
            sync_folder(part)  # the names in it
        part.replace(path)
        sync_folder(self._folder)
        self._known |= {path, aside}
        for old in filter(is_ours, self._known - {*self._mine[-self._keep :]}):
            gone = old.with_name(f".{old.name}.part")  # half a folder is none of ours
            _remove(gone)
            old.replace(gone)
            if gone.is_dir():  # else a loss of power may leave half of it under its old name
                sync_folder(self._folder)
            _remove(gone)

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
        return OSError(error.errno, f"checkpoint_dir={self._folder}: {problem}: {error.strerror}")


def write_file(path: Path, state: dict[str, Any]) -> None:
    """Write a state to the disk."""
    with create(path) as file:
        try:
            torch.save({"format": _FORMAT, **state}, file)
        except RuntimeError as error:  # torch raises it in place of an OSError
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def read_file(path: Path, check: Check) -> dict[str, Any]:
    """Return the state in a file, if it is whole and passes the check.

    Raises:
        CheckpointError: it is of another version, or does not pass; a DamagedError if it is not
            whole, or nothing that `write_file` has written.
    """
    try:
        with open_regular(path) as file:
            _check_archive(file)
            file.seek(0)
            state: Any = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))
        of_what = f" of {kind[1]}" if kind else ""
        msg = f"{path}: holds an object{of_what}, which is neither a tensor nor a plain value"
        raise DamagedError(msg) from error
    except Exception as error:  # unpickling a foreign file can raise anything
        is_of_machine = isinstance(error, OSError) and error.errno not in _DAMAGED
        if is_of_machine or isinstance(error, MemoryError):
            msg = f"{path}: cannot be read: {error}"
            raise CheckpointError(msg) from error
        msg = f"{path}: is damaged or no checkpoint: {error}"
        raise DamagedError(msg) from error
    found = state.get("format") if isinstance(state, dict) else None
    if found != _FORMAT:
        is_ours = isinstance(found, str) and found.startswith(_OURS.decode())
        msg = f"{path}: expected {_FORMAT!r}, got {found!r}"
        raise (CheckpointError if is_ours else DamagedError)(msg)
    try:
        check(state)
    except ValueError as error:
        msg = f"{path}: {error}"
        raise CheckpointError(msg) from error
    return state  # type: ignore[no-any-return]


def _check_archive(file: BinaryIO) -> None:
    """Check the sums, which torch.load does not do, and that nothing in it expands."""
    nbytes = os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        needed = sum(entry.file_size + _ENTRY_NBYTES for entry in entries)
        if needed > nbytes or any(entry.compress_type for entry in entries):
            msg = f"its {len(entries)} entries would be larger than the file"
            raise zipfile.BadZipFile(msg)
        damaged = archive.testzip()
        if damaged is not None:
            msg = f"the sum of {damaged} is wrong"
            raise zipfile.BadZipFile(msg)


def is_ours(path: Path) -> bool:
    """Say whether a file or folder carries our format, of any version, damaged or not."""
    file = path / RUN if path.is_dir() else path
    if path.is_symlink() or not file.is_file():  # a FIFO would block
        return False
    with file.open("rb") as opened:
        return _OURS in opened.read(4096)


def _step_of(path: Path) -> int:
    return int("".join(filter(str.isdigit, path.name)))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):  # a leftover is removed by the next run
            path.unlink()
