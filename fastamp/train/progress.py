"""`Progress`: how far a run has come, and which options it must keep; a part of its checkpoint."""

import math
from typing import Any

from fastamp.train.config import TrainConfig
from fastamp.train.fits import check_equal

# A run resumes only if these agree with the checkpoint's, and the precision does.
_FIXED = ["batch_size", "accumulate", "seed", "lr", "weight_decay", "max_norm", "schedule"]
_FIXED += ["warmup_steps", "metric", "mode"]
_OF_RANKS = {"batch_size", "accumulate", "total_steps"}  # another number of ranks may change them
_OF_LENGTH = {"total_steps", "warmup_steps"}  # a longer run may change them


class Progress:
    """The place of a run of `total` steps, or of any length, on a number of ranks."""

    def __init__(self, config: TrainConfig, total: int | None, n_ranks: int) -> None:
        self._config, self._total, self._n_ranks = config, total, n_ranks
        self._patience = config.patience or math.inf
        self._sign = 1 if config.mode == "min" else -1
        self.step = self.epoch = self.evaluated_at = 0
        self.has_ended = False
        """No batch is left in the pass; its last step may not be done yet."""
        self.best = self._sign * math.inf
        """The best metric; infinite until the first evaluation."""
        self.n_worse = 0
        """Evaluations since the best one."""
        self.is_stopped = False
        """`patience` or the user's callback has ended the run."""
        self.former_total, self.former_ranks = total, n_ranks
        """Of the run that is resumed."""

    @property
    def place(self) -> tuple[int, ...]:
        """How far the run has come."""
        return self.step, self.epoch, self.evaluated_at

    @property
    def has_trained(self) -> bool:
        """Whether no step is left."""
        config = self._config
        if config.max_steps is None:
            return self.epoch >= config.epochs or self.is_stopped
        return self.step >= config.max_steps or self.is_stopped

    def compare(self, value: float) -> bool:
        """Count an evaluation; return whether it is the best one."""
        is_best = self._sign * value < self._sign * self.best
        self.best, self.n_worse = (value, 0) if is_best else (self.best, self.n_worse + 1)
        self.is_stopped = self.n_worse >= self._patience
        return is_best

    def state_dict(self) -> dict[str, Any]:
        """Return the place and the options."""
        config = {name: getattr(self._config, name) for name in _FIXED}
        config |= {"precision": self._config.effective_precision, "total_steps": self._total}
        state = {"config": config, "place": self.place, "has_ended": self.has_ended}
        return state | {"best": self.best, "n_worse": self.n_worse, "n_ranks": self._n_ranks}

    def check_state_dict(self, state: Any) -> None:
        """Raise a ValueError that says why another run's checkpoint cannot be resumed."""
        theirs, ours = state["config"], self.state_dict()["config"]
        is_shorter = (theirs["total_steps"] or math.inf) < (self._total or 0)
        may_differ = _OF_LENGTH if is_shorter else set()
        check_equal(theirs, ours, may_differ if state["n_ranks"] == self._n_ranks else _OF_RANKS)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.step, self.epoch, self.evaluated_at = state["place"]
        self.has_ended, self.former_ranks = state["has_ended"], state["n_ranks"]
        self.former_total = state["config"]["total_steps"]
        self.best, self.n_worse = state["best"], state["n_worse"]
        self.is_stopped = self.n_worse >= self._patience
