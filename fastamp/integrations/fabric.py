"""Lightning Fabric: after one call `fabric.clip_gradients` and `optimizer.step()` are fastamp's."""

from typing import Any

import torch
from torch import Tensor

from fastamp.integrations.patching import (
    clip_once,
    has_methods_of,
    is_unscaled,
    put_before,
    replace_scaler,
    step_and_update,
    stock,
)
from fastamp.step import GradScaler, clip_grad_norm_, clip_grad_value_
from fastamp.step.native import parameters_of

__all__ = ["prepare"]

STEP_BY_THEMSELVES = ("FSDPStrategy", "DeepSpeedStrategy", "XLAStrategy", "XLAFSDPStrategy")


def prepare(fabric: Any) -> GradScaler:
    """Let Fabric clip and step with fastamp, in all its precisions.

    The loop stays as it is, `loss.backward()` in "32-true" and "bf16-true" too.
    `fabric.clip_gradients(model, optimizer, max_norm=...)` reads the gradients once, unscales and
    clips them, and returns their norm. Fused optimizers are clipped in fp16 too, which Fabric alone
    refuses. `error_if_nonfinite`, which Fabric sets unless told otherwise, waits for the device and
    raises before anything is clipped; without it a norm that is not finite skips the step, which
    does not read the gradients a second time.

    Args:
        fabric: a `lightning.fabric.Fabric`, before or after its `setup`.

    Returns:
        The scaler that makes the steps, for its `last_step` and `skipped_steps`: the precision
        plugin's new scaler or, if it has none, one that is not enabled.

    Raises:
        TypeError: the scaler is not torch's own.
        ValueError: FSDP1, DeepSpeed and XLA clip and step by themselves.

    Example:
        >>> from lightning.fabric import Fabric
        >>> fabric = Fabric(accelerator="cpu", precision="bf16-mixed")
        >>> scaler = prepare(fabric)
        >>> model = torch.nn.Linear(4, 1)
        >>> model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
        >>> fabric.backward(model(torch.ones(2, 4)).sum())
        >>> norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        >>> optimizer.step()
        >>> scaler.last_step.skipped
        False
    """
    strategy = fabric.strategy
    names = {cls.__name__ for cls in type(strategy).__mro__}
    if refused := names.intersection(STEP_BY_THEMSELVES):
        msg = f"fabric: its {refused.pop()} clips and steps by itself"
        raise ValueError(msg)
    if not has_methods_of(strategy, _Strategy):
        scaler = replace_scaler(strategy.precision, "precision")
        put_before(strategy, _Strategy)
        strategy._stepper = scaler
    return strategy._stepper  # type: ignore[no-any-return]


class _Strategy:
    """The methods that replace those of a Fabric strategy."""

    _stepper: GradScaler

    def optimizer_step(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> Any:
        """Step, and update the scale."""
        if isinstance(optimizer, torch.optim.LBFGS):
            return stock(self).optimizer_step(optimizer, **kwargs)
        return step_and_update(self._stepper, optimizer, **kwargs)

    def clip_gradients_norm(
        self,
        module: torch.nn.Module,  # noqa: ARG002 - its signature
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,  # noqa: FBT001, FBT002 - its signature
    ) -> Tensor:
        """Unscale and clip an optimizer's gradients, and return their norm; see `prepare`."""
        if norm_type != 2:
            self._unscale(optimizer)
            parameters = parameters_of([optimizer])
            return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        norm = clip_once(self._stepper, [optimizer], max_norm)
        if error_if_nonfinite and not norm.isfinite():
            msg = f"the total norm of the gradients is {norm.item()}: see error_if_nonfinite"
            raise RuntimeError(msg)
        return norm

    def clip_gradients_value(
        self,
        module: torch.nn.Module,  # noqa: ARG002 - its signature
        optimizer: torch.optim.Optimizer,
        clip_val: float,
    ) -> None:
        """Clip every element of an optimizer's gradients, at once."""
        self._unscale(optimizer)
        clip_grad_value_(parameters_of([optimizer]), clip_val)

    def _unscale(self, optimizer: torch.optim.Optimizer) -> None:
        if self._stepper.is_enabled() and not is_unscaled(self._stepper, optimizer):
            self._stepper.unscale_(optimizer)
