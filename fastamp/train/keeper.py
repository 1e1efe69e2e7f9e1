"""A checkpoint's content: collected from a run's parts, checked against another run's, applied."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from fastamp.train.batches import Batches
from fastamp.train.check import (
    ANY,
    attempt,
    check,
    check_equal,
    check_model,
    check_optimizer,
    check_part,
)
from fastamp.train.checkpoint import Checkpoints
from fastamp.train.random_state import all_devices, check_rng_state, rng_state, set_rng_state
from fastamp.train.ranks import Ranks
from fastamp.train.state_file import CheckpointError, find_kinds

SIGNS = {None: 0, "min": 1, "max": -1}  # of a metric that is better when it is lower
OWN_NAMES = {"best", "files", "format", "kinds", "n_with_state", "ranks", "rng", "step"}
"""A checkpoint's own entries: no part may have such a name."""


def open_folder(folder: Any, ranks: Ranks, **options: Any) -> Checkpoints:
    """Return the checkpoints of a folder: files of one process, or folders of several ranks."""
    kind = Checkpoints
    if ranks.mode is not None:
        from fastamp.train.sharded_checkpoint import ShardedCheckpoints  # noqa: PLC0415 - slow

        kind = ShardedCheckpoints
    return kind(folder, ranks=ranks, **options)


class Keeper:
    """Saves and restores all parts of a run.

    Args:
        checkpoints: where they are saved.
        model: its state is that of the first rank, or sharded.
        optimizer: None without one.
        parts: anything else with `state_dict` and `load_state_dict`, by name. "loader" is each
            rank's own, the others are the same on all. If one has `check_state_dict(state)`, which
            raises a ValueError, this is called before anything is changed.
        ranks: of the run.
        devices: whose random numbers are saved, None for all.
        best: "min" or "max" keeps the checkpoint with the lowest or highest metric.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        model: nn.Module,
        optimizer: Optimizer | None,
        parts: dict[str, Any],
        ranks: Ranks,
        devices: Sequence[torch.device] | None = None,
        best: str | None = None,
    ) -> None:
        self.checkpoints, self.model, self.optimizer = checkpoints, model, optimizer
        self.parts, self.ranks, self._devices = parts, ranks, devices
        self.sign = SIGNS[best]
        """1 if a lower metric is better, -1 if a higher one is, 0 if no best is kept."""
        self.best: list[Any] | None = None
        """The step of the best checkpoint and its metric."""
        self.as_many = True
        """Whether as many ranks wrote the checkpoint that is being checked, or was restored."""

    def own_state(self) -> dict[str, Any]:
        """Return what differs between the ranks."""
        own = {name: self.parts[name].state_dict() for name in self._of_rank()}
        return own | {"rng": rng_state(all_devices() if self._devices is None else self._devices)}

    def is_better(self, metric: float) -> bool:
        """Say whether a checkpoint with a metric, which may be NaN, would be the best one."""
        if not self.sign or math.isnan(metric):
            return False
        return self.best is None or self.sign * (self.best[1] - metric) > 0

    @property
    def best_path(self) -> Path | None:
        """Where the best checkpoint is."""
        return None if self.best is None else self.checkpoints.path_of(self.best[0])

    def state(
        self, step: int, own: dict[str, Any] | None = None, metric: float = math.nan
    ) -> dict[str, Any]:
        """Return the states of all parts, to be written; `own` may be an earlier `own_state`."""
        best = [step, metric] if self.is_better(metric) else self.best
        own = _without_numpy(own or self.own_state())
        shared = {n: p.state_dict() for n, p in self.parts.items() if n not in own}
        shared = _without_numpy(shared)
        for name, kept in shared.items():
            if any(hasattr(leaf, "full_tensor") for leaf in tree_leaves(kept)):
                msg = f"{name}: only model and optimizer may be sharded"
                raise ValueError(msg)
        state = {"step": step, **own, **shared, "kinds": self._kinds(), "best": best}
        state["model"] = self.model.state_dict()
        state["model"].update(_without_numpy({**state["model"]}))  # keeps its _metadata
        if self.optimizer is not None:
            state["optimizer"] = _without_numpy(self.optimizer.state_dict())
            state["n_with_state"] = len(state["optimizer"]["state"])
        if self.ranks.mode is not None:
            state["ranks"] = self.ranks.gather(own)
        return state

    def write(self, state: dict[str, Any]) -> None:
        """Write what `state` has returned, or a copy of it.

        Raises:
            CheckpointError, OSError: see `Checkpoints.save`.
        """
        self.checkpoints.save(state["step"], state, state["best"] and state["best"][0])
        self.best = state["best"]

    def restore(self, *, best: bool = False, stacklevel: int) -> dict[str, Any] | None:
        """Load the newest whole checkpoint, or the best one, and return its state.

        All of it is checked before anything of it is loaded.

        Raises:
            CheckpointError: see `Checkpoints.load`; or there is no best one.
        """
        state = self.checkpoints.load(self._check, stacklevel + 1)
        if state is not None and best:
            if state["best"] is None:
                needs = "Checkpointer(best=...) and save(metric=...)"
                msg = f"best: there is none until step {state['step']}: it needs {needs}"
                raise CheckpointError(msg)
            self.checkpoints.go_back(state["best"][0])
            state = self.checkpoints.load(self._check, stacklevel + 1)
        if state is None:
            return None
        own = self._own(state)
        # First the loader: it may still refuse its state, and nothing has changed then.
        names = sorted(self.parts, key=lambda name: name != "loader")
        parts = {name: (self.parts[name], {**state, **own}[name]) for name in names}
        self.checkpoints.restore(state, parts, self.model, self.optimizer)
        self.best = state["best"]
        if self.as_many:
            set_rng_state(own["rng"], self._all_devices(own["rng"]))
        return state

    def _of_rank(self) -> list[str]:
        return [name for name in self.parts if name == "loader"]

    def _kinds(self) -> dict[str, str]:
        """Return the classes of the parts, except those that are fine_tune's own."""
        optimizer = {} if self.optimizer is None else {"optimizer": self.optimizer}
        kinds = {name: type(part) for name, part in {**optimizer, **self.parts}.items()}
        own = "fastamp.train."
        return {n: k.__name__ for n, k in kinds.items() if not k.__module__.startswith(own)}

    def _all_devices(self, state: dict[str, Any]) -> Sequence[torch.device]:
        if self._devices is not None:
            return self._devices
        return all_devices(begins=bool(state["devices"]))

    def _own(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a checkpoint, and find out how many ranks wrote it."""
        everyone = state.get("ranks", [state])
        self.as_many = len(everyone) == self.ranks.count
        own: dict[str, Any] = everyone[self.ranks.rank if self.as_many else 0]
        return {name: own[name] for name in (*self._of_rank(), "rng")}

    def _check(self, state: dict[str, Any]) -> None:
        """Raise a ValueError that says why a checkpoint cannot be resumed; nothing changes."""
        check_equal(state.get("kinds"), self._kinds(), "['kinds']", set())
        of_rank = dict.fromkeys([*self._of_rank(), "rng"], ANY)
        like = of_rank | dict.fromkeys([*self.parts, "format", "kinds", "best", "model"], ANY)
        like["step"] = 0
        if self.optimizer is not None:
            like |= {"optimizer": ANY, "n_with_state": 0}
        if self.ranks.mode is not None:
            like |= {"ranks": ANY, "files": ANY}
        check(state, like, "")
        self._check_best(state["best"])
        at = ""
        if self.ranks.mode is not None:
            found = state["ranks"]
            n_found = len(found) if isinstance(found, list) and found else self.ranks.count
            check(found, [of_rank] * n_found, "['ranks']")
            at = f"['ranks'][{self.ranks.rank if n_found == self.ranks.count else 0}]"
        own = self._own(state)
        rng = own["rng"]
        check_model(state["model"], self.model.state_dict())
        if self.optimizer is not None:
            check_optimizer(state["optimizer"], self.optimizer, state["n_with_state"])
        for name, part in self.parts.items():
            place = f"{at if name in own else ''}[{name!r}]"
            check_part({**state, **own}[name], part, place)
        loader: Any = self.parts.get("loader")
        is_shared = isinstance(loader, Batches) or getattr(loader, "_shard", None) is not None
        if loader is not None and not (self.as_many or is_shared):
            wanted = "another number of them needs a fastamp.DataLoader with shard=True"
            msg = f"{len(state['ranks'])} ranks wrote it, {wanted}"
            raise ValueError(msg)
        attempt(lambda: check_rng_state(rng, self._all_devices(rng)), f"{at}['rng']")

    @staticmethod
    def _check_best(best: Any) -> None:
        if best is not None:
            check(best, [0, ANY], "['best']")
            if type(best[1]) is not float or math.isnan(best[1]):
                msg = f"its ['best'] is {best!r}, expected a step and a number"
                raise ValueError(msg)


def _without_numpy(state: Any) -> Any:
    """Return a state with Python's numbers in place of NumPy's, which a checkpoint cannot hold.

    A scheduler's metric may be one, and a group's learning rate.
    """
    if not any(issubclass(kind, np.generic) for kind in find_kinds(state)):
        return state
    return tree_map_only(np.generic, np.generic.item, state)
