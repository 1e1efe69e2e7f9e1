"""The optimizer and its learning rate, which advances after each step that was taken."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fastamp.step import GradScaler
from fastamp.train.check import check

OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
}
SCHEDULES: dict[str, Callable[[float], float]] = {  # by the share of the steps after the warm-up
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
    "linear": lambda share: 1 - share,
    "constant": lambda _: 1.0,
}


def make_optimizer(
    model: nn.Module, kind: str | Callable[[list[nn.Parameter]], Optimizer], **options: Any
) -> Optimizer:
    """Return the optimizer of the parameters that require a gradient; a callable gets no options.

    Without `fused=` it is fused if torch supports that for the parameters.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        msg = f"model: {type(model).__name__} has no parameter that requires a gradient"
        raise ValueError(msg)
    if isinstance(kind, str):
        # torch refuses complex ones only in the step.
        fused = {"fused": not any(p.is_complex() for p in parameters) or None}
        try:
            return OPTIMIZERS[kind](parameters, **fused | options)  # type: ignore[no-any-return]
        except RuntimeError:  # not fused for this device or dtype
            return OPTIMIZERS[kind](parameters, **options)  # type: ignore[no-any-return]
    made: Any = kind(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        msg = f"optimizer: expected a callable that returns an Optimizer, it returned {made!r}"
        raise TypeError(msg)
    return made


class Schedule:
    """The learning rate, which the scaler advances after a step that was taken."""

    def __init__(
        self, optimizer: Optimizer, scaler: GradScaler, lr_factor: Callable[[int], float]
    ) -> None:
        self.scheduler, self._scaler = LambdaLR(optimizer, lr_factor), scaler
        self._skipped_before = 0  # by the runs that this one resumes

    @property
    def n_skipped(self) -> int:
        """How many steps were skipped; waits for the device."""
        return self._skipped_before + self._scaler.skipped_steps

    @property
    def lr(self) -> float:
        """The next step's rate, of the first group."""
        optimizer = self.scheduler.optimizer  # reading it makes the scheduler settle the last step
        return float(optimizer.param_groups[0]["lr"])

    def rescale(self, old_total: int, total: int) -> None:
        """Keep the share of the schedule that is done when its length in steps changes."""
        self.scheduler.last_epoch = round(self.scheduler.last_epoch / max(old_total, 1) * total)

    def set_lr(self) -> None:
        """Set the learning rates of a schedule whose length has changed."""
        groups = self.scheduler.optimizer.param_groups
        factors = zip(self.scheduler.lr_lambdas, self.scheduler.base_lrs, strict=True)
        for group, (factor, base_lr) in zip(groups, factors, strict=True):
            group["lr"] = base_lr * factor(self.scheduler.last_epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        base_lrs = [*self.scheduler.base_lrs]
        n_taken = self.scheduler.last_epoch
        return {"n_taken": n_taken, "n_skipped": self.n_skipped, "base_lrs": base_lrs}

    def check_state_dict(self, state: Any) -> None:
        """Raise a ValueError unless `load_state_dict` can restore it."""
        check(state, self.state_dict(), "state")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the optimizer's own state has the rate."""
        self.scheduler.last_epoch, self._skipped_before = state["n_taken"], state["n_skipped"]
        self.scheduler.base_lrs = state["base_lrs"]
