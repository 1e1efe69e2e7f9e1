"""The step of training without a loss scale: bf16 and fp32."""

import threading
from collections.abc import Sequence

from torch.optim import Optimizer

from fastamp._ops import untraced
from fastamp.step.report import StepReport
from fastamp.step.scaler import GradScaler

_own = threading.local()


@untraced
def optimizer_step(
    optimizer: Optimizer | Sequence[Optimizer],
    max_norm: float | None = None,
    zero_grad: bool = False,  # noqa: FBT001, FBT002 - read as optimizer_step(optimizer, 1.0, True)
) -> StepReport:
    """Clip the gradients to `max_norm`, check them, and step if all are finite, in one call.

    It does the same as `GradScaler(enabled=False).step`, and replaces `clip_grad_norm_`,
    `optimizer.step()` and, with `zero_grad`, `optimizer.zero_grad()`.

    Args:
        optimizer: applies the gradients; several in a list or tuple are clipped to one norm.
        max_norm: largest norm of all gradients together. Without it they are neither clipped nor
            checked, as in torch.
        zero_grad: set the gradients to None afterwards, also after a skipped step. If another loss
            sends gradients into these parameters before their next backward pass, as an actor's
            does into a critic, call `optimizer.zero_grad()` before that pass all the same. A loop
            that catches an error of the backward pass, as out of memory, and tries again calls it
            in the handler: half a gradient is left.

    Returns:
        What the step found and did; a value that is read on the host waits for the device.

    Raises:
        TypeError: `optimizer` is not an optimizer, or `max_norm` not a number.
        ValueError: `max_norm` is NaN or below 0; a list is empty, has an optimizer twice, or has
            one parameter in two optimizers.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> report = fastamp.optimizer_step(optimizer, max_norm=1.0, zero_grad=True)
        >>> report.norm
        tensor(4.4721)
    """
    try:
        scaler: GradScaler = _own.scaler
    except AttributeError:
        scaler = _own.scaler = GradScaler(enabled=False)
    scaler.step(optimizer, max_norm=max_norm, zero_grad=zero_grad)
    return scaler.last_step
