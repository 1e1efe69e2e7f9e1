"""`fastamp.Checkpointer`: collects the states of a loop's parts, checks them, and restores them."""

import logging
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import Self

from fastamp.data.checks import as_integer
from fastamp.data.loader import DataLoader, check_state, find_share_of
from fastamp.train.check import (
    ANY,
    attempt,
    check,
    check_equal,
    check_model,
    check_optimizer,
    check_part,
)
from fastamp.train.random_state import all_devices, check_rng_state, rng_state, set_rng_state
from fastamp.train.ranks import Ranks
from fastamp.train.signals import Signals
from fastamp.train.state_file import CheckpointError, as_plain, read_file, write_file
from fastamp.train.store import Store
from fastamp.train.weights import check_whole, copied, load_model, save_weights

_EXCHANGE_EVERY = 10  # steps, after which ranks tell each other of a signal
_SIGNS = {None: 0, "min": 1, "max": -1}  # of a metric that is better when it is lower
# A checkpoint's own entries: no part may have such a name.
_OWN_NAMES = {"best", "files", "format", "kinds", "n_with_state", "ranks", "rng", "step"}


class Checkpointer:
    """Saves a training loop so that it resumes to the bit, whatever has ended it.

    A checkpoint is one file, `step-00000123.pt`, that is there whole or not at all, also after a
    kill or a loss of power. It holds the states of all that is given here, and of the random number
    generators of Python, NumPy, torch and every device.

    If torch.distributed is initialized, every rank makes a Checkpointer and calls the same methods.
    A checkpoint is then a folder, which all ranks must be able to reach (else `save` raises an
    OSError), written by `torch.distributed.checkpoint`: shards of FSDP2 are written by their ranks.
    Any number of ranks can restore it; only the same number gets its random numbers back. `loader`
    is saved for each rank, the other parts, and `metric`, as on the first rank.

    From the first save on the folder belongs to this process until it ends: it holds the lock of
    the file `.lock`, which stays. Another process that saves waits for up to a minute. Files of
    others in the folder stay as they are.

    Args:
        folder: is made if needed; ~ is the home folder.
        model: may be compiled or in DistributedDataParallel; the keys are those of the module
            inside. Its state_dict may leave out frozen parameters, as with LoRA: these are not
            saved, and `restore` leaves them as they are.
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
        OSError: the folder cannot be made or written to, or its file system has no renames.
        TypeError: `folder` is no path, or a part has no `state_dict` or `load_state_dict`.
        ValueError: `keep`, `best` or `in_thread` is wrong, `folder` is an address such as s3://, or
            the name of a part is taken.

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

    _argument, _anew = "folder", "another folder starts anew"  # in errors
    _devices: Sequence[torch.device] | None = None  # whose random numbers are saved; None for all

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
        parts |= {"loader": loader, "scaler": scaler, "scheduler": scheduler}
        parts = {name: part for name, part in parts.items() if part is not None}
        has_ranks = dist.is_available() and dist.is_initialized()
        ranks = Ranks("ddp", dist.get_rank(), dist.get_world_size()) if has_ranks else Ranks()
        alone = not (in_thread and has_ranks)

        def check_arguments() -> None:
            _check_kinds(folder, model, optimizer, parts)
            as_integer("keep", keep, least=1, optional=False)
            _expect("best", best, "None, 'min' or 'max'", fine=best in [*_SIGNS])  # may be a list
            _expect("in_thread", in_thread, "False over ranks", fine=alone)

        ranks.together(check_arguments)
        suffix = "" if has_ranks else ".pt"
        self._store = Store(folder, keep=keep, suffix=suffix, argument=self._argument)
        self._store.paths = ranks.first(self._store.open)
        self._model, self._optimizer, self._parts = _inside(model), optimizer, parts
        self._with_kind = parts if optimizer is None else parts | {"optimizer": optimizer}
        self._ranks, self._in_thread, self._sign = ranks, in_thread, _SIGNS[best]
        self._best: list[Any] | None = None  # the step of the best checkpoint, and its metric
        self._as_many = True  # ranks wrote the checkpoint that is being checked, or was restored
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
                the other checkpoints are unchanged. Or another process saves in the folder, or its
                file system has no locks.
            CheckpointError: a state holds an object that could not be read back, since it is
                neither a tensor nor a plain value; or the model's leaves out a parameter that is
                trained, or a persistent buffer. The other checkpoints are unchanged.
            TypeError: `metric` is no number.
            ValueError: the folder has a checkpoint of a later step, which was not restored; or
                `step` or `every` is too small, or no integer.
        """
        step = as_integer("step", step, least=0, optional=False)
        newest = max(self._store.newest_step, self._thread_step)
        expected = f"at least {newest}, the newest checkpoint's, which restore() resumes"
        _expect("step", step, expected, fine=step >= newest)
        every = as_integer("every", every, least=1)
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
        state = self._load()
        if state is not None and best:
            if state["best"] is None:
                needs = "Checkpointer(best=...) and save(metric=...)"
                msg = f"best: there is none until step {state['step']}: it needs {needs}"
                raise CheckpointError(msg)
            self._store.go_back(state["best"][0])
            state = self._load()
        if state is None:
            return None
        self._apply(state)
        return int(state["step"])

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
        save_weights(self._model, Path(path), self._ranks)

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

    def _is_better(self, metric: float) -> bool:
        """Say whether a checkpoint with a metric, which may be NaN, would be the best one."""
        if not self._sign or math.isnan(metric):
            return False
        return self._best is None or self._sign * (self._best[1] - metric) > 0

    def _best_path(self) -> Path | None:
        return None if self._best is None else self._store.path_of(self._best[0])

    def _save(self, step: int, metric: float | Tensor | None) -> None:
        self.wait()
        state = self._ranks.together(lambda: self._collect(step, metric))
        if self._ranks.mode is not None:
            state["ranks"] = self._ranks.gather({name: state[name] for name in self._of_rank()})
        if not self._in_thread:
            self._write(state)
            return
        thread = threading.Thread(target=self._write_in_thread, args=(copied(state),))
        thread.name, thread.daemon = "fastamp-checkpoint", False
        thread.start()
        self._thread, self._thread_step = thread, step

    def _of_rank(self) -> list[str]:
        """Return the names of the entries that differ between ranks."""
        return ["rng", *(self._parts.keys() & {"loader"})]

    def _collect(self, step: int, metric: float | Tensor | None) -> dict[str, Any]:
        """Return the states of all parts, to be written."""
        number = math.nan if metric is None or not self._sign else _as_number(metric)
        best = [step, number] if self._is_better(number) else self._best
        state: dict[str, Any] = {"step": step, "best": best, "kinds": self._kinds()}
        state["rng"] = rng_state(self._at())
        for name, part in {**self._with_kind, "model": self._model}.items():
            own, may_be_sharded = part.state_dict(), name in {"model", "optimizer"}
            try:
                if name == "model":
                    check_whole(self._model, own)
                state[name] = as_plain(own, may_be_sharded=may_be_sharded)
            except ValueError as error:
                msg = f"{self._store.title}: nothing is saved: its [{name!r}] {error}"
                raise CheckpointError(msg) from error
        if self._optimizer is not None:
            state["n_with_state"] = len(state["optimizer"]["state"])
        return state

    def _write(self, state: dict[str, Any]) -> None:
        """Write what `_collect` has returned, or a copy of it."""
        store, ranks, step, best = self._store, self._ranks, state["step"], state["best"]
        with store.named(f"{store.path_of(step).name} cannot be written"):
            part = ranks.first(lambda: store.begin(step))
            try:
                if ranks.mode is None:
                    write_file(part, state)
                else:
                    _sharded().write_folder(part, state, ranks)
                store.paths = ranks.first(lambda: store.publish(part, step, best and best[0]))
            finally:
                store.discard(part)
        self._best = best

    def _write_in_thread(self, state: dict[str, Any]) -> None:
        """Write a copy; the next call raises the error."""
        try:
            self._write(state)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised there
            self._error = error
            logging.getLogger(__name__).error("%s", error)  # noqa: TRY400 - there may be no call

    def _load(self) -> dict[str, Any] | None:
        """Return the state of the newest whole checkpoint, after a check of all that is in it."""
        try:
            state, problems = self._store.load(self._read)
        except CheckpointError as error:
            msg = f"{error}; {self._anew}"
            raise CheckpointError(msg) from error
        if problems:  # the filter may make the warning an error
            text = f"{'; '.join(problems)}; resumed from {self._store.paths[-1]}"
            self._ranks.first(lambda: warnings.warn(text, stacklevel=_level_outside()))
        return state

    def _read(self, path: Path) -> dict[str, Any]:
        read: Any = partial(read_file, path, self._check)
        if self._ranks.mode is not None:
            read = partial(_sharded().read_folder, path, self._check, self._ranks)
        state: dict[str, Any] = self._ranks.together(read)
        return state

    def _check(self, state: dict[str, Any]) -> None:
        """Raise a ValueError that says why a checkpoint cannot be resumed; nothing changes."""
        check_equal(state.get("kinds"), self._kinds(), "['kinds']", set())
        like = dict.fromkeys(["format", "kinds", "best", "model", "rng", *self._parts], ANY)
        like |= {"optimizer": ANY, "n_with_state": 0} if self._optimizer is not None else {}
        like |= {"ranks": ANY, "files": ANY} if self._ranks.mode is not None else {}
        check(state, like | {"step": 0}, "")
        if state["step"] != self._store.newest_step:
            msg = f"its ['step'] is {state['step']}, expected that of its name"
            raise ValueError(msg)
        everyone, n_ranks, at = state.get("ranks", [state]), self._ranks.count, ""
        if self._ranks.mode is not None:
            n_ranks = len(everyone) if isinstance(everyone, list) and everyone else n_ranks
            check(everyone, [dict.fromkeys(self._of_rank(), ANY)] * n_ranks, "['ranks']")
            at = f"['ranks'][{self._ranks.rank if n_ranks == self._ranks.count else 0}]"
        own = self._own(state)
        if state["best"] is not None:
            check(state["best"], [0, ANY], "['best']")
            if type(state["best"][1]) is not float or math.isnan(state["best"][1]):
                msg = f"its ['best'] is {state['best']}, expected a step and a number"
                raise ValueError(msg)
        check_model(state["model"], self._model.state_dict())
        if self._optimizer is not None:
            check_optimizer(state["optimizer"], self._optimizer, state["n_with_state"])
        for name, part in self._parts.items():
            check_part({**state, **own}[name], part, f"{at if name in own else ''}[{name!r}]")
        loader = self._parts.get("loader")
        is_shared = find_share_of(loader) is not None
        is_shared |= loader is None or hasattr(loader, "check_state_dict")  # which has decided
        if not (self._as_many or is_shared):
            wanted = "another number of them needs a fastamp.DataLoader with shard=True"
            msg = f"{n_ranks} ranks wrote it, {wanted}"
            raise ValueError(msg)
        attempt(lambda: check_rng_state(own["rng"], self._at(own["rng"])), f"{at}['rng']")

    def _own(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a checkpoint, and find out how many ranks wrote it."""
        everyone = state.get("ranks", [state])
        self._as_many = len(everyone) == self._ranks.count
        own: dict[str, Any] = everyone[self._ranks.rank if self._as_many else 0]
        return {name: own[name] for name in self._of_rank()}

    def _apply(self, state: dict[str, Any]) -> None:
        """Load what `_load` has returned: parts by name, then optimizer and model."""
        own = self._own(state)
        # First the loader: it may still refuse its state, and nothing has changed then.
        for name in sorted(self._parts, key=lambda name: name != "loader"):
            self._attempt(name, partial(load_part, self._parts[name], {**state, **own}[name]))
        self._attempt("model", lambda: self._apply_tensors(state))
        self._best = state["best"]
        if self._as_many:
            set_rng_state(own["rng"], self._at(own["rng"]))

    def _apply_tensors(self, state: dict[str, Any]) -> None:
        if self._ranks.mode is not None:
            path = self._store.paths[-1]
            _sharded().load_tensors(path, state, self._model, self._optimizer)
        if self._optimizer is not None:
            load_part(self._optimizer, state["optimizer"])
        load_model(self._model, state["model"])

    def _attempt(self, name: str, action: Callable[[], object]) -> None:
        """Let every error name the checkpoint and the entry, on all ranks."""

        def explained() -> None:
            try:
                attempt(action, f"[{name!r}]")
            except ValueError as error:
                msg = f"{self._store.paths[-1]}: {error}; {self._anew}"
                raise CheckpointError(msg) from error

        self._ranks.together(explained)

    def _kinds(self) -> dict[str, str]:
        """Return the classes of the parts, except those that are fine_tune's own."""
        kinds, own = {name: type(part) for name, part in self._with_kind.items()}, "fastamp.train."
        return {n: k.__name__ for n, k in kinds.items() if not k.__module__.startswith(own)}

    def _at(self, rng: dict[str, Any] | None = None) -> Sequence[torch.device]:
        """Return the devices whose random numbers are saved, or restored from a state."""
        begins = rng is not None and bool(rng["devices"])
        return all_devices(begins=begins) if self._devices is None else self._devices


def load_part(part: Any, state: Any) -> None:
    """Load the state of a part; of an optimizer's states the dtypes that were saved stay.

    torch casts them to the parameter's: of bfloat16 parameters Adafactor keeps float32 states. An
    optimizer that loads in a way of its own, as fastamp.AdamW, chooses the dtypes itself.
    """
    part.load_state_dict(state)
    if (
        not isinstance(part, Optimizer)
        or type(part).load_state_dict is not Optimizer.load_state_dict
    ):
        return
    parameters = [p for group in part.param_groups for p in group["params"]]
    places = [place for group in state["param_groups"] for place in group["params"]]
    for place, parameter in zip(places, parameters, strict=True):
        if place in state["state"]:
            part.state[parameter] = _in_saved_dtype(part.state[parameter], state["state"][place])


def _in_saved_dtype(loaded: Any, saved: Any) -> Any:
    """Return what an optimizer has loaded for a parameter, with the dtypes that were saved."""
    if isinstance(loaded, dict):
        return {key: _in_saved_dtype(value, saved[key]) for key, value in loaded.items()}
    if isinstance(loaded, (list, tuple)):
        return type(loaded)(map(_in_saved_dtype, loaded, saved))
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor) and loaded.dtype != saved.dtype:
        return saved.to(loaded.device, copy=True)
    return loaded


def _sharded() -> Any:
    """Return the module for checkpoints of ranks; torch's part of it is slow to import."""
    from fastamp.train import sharded_checkpoint  # noqa: PLC0415

    return sharded_checkpoint


def _level_outside() -> int:
    """Return the `stacklevel` of a warning, for its caller, of the code that has called fastamp."""
    package, frame, level = f"{Path(__file__).parents[1]}{os.sep}", sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    return level


def _check_kinds(folder: Any, model: Any, optimizer: Any, parts: dict[str, Any]) -> None:
    kinds: dict[str, Any] = {
        "folder": (folder, str | os.PathLike, "a path"),
        "model": (model, nn.Module, "a torch.nn.Module"),
        "optimizer": (optimizer, Optimizer | None, "a torch.optim.Optimizer or None"),
    }
    for name, (value, kind, expected) in kinds.items():
        if not isinstance(value, kind):
            msg = f"{name}: expected {expected}, got {type(value).__name__}"
            raise TypeError(msg)
    is_path = "://" not in os.fspath(folder)
    _expect("folder", folder, "a path of a mounted file system", fine=is_path)
    for name, part in parts.items():
        _expect(name, name, "another name: checkpoints use this one", fine=name not in _OWN_NAMES)
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            remedy = "; fastamp.DataLoader has both" if name == "loader" else ""
            wanted = f"expected an object with state_dict and load_state_dict{remedy}"
            msg = f"{name}: {wanted}, got {type(part).__name__}"
            raise TypeError(msg)
        if isinstance(part, DataLoader):
            check_state(part)


def _as_number(metric: Any) -> float:
    try:
        return float(metric.detach() if isinstance(metric, Tensor) else metric)
    except (TypeError, ValueError) as error:
        msg = f"metric: expected a number, got {metric!r}"
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
