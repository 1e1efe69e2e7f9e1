"""Accelerate: after one call its `clip_grad_norm_` and `optimizer.step()` are fastamp's."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fastamp.integrations.accelerate_loader import prepare_loader
from fastamp.integrations.patching import Methods, is_unscaled, step_and_update
from fastamp.step import GradScaler, StepReport, clip_grad_norm_
from fastamp.step.native import parameters_of

__all__ = ["prepare"]

STEP_BY_THEMSELVES = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")


def prepare(accelerator: Any) -> GradScaler:
    """Let an Accelerator clip and step with fastamp: in fp16, and in bf16 and FP32 too.

    The loop stays as it is. `accelerator.clip_grad_norm_(parameters, max_norm)` reads the gradients
    once, unscales and clips them, and returns their norm, a tensor, without a wait for the device.
    The `optimizer.step()` that follows does not read them a second time to skip. Call it before
    `accelerator.prepare`.

    `accelerator.prepare(loader)` keeps a `fastamp.DataLoader`; over several processes one of
    `shard=True`. Every other loader, and one of an iterable dataset, or of ranks that share a model
    or a sequence, becomes Accelerate's own, which reads item by item, in the order of `seed=`.

    What differs from Accelerate alone:

    - The norm is exact. One that is not finite skips the step, without a scaler too, and
      `accelerator.optimizer_step_was_skipped` says so; reading it waits for the device, and
      prepared schedulers read it in every step. Without a scaler nothing is checked if nothing is
      clipped, or the gradients are not those of whole prepared optimizers, or by another norm.
    - Several optimizers may be clipped and stepped in fp16: Accelerate alone unscales the second
      one's gradients twice.

    Args:
        accelerator: an `accelerate.Accelerator`, which has its scaler, torch's own.

    Returns:
        The scaler that makes the steps, for its `last_step` and `skipped_steps`, or a tracker's
        `watch`: the Accelerator's new scaler with the state of the old one or, if it has none, a
        scaler that is not enabled.

    Raises:
        RuntimeError: it has prepared an optimizer already.
        ValueError: FSDP1, DeepSpeed, Megatron-LM or XLA clip and step by themselves.

    Example:
        >>> from accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> prepare(accelerator).is_enabled()  # "fp16" on a GPU scales losses
        False
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in STEP_BY_THEMSELVES and not getattr(accelerator, "is_fsdp2", False):
        msg = f"accelerator: its distributed_type {kind} clips and steps by itself"
        raise ValueError(msg + " (FSDP2 does not: fsdp_version=2)" * (kind == "FSDP"))
    if not isinstance(accelerator, _Accelerator):
        if accelerator._optimizers:
            msg = "accelerator: it has prepared an optimizer; call prepare(accelerator) before"
            raise RuntimeError(msg)
        _Accelerator.put_before(accelerator)
        scaler = stock = accelerator.scaler
        if stock is not None and not isinstance(stock, GradScaler):
            scaler = accelerator.scaler = GradScaler(stock._device, enabled=stock.is_enabled())
            scaler.load_state_dict(stock.state_dict())
        accelerator._stepper = scaler or GradScaler(enabled=False)
    return accelerator._stepper  # type: ignore[no-any-return]


class _Accelerator(Methods):
    """The methods that replace those of an Accelerator."""

    scaler: GradScaler | None
    unscale_gradients: Callable[[], None]
    sync_gradients: bool
    device_placement: bool
    _dataloaders: list[Any]
    _optimizers: list[Any]
    _stepper: GradScaler  # makes the steps; not enabled where Accelerate has no scaler

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> Any:
        """Prepare an optimizer, whose steps fastamp makes."""
        made = super().prepare_optimizer(optimizer, device_placement)  # type: ignore[misc]
        _Optimizer.put_before(made)
        made._stepper = self._stepper
        return made

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepare a loader; see `prepare` for a fastamp.DataLoader."""
        on_device = self.device_placement if device_placement is None else device_placement
        made = prepare_loader(data_loader, self, on_device=bool(on_device))
        if made is None:
            return super().prepare_data_loader(  # type: ignore[misc]
                data_loader, device_placement, slice_fn_for_dispatch
            )
        self._dataloaders.append(made)
        return made

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Scale the loss if there is a scaler, and compute gradients; see Accelerate."""
        if self.scaler not in (None, self._stepper):
            msg = "accelerator.scaler: it was set after prepare(accelerator); set it before"
            raise RuntimeError(msg)
        super().backward(loss, **kwargs)  # type: ignore[misc]

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Unscale and clip gradients, and return their norm; see `prepare`."""
        parameters = list(parameters)
        if self.sync_gradients and norm_type == 2 and (owners := self._find_owners(parameters)):
            for owner in owners:
                if self._stepper.is_enabled() and is_unscaled(self._stepper, owner):
                    self._stepper.unscale_(owner)  # raises torch's error
            return self._stepper.clip_grad_norm_(owners, max_norm)
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def _find_owners(self, parameters: list[Tensor]) -> list[torch.optim.Optimizer]:
        """Return the optimizers that together have exactly these gradients, or an empty list."""
        given, held = _ids_of_grads(parameters), set()
        owners = []
        for each in self._optimizers:
            ids = _ids_of_grads(parameters_of([each.optimizer]))
            if ids and ids <= given:
                held |= ids
                owners.append(each.optimizer)
        return owners if held == given else []


def _ids_of_grads(parameters: Iterable[Tensor]) -> set[int]:
    return {id(each) for each in parameters if each.grad is not None}


class _Optimizer(Methods):
    """The methods that replace those of an optimizer that an Accelerator has prepared."""

    optimizer: torch.optim.Optimizer
    gradient_state: Any
    _stepper: GradScaler
    _is_overflow: bool  # Accelerate's; programs set it to hold schedulers back
    _report: StepReport | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step if the gradients are complete."""
        if self.gradient_state.sync_gradients:
            given = () if closure is None else (closure,)
            step_and_update(self._stepper, self.optimizer, *given)
            self._report = self._stepper.last_step

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped; waits for the device."""
        return self._is_overflow or (self._report is not None and self._report.skipped)
