"""Accelerate, and with it the Hugging Face Trainer: fastamp's scaler in place of torch's.

A `fastamp.DataLoader` needs nothing of this: `accelerator.prepare(loader)` takes it as it is.
"""

import warnings
from typing import Any

import torch

from fastamp.step import GradScaler

__all__ = ["prepare_scaler"]


class _Scaler(GradScaler):
    """Tells Accelerate's optimizers when a step was skipped.

    They regard a step as skipped if the scaler has not called the optimizer; but a fused optimizer
    is called every time, and skips by itself.
    """

    def __init__(self, accelerator: Any, device: str, *, enabled: bool) -> None:
        super().__init__(device, enabled=enabled)
        self._accelerator = accelerator

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step as `fastamp.GradScaler`; waits for the device."""
        retval = super().step(*args, **kwargs)
        if self.last_step.skipped:
            for wrapper in self._accelerator._optimizers:  # False already for the others
                wrapper._accelerate_step_called = False
        return retval


def prepare_scaler(accelerator: Any) -> GradScaler | None:
    """Replace the scaler of an Accelerator by a `fastamp.GradScaler` in the same state.

    `accelerator.optimizer_step_was_skipped` then reports skipped steps of fused optimizers too, so
    that schedulers do not advance on a skipped step. Call it once, before or after
    `accelerator.prepare`; for the Hugging Face Trainer, `prepare_scaler(trainer.accelerator)`
    before `trainer.train()`.

    Args:
        accelerator: an `accelerate.Accelerator`.

    Returns:
        The accelerator's new scaler; None if it has none to replace. It has one with "fp16" on an
        accelerator device only; with "bf16", without mixed precision and on a CPU a UserWarning
        says that nothing was replaced.

    Raises:
        TypeError: the scaler is not torch's own, as with FSDP.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> accelerator.scaler = torch.amp.GradScaler("cpu")  # what "fp16" makes on a GPU
        >>> isinstance(prepare_scaler(accelerator), fastamp.GradScaler)
        True
    """
    stock = accelerator.scaler
    if stock is None:
        where = f"mixed_precision={accelerator.mixed_precision!r} on {accelerator.device.type!r}"
        msg = (
            "prepare_scaler: the Accelerator has no GradScaler, so nothing is replaced: "
            f"{where} scales no losses"
        )
        warnings.warn(msg, stacklevel=2)
        return None
    if isinstance(stock, _Scaler):
        return stock
    if type(stock) is not torch.amp.GradScaler:
        msg = f"accelerator.scaler: expected a torch.amp.GradScaler, got {type(stock).__name__}"
        raise TypeError(msg)
    scaler = _Scaler(accelerator, stock._device, enabled=stock.is_enabled())
    scaler.load_state_dict(stock.state_dict())
    accelerator.scaler = scaler
    for optimizer in accelerator._optimizers:
        optimizer.scaler = scaler
    return scaler
