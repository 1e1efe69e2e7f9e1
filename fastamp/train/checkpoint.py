"""Checkpoints: one file each, there whole or not at all, and the signals that ask for one."""

from __future__ import annotations

import os
import pickle
import random
import re
import shutil
import signal
import threading
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from torch import nn
    from typing_extensions import Self

__all__ = [
    "DEFERRED",
    "CheckpointError",
    "Checkpoints",
    "Signals",
    "read_file",
    "rng_state",
    "set_rng_state",
    "write_file",
]

DEFERRED = (signal.SIGTERM, signal.SIGINT)
_FORMAT = "fastamp.train 1"
_NAME = re.compile(r"step-\d{8,}(\.pt)?")  # folders are those of several ranks


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be resumed; the message names it, and the newest that can."""


class Checkpoints:
    """The checkpoints of one run in one folder, `step-00000123.pt` and the like.

    Args:
        folder: is made; what killed runs left there half-written is removed.
        keep: how many stay, the newest ones.
        resume: False for a run that starts anew: those that are there go when it writes its first.

    Raises:
        OSError: the folder cannot be made or written to.
    """

    suffix = ".pt"

    def __init__(self, folder: str | os.PathLike[str], *, keep: int, resume: bool) -> None:
        self._folder, self._keep = Path(folder).absolute(), keep
        self._is_readable = False  # what this run writes, as far as is known
        found = self._prepare()
        self._mine = found if resume else []

    def save(
        self, step: int, state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Write a checkpoint to the disk beside its place, and put it there in one step.

        Raises:
            OSError: it cannot be written; the others are as they were.
            CheckpointError: it is the first one, and could not be read again.
        """
        path = self._folder / f"step-{step:08d}{self.suffix}"
        part = path.with_name(f".{path.name}.part")
        self._mine = [*(mine for mine in self._mine if mine != path), path]
        try:
            self._write(part, state, model, optimizer)
            if not self._is_readable:
                self._read(part, lambda _: None)
                self._is_readable = True
            self._publish(part, path)
        except OSError as error:
            raise self._explain(error, f"{path.name} cannot be written") from error
        finally:
            _remove(part)

    def load(self, problem: Callable[[dict[str, Any]], str | None]) -> dict[str, Any] | None:
        """Return the newest checkpoint's state, None if there is none.

        Args:
            problem: says what is wrong with a state, if anything is.

        Raises:
            CheckpointError: it cannot be read, or there is a problem with it.
        """
        if not self._mine:
            return None
        newest, *others = reversed(self._mine)
        try:
            return self._read(newest, problem)
        except CheckpointError as error:
            offer = ""
            for path in others:
                with suppress(CheckpointError):
                    self._read(path, problem)
                    offer = f"; {path} is good: remove {newest.name} to resume from it"
                    break
            msg = f"{error}{offer}; resume=False starts anew"
            raise CheckpointError(msg) from error

    def restore(
        self, state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Bring the model and the optimizer to what `load` returned."""
        optimizer.load_state_dict(state["optimizer"])
        model.load_state_dict(state["model"])

    def _prepare(self) -> list[Path]:
        """Make the folder fit to be written to, and return the checkpoints in it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / ".step-probe.part").write_bytes(b"\0")
            for leftover in self._folder.glob(".step-*.part"):
                _remove(leftover)
        except OSError as error:
            raise self._explain(error, "cannot be written to") from error
        return self._found()

    def _write(
        self,
        part: Path,
        state: dict[str, Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        tensors = {"optimizer": optimizer.state_dict(), "model": model.state_dict()}
        write_file(part, state | tensors)

    def _publish(self, part: Path, path: Path) -> None:
        """Put a whole checkpoint in its place, and remove what is not to be kept."""
        if path.is_dir():  # which would be in the way
            _remove(path)
        part.replace(path)
        _sync_folder(self._folder)
        for old in set(self._found()) - set(self._mine[-self._keep :]):
            _remove(old)

    def _read(self, path: Path, problem: Callable[[dict[str, Any]], str | None]) -> dict[str, Any]:
        if path.is_dir():
            msg = f"{path}: was written by several ranks: torchrun --nproc-per-node 1 resumes it"
            raise CheckpointError(msg)
        return read_file(path, problem)

    def _found(self) -> list[Path]:
        found = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.stem.removeprefix("step-")))

    def _explain(self, error: OSError, problem: str) -> OSError:
        return OSError(error.errno, f"checkpoint_dir={self._folder}: {problem}: {error.strerror}")


def write_file(path: Path, state: dict[str, Any]) -> None:
    """Write a state to the disk."""
    with path.open("wb") as file:
        try:
            torch.save({"format": _FORMAT, **state}, file)
        except RuntimeError as error:  # torch's, where writing has failed
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
        file.flush()
        os.fsync(file.fileno())


def read_file(path: Path, problem: Callable[[dict[str, Any]], str | None]) -> dict[str, Any]:
    """Return the state in a file; raise a CheckpointError if it is damaged or has a problem."""
    state: Any = None
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # which torch does not look for
        if damaged is None:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        kind = re.search(r"GLOBAL (\S+)", str(error))
        of_what = f" of {kind[1]}" if kind else ""
        msg = f"{path}: holds an object{of_what}, which is neither a tensor nor a plain value"
        raise CheckpointError(msg) from error
    except Exception as error:  # what is pickled in a foreign file can raise anything
        msg = f"{path}: is cut short or no checkpoint: {error}"
        raise CheckpointError(msg) from error
    found = state.get("format") if isinstance(state, dict) else None
    wrong = problem(state) if found == _FORMAT else f"expected {_FORMAT!r}, got {found!r}"
    if damaged or wrong:
        msg = f"{path}: {f'is damaged in {damaged}' if damaged else wrong}"
        raise CheckpointError(msg)
    return state  # type: ignore[no-any-return]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rng_state(device: torch.device, own: torch.Generator | None = None) -> dict[str, Any]:
    """Return the states of torch's, NumPy's and Python's default generators, and of one's own."""
    numpy: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - the program's, not one of ours
    numpy["state"]["key"] = numpy["state"]["key"].tolist()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": numpy,
        "python": random.getstate(),
        "own": own and own.get_state(),
    }


def set_rng_state(
    state: dict[str, Any], device: torch.device, own: torch.Generator | None = None
) -> None:
    """Restore what `rng_state` returned."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    np.random.set_state(state["numpy"])  # noqa: NPY002
    random.setstate(state["python"])
    if own is not None:
        own.set_state(state["own"])


class Signals:
    """Puts SIGTERM and Ctrl-C off until `deliver`; a second Ctrl-C interrupts at once.

    Only in the main thread, and only signals that something would have come of.
    """

    def __init__(self, *, enabled: bool) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        self._numbers = DEFERRED if enabled and in_main else ()
        self._previous: dict[int, Any] = {}
        self.heard: int | None = None
        self.received: int | None = None
        """What to act on: what this process, or a rank of its run, has heard."""

    def __enter__(self) -> Self:
        for number in self._numbers:
            previous = signal.getsignal(number)
            if previous not in (signal.SIG_IGN, None):
                self._previous[number] = previous
                signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())

    def deliver(self) -> None:
        """Do what the signal that was received, if any, would have done."""
        number, self.received = self.received, None
        if number is None:
            return
        self.heard = None
        previous = self._previous.get(number, signal.SIG_DFL)
        self.__exit__()
        if number == signal.SIGTERM and previous is signal.SIG_DFL:
            raise SystemExit(128 + number)  # and what is to be cleaned up is
        signal.raise_signal(number)
        self.__enter__()  # the program's own handler lets training go on

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.heard = number
        if number == signal.SIGINT:
            signal.signal(number, self._previous[number])
