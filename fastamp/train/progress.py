"""`Progress`: how far a run has come, and which options it must keep; a part of its checkpoint."""

import math
from typing import Any

from fastamp.train import ranks
from fastamp.train.config import TrainConfig
from fastamp.train.optimizer import Schedule
from fastamp.train.states import check_equal

# A run resumes only if these agree with the checkpoint's, and the precision does.
_FIXED = ["batch_size", "accumulate", "seed", "lr", "weight_decay", "max_norm", "schedule"]
_FIXED += ["warmup_steps", "metric", "mode"]


class Progress:
    """The place of a run of `n_steps`, or of any length, and of its schedule."""

    def __init__(self, config: TrainConfig, n_steps: int | None, schedule: Schedule) -> None:
        self._config, self._schedule = config, schedule
        self._fixed: dict[str, Any] = {name: getattr(config, name) for name in _FIXED}
        self._fixed |= {"precision": config.effective_precision, "total_steps": n_steps}
        self.mode = self._fixed["mode"] = config.mode or "min"
        self._fixed["learning rates of groups"] = schedule.base_lrs
        self.step = self.epoch = self.evaluated_at = 0
        self.is_within = False  # an epoch that has begun
        self.best = math.inf  # of the metrics, which are negative where a higher one is better
        self.n_worse = 0  # evaluations since the best one
        self.is_stopped = False  # by the user's callback

    @property
    def place(self) -> tuple[int, ...]:
        """How far the run has come."""
        return self.step, self.epoch, self.is_within, self.evaluated_at

    @property
    def ended_by(self) -> str:
        """The names of the options that have ended the run; empty while it is to go on."""
        config = self._config
        name, done = ("max_steps", self.step) if config.max_steps else ("epochs", self.epoch)
        ended = [name] * (done >= getattr(config, name))
        ended += ["patience"] * (self.n_worse >= (config.patience or math.inf))
        return " and ".join(ended + ["on_evaluation"] * self.is_stopped)

    def compare(self, value: float) -> bool:
        """Count an evaluation; return whether it is the best one."""
        value = value if self.mode == "min" else -value
        is_best = value < self.best
        self.best, self.n_worse = (value, 0) if is_best else (self.best, self.n_worse + 1)
        return is_best

    def state_dict(self) -> dict[str, Any]:
        """Return the place and the options, once the last report has changed the rate."""
        self._schedule.read()
        counts = {"n_taken": self._schedule.n_taken, "best": self.best, "n_worse": self.n_worse}
        return {"config": self._fixed, "n_ranks": ranks.count(), "place": self.place} | counts

    def check_state_dict(self, state: Any) -> None:
        """Raise a ValueError that says why another run's checkpoint cannot be resumed."""
        theirs, ours = (each["total_steps"] for each in (state["config"], self._fixed))
        is_longer = (theirs or 0) < (ours or math.inf)
        may_differ = {"total_steps", "warmup_steps"} if is_longer else set()
        if state["n_ranks"] != ranks.count():
            may_differ |= {"batch_size", "accumulate"}
        check_equal(state["config"], self._fixed, may_differ)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.step, self.epoch, self.is_within, self.evaluated_at = state["place"]
        self.best, self.n_worse = state["best"], state["n_worse"]
        self._schedule.n_taken = state["n_taken"]
