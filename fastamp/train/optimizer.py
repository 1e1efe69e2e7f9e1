"""The optimizer and its learning rate, which advances after each step that was taken."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

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
    """Return the optimizer of the parameters that require a gradient; the options go with a name.

    Without `fused=` it is fused if torch supports that for the parameters.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        msg = f"model: {type(model).__name__} has no parameter that requires a gradient"
        raise ValueError(msg)
    if isinstance(kind, str):
        try:
            return OPTIMIZERS[kind](parameters, **{"fused": True} | options)  # type: ignore[no-any-return]
        except RuntimeError:  # not fused for this device or dtype
            return OPTIMIZERS[kind](parameters, **options)  # type: ignore[no-any-return]
    made: Any = kind(parameters)
    if not isinstance(made, torch.optim.Optimizer):
        msg = f"optimizer: expected a callable that returns an Optimizer, it returned {made!r}"
        raise TypeError(msg)
    return made


class Schedule:
    """The learning rate: advances after a step that was taken, and learns of it one step later.

    By then the flag has been copied to the host while the device worked, so nothing waits.
    """

    def __init__(self, optimizer: Optimizer, lr_factor: Callable[[int], float]) -> None:
        self._scheduler = LambdaLR(optimizer, lr_factor)
        self._found_inf: Tensor | None = None  # of the last step, until `advance` has read it
        self._copied: torch.cuda.Event | None = None
        self.n_skipped = 0

    def expect(self, found_inf: Tensor) -> None:
        """Start to copy the flag that says whether a step was skipped."""
        self._found_inf = found_inf.to("cpu", non_blocking=True)
        if found_inf.is_cuda:
            self._copied = torch.cuda.current_stream(found_inf.device).record_event()

    def advance(self) -> None:
        """Read the flag of the last step, if that has not been done."""
        if self._found_inf is None:
            return
        if self._copied is not None:
            self._copied.synchronize()
        if self._found_inf:
            self.n_skipped += 1
        else:
            self._scheduler.step()
        self._found_inf = None

    def rescale(self, old_total: int, total: int) -> None:
        """Keep the share of the schedule that is done when its length in steps changes."""
        self._scheduler.last_epoch = round(self._scheduler.last_epoch / max(old_total, 1) * total)

    def state_dict(self) -> dict[str, Any]:
        """Return the state; `advance` comes before it."""
        base_lrs = [*self._scheduler.base_lrs]
        n_taken = self._scheduler.last_epoch
        return {"n_taken": n_taken, "n_skipped": self.n_skipped, "base_lrs": base_lrs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the optimizer's own state has the rate."""
        self._scheduler.last_epoch, self.n_skipped = state["n_taken"], state["n_skipped"]
        self._scheduler.base_lrs = state["base_lrs"]
