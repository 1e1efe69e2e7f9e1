"""`fastamp.Checkpointer`: collects the states of a loop's parts, checks them, and restores them."""

import math
import os
import pickle
import warnings
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fastamp.data.checks import as_integer
from fastamp.data.loader import DataLoader, check_state, find_share_of
from fastamp.train import ranks
from fastamp.train.folder import Folder
from fastamp.train.random_state import rng_state, set_rng_state
from fastamp.train.signals import DEFERRED, Signals
from fastamp.train.state_file import CheckpointError, DamagedError, read_file, write_file
from fastamp.train.states import check_equal, check_model, describe, load_part, to_saved

_EXCHANGE_EVERY = 10  # steps, after which ranks tell each other of a signal
_SIGNS = {None: 0, "min": 1, "max": -1}  # of a metric that is better when it is lower
_OF_RANK = ("loader", "rng")  # that each rank saves for itself
_EXPECTED = {"model": "a module", "loader": "fastamp.DataLoader or torchdata's StatefulDataLoader"}
# A checkpoint's own entries: no part may have such a name.
_OWN_NAMES = {"best", "format", "kinds", "names", "ranks", "rng", "step"}


class Checkpointer:
    """Saves a training loop so that it resumes to the bit, whatever has ended it.

    A checkpoint is one file, `step-00000123.pt`, that is there whole or not at all, also after a
    kill or a loss of power. It holds the states of all that is given here, and of the random number
    generators of Python, NumPy, torch and CUDA. What is in the folder at first is this run's own.

    Over ranks each makes a Checkpointer and calls the same methods. The first one writes the file:
    of FSDP2's shards whole tensors, gathered one by one on its host, `loader` of each rank, the
    rest as on the first. Any number of ranks restores it; as many get their random numbers back.

    Args:
        folder: is made at the first save; ~ is the home folder.
        model: the module inside a compiled one or DDP is saved. Its state_dict has all parameters.
        optimizer: of one that Accelerate or Fabric has wrapped, the optimizer inside.
        scaler: a `torch.amp.GradScaler`, such as `fastamp.GradScaler`.
        loader: resumes after the last batch delivered, such as `fastamp.DataLoader`.
        scheduler: of the learning rate.
        keep: how many of the newest checkpoints to keep.
        best: "min" or "max" also keeps the one with the lowest or highest `metric` of `save`.
        parts: anything else with `state_dict` and `load_state_dict`, by a name of your choice. Its
            `check_state_dict(state)`, if any, raises a ValueError before anything is restored.

    Raises:
        OSError: the folder cannot be read.
        TypeError: `folder` is no path, a part is of a wrong kind, or a loader has no position.
        ValueError: `keep`, `best`, `folder` or a part's name is wrong; `model` leaves out a weight.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> checkpointer = fastamp.Checkpointer("run", model=model, optimizer=optimizer)
        >>> done = checkpointer.restore() or 0
        >>> with checkpointer.on_signal():
        ...     for step in range(done + 1, 17):
        ...         model(torch.randn(8, 4)).square().mean().backward()
        ...         report = fastamp.optimizer_step(optimizer, max_norm=1.0, zero_grad=True)
        ...         checkpointer.save(step, every=8)
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
        **parts: Any,
    ) -> None:
        as_integer("keep", keep, least=1, optional=False)
        _expect("best", best, "None, 'min' or 'max'", fine=best in [*_SIGNS])  # may be a list
        # The loader is first: it refuses another one's state, before anything changes. The
        # scheduler comes before the optimizer, whose state has the rate.
        parts = {"loader": loader, "model": model, **parts, "scheduler": scheduler}
        parts |= {"optimizer": optimizer, "scaler": scaler}
        self._parts = {n: _part(n, each) for n, each in parts.items() if each is not None}
        named, state = self._parts["model"].named_parameters(), self._parts["model"].state_dict()
        left_out = [name for name, _ in named if name not in state]
        _expect("model", left_out, "no parameter left out of its state_dict", fine=not left_out)
        self._folder = Folder(folder, keep=keep)
        self._newest = ranks.first(self._folder.newest)  # which may be damaged
        self._mode = best
        self._best: dict[str, Any] | None = None  # the step, metric and mode of the best checkpoint
        self._signals: Signals | None = None

    @property
    def best_path(self) -> Path | None:
        """The best checkpoint that this run has saved, or has found in what it restored."""
        return None if self._best is None else self._folder.path_of(self._best["step"])

    def save(
        self, step: int, *, every: int | None = None, metric: float | Tensor | None = None
    ) -> None:
        """Write a checkpoint after a step; it replaces an earlier one of the same step.

        1. With `every`, return unless `step` is a multiple of it, or a signal has come.
        2. Write to a temporary file, sync it, rename it, sync the folder; then remove older ones.
        3. After `on_signal`, if a signal has come: do what it does, such as exit.

        Args:
            step: how many steps are done, no less than the newest checkpoint has.
            every: steps between checkpoints; then call `save` at the end of every step.
            metric: a number, which `best` compares, waited for on a device. None is never best.

        Raises:
            OSError: the checkpoint cannot be written, or another run has saved in the folder. A
                TimeoutError: another rank has not called it within a minute.
            CheckpointError: a state holds an object that is neither a tensor nor a plain value. As
                after an OSError, the other checkpoints are unchanged.
            ValueError: `step` or `every` is too small, or no integer.
        """
        step = as_integer("step", step, least=0, optional=False)
        if step < (self._newest or 0):
            msg = f"step: {self._folder.path} has step {self._newest} already, got {step}: "
            raise ValueError(msg + "restore() it, or take another folder")
        every = as_integer("every", every, least=1)
        is_due = every is None or step % every == 0
        received = self._signals.received if self._signals is not None else None
        if ranks.count() > 1:
            if not is_due and (self._signals is None or step % _EXCHANGE_EVERY):
                return
            ranks.meet("save")
            received = max(ranks.gather(received or 0)) or None
        if is_due or received is not None:
            self._save(step, metric)
        if received is not None and self._signals is not None:
            self._signals.deliver(received)

    def restore(self, *, only: Collection[str] | None = None, best: bool = False) -> int | None:
        """Apply the newest checkpoint that is whole, and return its step; None without any.

        Before that the classes of the parts, the model's names, shapes and dtypes, and the names of
        the optimizer's parameters are compared. A damaged newer checkpoint is passed over with one
        warning, and removed after the next save. Reading runs no code of the file.

        Args:
            only: names of parts, as ("model",) for the weights of any run, and "rng" for the random
                numbers. None is every part, which the checkpoint has to have alike.
            best: apply the best one; later ones are removed after the next save.

        Raises:
            CheckpointError: it does not fit: the message names the file and what differs, and
                nothing has changed. Or all are damaged, or there is no best.
            ValueError: `only` names no part of this Checkpointer, or a part refuses its state.
        """
        known = {*self._parts, "rng"}
        expected = f"names of {sorted(known)}, such as only=('model',)"
        _expect("only", only, expected, fine=only is None or known >= {*only})
        path_of, newest = self._folder.path_of, self._folder.newest
        state, damage, step = None, "", ranks.first(newest)
        while state is None and step is not None:
            try:
                state = ranks.together(self._read, step, only)
            except DamagedError as error:  # noqa: PERF203 - one pass, unless there is damage
                damage += f"{error}; "
                step = ranks.first(newest, step)
        if state is None and damage:
            msg = f"{damage}there is no whole one; another folder starts anew"
            raise CheckpointError(msg)
        if state is None:
            return None
        if best and state["best"] is None:
            msg = f"best: there is none until step {state['step']}: no save had a metric"
            raise CheckpointError(msg)
        if best:
            state = ranks.together(self._read, state["best"]["step"], only)
        if damage and ranks.rank() == 0:
            warnings.warn(f"{damage}resumed from {path_of(state['step'])}", stacklevel=2)
        self._newest, self._best = state["step"], state["best"]
        for name, part in _chosen(self._parts, only).items():
            ranks.together(self._load, state, name, part)
        if len(state["ranks"]) == ranks.count() and (only is None or "rng" in only):
            set_rng_state(state["rng"])
        return int(state["step"])

    def on_signal(self, *numbers: int) -> Signals:
        """Defer SIGTERM and Ctrl-C until the next `save`, which then writes a checkpoint.

        Call `save(step, every=...)` at the end of every step; a second signal acts at once. A
        `with` block restores the handlers at its end. Outside the main thread it does nothing.
        Over ranks all have to call this; a signal to one is then one to all, within 10 steps.

        Args:
            numbers: of the module `signal`, in place of SIGTERM and SIGINT: SLURM's --signal sends
                SIGUSR1, a closed terminal SIGHUP. One without a handler ends in a SystemExit.
        """
        if self._signals is not None:
            self._signals.__exit__()  # or its handlers would be those to restore
        self._signals = Signals(numbers or DEFERRED)
        return self._signals

    def _save(self, step: int, metric: Any) -> None:
        state, own = ranks.together(self._collect, step, metric)
        state = {name: to_saved(value, keeps=ranks.rank() == 0) for name, value in state.items()}
        state["ranks"] = ranks.gather(own)
        best, write = state["best"], partial(write_file, state=state)
        ranks.first(self._folder.publish, step, best and best["step"], write)
        self._best, self._newest = best, step

    def _collect(self, step: int, metric: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the state that is the same on all ranks, and what is this rank's own."""
        best = self._best
        if metric is not None and self._mode is not None:
            sign, number = _SIGNS[self._mode], float(metric)
            before = sign * math.inf if best is None else best["metric"]
            if sign * (before - number) > 0:  # NaN is not better
                best = {"step": step, "metric": number, "mode": self._mode}
        state = {"step": step, "best": best, **describe(self._parts)}
        states = {n: part.state_dict() for n, part in self._parts.items()} | {"rng": rng_state()}
        own = {n: to_saved(states.pop(n), keeps=True) for n in _OF_RANK if n in states}
        if ranks.count() > 1:
            pickle.dumps(own)  # an error after this one would let the other ranks wait
        return state | states, own

    def _read(self, step: int, only: Collection[str] | None) -> dict[str, Any]:
        """Return a step's state, checked; the first rank compares the checksums."""
        path = self._folder.path_of(step)
        state = read_file(path, compares_sums=ranks.rank() == 0)
        as_many = len(state["ranks"]) == ranks.count()
        state |= state["ranks"][ranks.rank() if as_many else 0]
        try:
            self._check(state, only, as_many=as_many)
        except ValueError as error:
            msg = f"{path}: {error}; another folder starts anew"
            raise CheckpointError(msg) from error
        return state

    def _load(self, state: dict[str, Any], name: str, part: Any) -> None:
        try:
            load_part(part, state[name])
        except ValueError as error:
            msg = f"{self._folder.path_of(state['step'])}: {name}: {error}"
            raise ValueError(msg) from error

    def _check(self, state: dict[str, Any], only: Collection[str] | None, *, as_many: bool) -> None:
        """Raise a ValueError that says why a checkpoint cannot be resumed; nothing changes."""
        chosen, own = _chosen(self._parts, only), describe(self._parts)
        check_equal(*(_chosen(each["kinds"], only) for each in (state, own)))
        for name, part in chosen.items():
            if isinstance(part, nn.Module):
                check_model(state[name], part.state_dict(), name)
            elif isinstance(part, Optimizer):
                check_equal(state["names"][name], own["names"][name])
            elif hasattr(part, "check_state_dict"):
                part.check_state_dict(state[name])
        if state["best"] and self._mode is not None:
            check_equal({"best": state["best"]["mode"]}, {"best": self._mode})
        if not as_many and "loader" in chosen and not find_share_of(chosen["loader"]):
            msg = f"{len(state['ranks'])} ranks wrote it, other numbers need a "
            raise ValueError(msg + "fastamp.DataLoader(shard=True)")


def _chosen(parts: dict[str, Any], only: Collection[str] | None) -> dict[str, Any]:
    """Return the parts to restore, or what is given for them."""
    return {name: part for name, part in parts.items() if only is None or name in only}


def _part(name: str, part: Any) -> Any:
    """Return a part without what DDP, torch.compile, Accelerate or Fabric has put around it."""
    _expect(name, name, "another name: checkpoints use this one", fine=name not in _OWN_NAMES)
    has_states = hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
    if not has_states or (name == "model" and not isinstance(part, nn.Module)):
        msg = f"{name}: expected {_EXPECTED.get(name, 'state_dict and load_state_dict')}"
        raise TypeError(msg + f", got {type(part)!r}")
    if isinstance(part, DataLoader):
        check_state(part)
    is_optimizer = isinstance(part, Optimizer)
    inside = getattr(part, "optimizer", None) if is_optimizer else ranks.unwrapped(part)
    return inside if isinstance(inside, (nn.Module, Optimizer)) else part


def _expect(name: str, value: Any, expected: str, *, fine: bool) -> None:
    if not fine:
        msg = f"{name}: expected {expected}, got {value!r}"
        raise ValueError(msg)
