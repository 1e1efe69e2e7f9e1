"""The optimizer and its learning rate, which advances after each step that was taken."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from fastamp.train import ranks

OPTIMIZERS: dict[str, Any] = {kind.__name__.lower(): kind for kind in (AdamW, Adam, SGD, Adagrad)}
SCHEDULES: dict[str, Callable[[float], float]] = {  # by the share of the steps after the warm-up
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
    "linear": lambda share: 1 - share,
    "constant": lambda _: 1.0,
}


def make_optimizer(
    trained: nn.Module, kind: str | Callable[[list[nn.Parameter]], Optimizer], **options: Any
) -> Optimizer:
    """Return the optimizer of what requires a gradient; a callable gets no options."""
    parameters = [p for p in trained.parameters() if p.requires_grad]
    if not parameters:
        msg = "model: expected a parameter that requires a gradient, it has none"
        raise ValueError(msg)
    if isinstance(kind, str):
        # torch's fused SGD and Adagrad take no sparse gradients, and no DTensors.
        fused = {"fused": True} if kind in {"adam", "adamw"} else {}
        try:
            return OPTIMIZERS[kind](parameters, **fused, **options)  # type: ignore[no-any-return]
        except RuntimeError:  # not fused for this device or dtype
            return OPTIMIZERS[kind](parameters, **options)  # type: ignore[no-any-return]
    made: Any = kind(parameters)
    groups = made.param_groups if isinstance(made, Optimizer) else [{"params": [None]}]
    known = {*map(id, trained.parameters())}
    if any(id(p) not in known for group in groups for p in group["params"]):
        msg = f"optimizer: expected a callable that makes one of its parameters, got {made!r:.200}"
        raise ValueError(msg)
    return made  # type: ignore[no-any-return]


def find_loss(loss_fn: Any, model: nn.Module, device: torch.device) -> nn.Module | None:
    """Return the loss, on a device, if it is a module with tensors that the model does not hold."""
    loss = getattr(loss_fn, "__self__", loss_fn)  # of a bound method
    if not isinstance(loss, nn.Module):
        return None
    known = {*map(id, model.parameters()), *map(id, model.buffers())}
    own = [t for t in (*loss.parameters(), *loss.buffers()) if id(t) not in known]
    if ranks.count() > 1 and any(tensor.requires_grad for tensor in own):
        msg = f"loss_fn: ranks share no parameters of {type(loss).__name__}: put it into the model"
        raise ValueError(msg)
    return loss.to(device) if own else None


class Schedule:
    """The learning rate, which advances after a step that was taken.

    On CUDA a step's report is copied to the host, and read, for `on_report`, when the next rate is
    asked for or before a checkpoint: the device has the next step's passes to do meanwhile.
    """

    def __init__(
        self, optimizer: Optimizer, lr_factor: Callable[..., float], on_report: Callable[..., Any]
    ) -> None:
        self._optimizer, self._lr_factor, self._on_report = optimizer, lr_factor, on_report
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.n_taken = 0  # steps, without the last one while its report is not read
        # That report, and on CUDA the event of its copy into pinned memory.
        self._unread: tuple[Tensor, torch.cuda.Event | None] | None = None
        self.set_lr()

    def advance(self, report: Tensor) -> None:
        """Advance after a step, unless it was skipped: its report is (norm, found_inf, ...)."""
        self.read()
        copied = None
        if report.is_cuda:
            # torch copies on the current stream of the report's device, after the step.
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            report, device = report.to("cpu", non_blocking=True), report.device
            copied.record(torch.cuda.current_stream(device))
        self._unread = report, copied
        if copied is None:
            self.read()

    def read(self) -> float:
        """Advance after the last step, if that is still to be done; return the next rate."""
        if self._unread is not None:
            (report, copied), self._unread = self._unread, None
            if copied is not None:
                copied.synchronize()
            numbers = report.tolist()
            self.n_taken += not numbers[1]
            self._on_report(numbers)
            self.set_lr()
        return float(self._optimizer.param_groups[0]["lr"])

    def set_lr(self) -> None:
        """Set the learning rates of the next step."""
        factor = self._lr_factor(self.n_taken)
        for group, base_lr in zip(self._optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base_lr * factor
