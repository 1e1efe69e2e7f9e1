"""The step of training without a loss scale: bf16 and fp32."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from fastamp._ops import Clip, StepReport, untraced
from fastamp.step.arguments import as_bound, check_group, check_optimizers
from fastamp.step.make_step import make_step

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@untraced
def optimizer_step(
    optimizer: Optimizer | Sequence[Optimizer],
    max_norm: float | None = None,
    zero_grad: bool = False,  # noqa: FBT001, FBT002 - read as optimizer_step(optimizer, 1.0, True)
    process_group: "ProcessGroup | None" = None,
) -> StepReport:
    """Clip the gradients to `max_norm`, check them, and step if all are finite, in one call.

    It replaces `clip_grad_norm_`, `optimizer.step()` and, with `zero_grad`, `zero_grad()`.

    Args:
        optimizer: applies the gradients; several in a list or tuple are clipped to one norm.
        max_norm: largest norm of all gradients together. Without it they are neither clipped nor
            checked, as in torch.
        zero_grad: set the gradients to None afterwards, also after a skipped step. Call
            `optimizer.zero_grad()` all the same where another loss sends gradients into these
            parameters, and after an error of the backward pass that the loop catches.
        process_group: ranks that hold different gradients and skip together; see `GradScaler`.

    Returns:
        What the step found and did; a value that is read on the host waits for the device.

    Raises:
        TypeError: an argument is of another type.
        ValueError: `max_norm` is NaN or below 0; a list is empty, or has one parameter in two
            optimizers; or parameters are FSDP1's, without a `process_group`.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> report = fastamp.optimizer_step(optimizer, max_norm=1.0, zero_grad=True)
        >>> report.norm
        tensor(4.4721)
    """
    several = isinstance(optimizer, list | tuple)
    optimizers: list[Optimizer] = [*optimizer] if several else [optimizer]  # type: ignore[misc, list-item]
    if several or not hasattr(optimizer, "param_groups"):
        check_optimizers(optimizers, "param_groups")
    if max_norm is not None and not (type(max_norm) is float and max_norm >= 0):
        max_norm = as_bound("max_norm", max_norm)
    if process_group is not None:
        check_group(process_group)
    clip = Clip(max_norm=max_norm)
    report, _ = make_step(optimizers, clip, group=process_group, zero_grad=bool(zero_grad))
    return report
