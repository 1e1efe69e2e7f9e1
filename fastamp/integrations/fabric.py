"""Lightning Fabric: after one call `fabric.clip_gradients` and `optimizer.step()` are one pass."""

from typing import Any

import torch
from torch import Tensor

from fastamp.integrations.patching import has_methods_of, put_before, replace_scaler, stock
from fastamp.step import GradScaler, clip_grad_norm_, clip_grad_value_
from fastamp.step.native import parameters_of
from fastamp.step.split import SplitStep

__all__ = ["prepare"]

STEP_BY_THEMSELVES = ("FSDPStrategy", "DeepSpeedStrategy", "XLAStrategy", "XLAFSDPStrategy")


def prepare(fabric: Any, *, fold: bool = True) -> GradScaler:
    """Let Fabric clip and step with fastamp, in all its precisions.

    The loop stays as it is, `loss.backward()` in "32-true" and "bf16-true" too; between clip and
    step only `fabric.backward(loss)` may add to gradients.
    `fabric.clip_gradients(model, optimizer, max_norm=...)` reads the
    gradients once and returns their norm; `optimizer.step()` unscales, clips and updates in one
    pass. Fused optimizers are clipped in fp16 too, which Fabric alone refuses. Between the two
    calls `.grad` is as backward left it, unless `fold` is False; a change that would be lost raises
    a RuntimeError in the step (not one through `.grad.data` or NumPy). `error_if_nonfinite`, which
    Fabric sets unless told otherwise, waits for the device and raises before anything is clipped;
    without it a norm that is not finite skips the step. With `clip_val`, or to norms other than 2,
    gradients are clipped at once.

    Args:
        fabric: a `lightning.fabric.Fabric`, before or after its `setup`.
        fold: False clips at once, for programs that read `.grad` before the step.

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
        put_before(fabric, _Fabric)
        fabric._split = strategy._split = SplitStep(scaler)
    strategy._fold = fold
    return strategy._split.scaler  # type: ignore[no-any-return]


class _Fabric:
    """The method that replaces Fabric's.

    It is not the strategy's: Fabric forbids `loss.backward()` where a strategy has its own.
    """

    _split: SplitStep

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Compute gradients; see Fabric."""
        self._split.before_backward()
        stock(self).backward(*args, **kwargs)


class _Strategy:
    """The methods that replace those of a Fabric strategy."""

    _split: SplitStep
    _fold: bool

    def optimizer_step(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> Any:
        """Unscale, clip and update in one pass, after one read."""
        if isinstance(optimizer, torch.optim.LBFGS):
            return stock(self).optimizer_step(optimizer, **kwargs)
        return self._split.step(optimizer, **kwargs)

    def clip_gradients_norm(
        self,
        module: torch.nn.Module,  # noqa: ARG002 - its signature
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,  # noqa: FBT001, FBT002 - its signature
    ) -> Tensor:
        """Return the norm of an optimizer's gradients; its step clips them, see `prepare`."""
        norm = None
        if norm_type == 2:
            norm = self._split.clip_grad_norm_([optimizer], max_norm)
        if norm is None:
            self._unscale(optimizer)
            parameters = parameters_of([optimizer])
            return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        if error_if_nonfinite and not norm.isfinite():
            self._split.forget(optimizer)
            msg = f"the total norm of the gradients is {norm.item()}: see error_if_nonfinite"
            raise RuntimeError(msg)
        if not self._fold:
            self._split.settle(optimizer)
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
        if not self._split.settle(optimizer) and self._split.scaler.is_enabled():
            self._split.scaler.unscale_(optimizer)
