"""`fastamp.Checkpointer`: checkpoints as `fine_tune` writes them, for loops of the user's own."""

import logging
import math
import operator
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Self

from fastamp.data.own_threads import start
from fastamp.train.keeper import OWN_NAMES, SIGNS, Keeper, open_folder
from fastamp.train.ranks import Ranks
from fastamp.train.signals import Signals
from fastamp.train.weights import copied, save_weights

T = TypeVar("T")
_EXCHANGE_EVERY = 10  # steps, after which ranks tell each other of a signal


class Checkpointer:
    """Saves a training loop so that it resumes to the bit, whatever has ended it.

    A checkpoint is one file, `step-00000123.pt`, that is there whole or not at all, also after a
    kill or a loss of power. It holds the states of all that is given here, and of the random number
    generators of Python, NumPy, torch and every device.

    If torch.distributed is initialized, every rank makes a Checkpointer and calls the same methods.
    A checkpoint is then a folder, which all ranks must be able to reach, written by
    `torch.distributed.checkpoint`: shards of FSDP2 are written by their ranks. Any number of ranks
    can restore it; only the same number gets its random numbers back. `loader` is saved for each
    rank, the other parts as on the first rank.

    From the first save on the folder belongs to this process until it ends. Files of others in it
    stay as they are.

    Args:
        folder: is made if needed.
        model: may be compiled or in DistributedDataParallel; the keys are those of the module
            inside.
        optimizer: None if nothing is trained.
        scaler: a `torch.amp.GradScaler`, such as `fastamp.GradScaler`.
        loader: one with a state, such as `fastamp.DataLoader`, so that it resumes after the last
            batch delivered.
        scheduler: of the learning rate.
        keep: how many of the newest checkpoints to keep.
        best: "min" or "max" keeps, beside them, the one with the lowest or highest `metric` of
            `save`.
        in_thread: let `save` copy everything to the host's memory, and a thread write the copy. Not
            over ranks.
        parts: anything else with `state_dict` and `load_state_dict`, by a name of your choice. If
            it also has `check_state_dict(state)`, this is called before anything is restored, and
            raises a ValueError for a wrong state.

    Raises:
        OSError: the folder cannot be made or written to.
        TypeError: `folder` is no path, or a part has no `state_dict` or `load_state_dict`.
        ValueError: `keep`, `best` or `in_thread` is wrong, or the name of a part is taken.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> loader = fastamp.DataLoader(torch.randn(64, 4), 8, shuffle=True, seed=0)
        >>> parts = {"model": model, "optimizer": optimizer, "loader": loader}
        >>> checkpointer = fastamp.Checkpointer("run", **parts)
        >>> step = checkpointer.restore() or 0
        >>> with checkpointer.on_signal():
        ...     while step < 16:
        ...         for batch in loader:
        ...             model(batch).square().mean().backward()
        ...             report = fastamp.optimizer_step(optimizer, max_norm=1.0, zero_grad=True)
        ...             step += 1
        ...             checkpointer.save(step, every=8)
        >>> checkpointer.restore()
        16
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        scaler: Any = None,
        loader: Any = None,
        scheduler: Any = None,
        keep: int = 3,
        best: str | None = None,
        in_thread: bool = False,
        **parts: Any,
    ) -> None:
        parts = {"loader": loader, "scaler": scaler, "scheduler": scheduler, **parts}
        parts = {name: part for name, part in parts.items() if part is not None}
        has_ranks = dist.is_available() and dist.is_initialized()
        ranks = Ranks("ddp", dist.get_rank(), dist.get_world_size()) if has_ranks else Ranks()
        _check_arguments(folder, model, optimizer, parts)
        _expect("keep", keep, "an integer of at least 1", fine=type(keep) is int and keep > 0)
        _expect("best", best, "None, 'min' or 'max'", fine=best in [*SIGNS])  # may be a list
        alone = not (in_thread and has_ranks)
        _expect("in_thread", in_thread, "False where torch.distributed is initialized", fine=alone)
        words = {"argument": "folder", "anew": "another folder starts anew"}
        self._files = open_folder(folder, ranks, keep=keep, **words)
        self._keeper = Keeper(self._files, _inside(model), optimizer, parts, ranks, best=best)
        self._ranks, self._in_thread = ranks, in_thread
        self._signals: Signals | None = None
        self._thread: threading.Thread | None = None
        self._thread_step = -1  # that it writes
        self._error: BaseException | None = None  # of the thread

    def save(
        self, step: int, *, every: int | None = None, metric: float | Tensor | None = None
    ) -> None:
        """Write a checkpoint after a step; it replaces an earlier one of the same step.

        1. With `every`, return unless `step` is a multiple of it, or a signal has come.
        2. Wait for the thread that writes the checkpoint before, if there is one.
        3. Write to a temporary file, sync it, rename it, sync the folder; then remove older ones.
           With `in_thread` a thread does so from a copy: the call returns when the copy is made.
        4. After `on_signal`, if a signal has come: do what it does, such as exit.

        Args:
            step: how many steps are done, at least 0, and no less than before.
            every: steps between checkpoints; then call `save` at the end of every step.
            metric: what `best` compares: a number, waited for if it is on a device. A save without
                it is never the best. Without `best` it is ignored.

        Raises:
            OSError: the checkpoint cannot be written, or the one before could not be, in a thread;
                the other checkpoints are unchanged.
            CheckpointError: a state holds an object that could not be read back, since it is
                neither a tensor nor a plain value. The other checkpoints are unchanged.
            TypeError: `step` is no integer, or `metric` no number.
            ValueError: the folder has a checkpoint of a later step, which was not restored; or
                `step` or `every` is too small.
        """
        expected = "an integer of at least 0"
        step = _as(operator.index, "step", step, expected)
        newest = max(self._files.newest_step, self._thread_step)
        if newest > step >= 0:
            expected = f"at least {newest}, the newest checkpoint's, which restore() resumes"
        _expect("step", step, expected, fine=step >= max(newest, 0))
        fine = every is None or (type(every) is int and every > 0)
        _expect("every", every, "None or an integer of at least 1", fine=fine)
        is_due = every is None or step % every == 0
        received = self._received(step, is_due=is_due)
        if is_due or received is not None:
            self._save(step, metric)
        if received is not None and self._signals is not None:
            self.wait()
            self._signals.deliver(received)

    def restore(self, *, best: bool = False) -> int | None:
        """Apply the newest checkpoint that is whole, and return its step; None without any.

        All of it is checked before anything of it is applied. A damaged newer one is passed over
        with one warning, and removed after the next save. Reading runs no code of the file.

        Args:
            best: apply the best one; later ones are removed after the next save.

        Raises:
            CheckpointError: it is of another model, optimizer or other part, or something in it is
                wrong: the message names the file and the entry, and nothing has changed. Or a part
                of your own class has refused its state. Or all are damaged, or there is no best.
        """
        self.wait()
        state = self._keeper.restore(best=best, stacklevel=3)
        return None if state is None else int(state["step"])

    def on_signal(self) -> Self:
        """Defer SIGTERM and Ctrl-C until the next `save`, which then writes a checkpoint.

        Call `save(step, every=...)` at the end of every step, so that a signal waits for one step
        at most. A second signal acts at once. `with checkpointer.on_signal():` restores the
        handlers at the end, as `close` does. In any thread but the main one it does nothing. Over
        ranks all have to call this; a signal to one is then a signal to all, within 10 steps.

        Signal this process alone. A signal to its whole group may end a loader's worker processes,
        too: torch's error about them then ends the loop before the next `save`, and the steps since
        the last checkpoint are lost. Worker threads are not affected.
        """
        if self._signals is None:
            self._signals = Signals(enabled=True).__enter__()
        return self

    def wait(self) -> None:
        """Wait until the checkpoint that `save` has begun in a thread is written.

        Raises:
            OSError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread, self._thread_step = None, -1
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the thread, and restore the handlers of signals."""
        try:
            self.wait()
        finally:
            signals, self._signals = self._signals, None
            if signals is not None:
                signals.__exit__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save_weights(self, path: str | os.PathLike[str]) -> None:
        """Write only the model's tensors, as safetensors; the file is written whole or not at all.

        `safetensors.torch.load_model(model, path)` reads it. Over ranks all have to call this, and
        the first one writes whole tensors.

        Raises:
            ImportError: safetensors is not installed; it comes with the extra `safetensors`.
            OSError: it cannot be written.
        """
        save_weights(self._keeper.model, Path(path), self._ranks)

    def _received(self, step: int, *, is_due: bool) -> int | None:
        """Return a signal that this or another rank has received."""
        if self._signals is None:
            return None
        received = self._signals.received
        if self._ranks.mode is None:
            return received
        if not is_due and step % _EXCHANGE_EVERY:
            return None
        return max(self._ranks.gather(received or 0)) or None

    def _save(self, step: int, metric: float | Tensor | None) -> None:
        self.wait()
        if isinstance(metric, Tensor):
            metric = metric.detach()
        if metric is None or not self._keeper.sign:
            number = math.nan
        else:
            number = _as(float, "metric", metric, "a number")
        state = self._keeper.state(step, metric=number)
        if not self._in_thread:
            self._keeper.write(state)
            return
        thread = threading.Thread(target=self._write_in_thread, args=(copied(state),))
        thread.name, thread.daemon = "fastamp-checkpoint", False
        start(thread)
        self._thread, self._thread_step = thread, step

    def _write_in_thread(self, state: dict[str, Any]) -> None:
        """Write a copy; the next call raises the error."""
        try:
            self._keeper.write(state)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised there
            self._error = error
            logging.getLogger(__name__).error("%s", error)  # noqa: TRY400 - there may be no call


def _check_arguments(folder: Any, model: Any, optimizer: Any, parts: dict[str, Any]) -> None:
    kinds: dict[str, Any] = {
        "folder": (folder, (str, os.PathLike), "a path"),
        "model": (model, nn.Module, "a torch.nn.Module"),
    }
    if optimizer is not None:
        kinds["optimizer"] = (optimizer, Optimizer, "a torch.optim.Optimizer or None")
    for name, (value, kind, expected) in kinds.items():
        if not isinstance(value, kind):
            msg = f"{name}: expected {expected}, got {type(value).__name__}"
            raise TypeError(msg)
    for name, part in parts.items():
        _expect(name, name, "another name: checkpoints use this one", fine=name not in OWN_NAMES)
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            remedy = "; fastamp.DataLoader has both" if name == "loader" else ""
            wanted = f"expected an object with state_dict and load_state_dict{remedy}"
            msg = f"{name}: {wanted}, got {type(part).__name__}"
            raise TypeError(msg)


def _as(convert: Callable[[Any], T], name: str, value: Any, expected: str) -> T:
    """Convert an argument, or raise a TypeError that names it."""
    try:
        return convert(value)
    except (TypeError, ValueError) as error:
        msg = f"{name}: expected {expected}, got {value!r}"
        raise TypeError(msg) from error


def _expect(name: str, value: Any, expected: str, *, fine: bool) -> None:
    if not fine:
        msg = f"{name}: expected {expected}, got {value!r}"
        raise ValueError(msg)


def _inside(model: nn.Module) -> nn.Module:
    """Return the module that the user has compiled or wrapped."""
    while True:
        inside = getattr(model, "_orig_mod", None)
        if isinstance(model, DistributedDataParallel):
            inside = model.module
        if not isinstance(inside, nn.Module):
            return model
        model = inside
