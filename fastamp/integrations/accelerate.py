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
    The `optimizer.step()` that follows does not read them a second time to skip. Call it once,
    before `accelerator.prepare`, or at least before schedulers are made on prepared optimizers.

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
        accelerator: an `accelerate.Accelerator`, which has its scaler.

    Returns:
        The scaler that makes the steps, for its `last_step` and `skipped_steps`, or a tracker's
        `watch`: the Accelerator's new scaler with the state of the old one or, if it has none, a
        scaler that is not enabled.

    Raises:
        RuntimeError: a scheduler was made on a prepared optimizer before.
        TypeError: the scaler is not torch's own.
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
        for optimizer in accelerator._optimizers:
            _check(optimizer)
        scaler = _replace_scaler(accelerator)
        _Accelerator.put_before(accelerator)
        accelerator._stepper = scaler
        for optimizer in accelerator._optimizers:
            accelerator._adopt(optimizer)
    return accelerator._stepper  # type: ignore[no-any-return]


def _replace_scaler(accelerator: Any) -> GradScaler:
    """Replace torch's scaler by one of ours in its state; without one, return a disabled one."""
    stock = accelerator.scaler
    if stock is None or isinstance(stock, GradScaler):
        return stock or GradScaler(enabled=False)
    if type(stock) is not torch.amp.GradScaler:
        msg = f"accelerator.scaler: expected a torch.amp.GradScaler, got {type(stock).__name__}"
        raise TypeError(msg)
    scaler = GradScaler(stock._device, enabled=stock.is_enabled())
    scaler.load_state_dict(stock.state_dict())
    accelerator.scaler = scaler
    return scaler


def _check(optimizer: Any) -> None:
    """Refuse an optimizer whose `step` a scheduler has replaced on the instance."""
    if "step" in vars(optimizer) and not isinstance(optimizer, _Optimizer):
        msg = "prepare: call it before a scheduler is made on a prepared optimizer"
        raise RuntimeError(msg)


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
        self._adopt(made)
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

    def _adopt(self, optimizer: Any) -> None:
        if type(optimizer.optimizer).__module__.startswith("lomo_optim"):
            return  # it steps in the backward pass
        _check(optimizer)
        _Optimizer.put_before(optimizer)
        optimizer._stepper = self._stepper
        if optimizer.scaler is not None:
            optimizer.scaler = self.scaler

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
            own = _ids_of_grads(parameters_of([each.optimizer]))
            if own and own <= given and isinstance(each, _Optimizer):
                held |= own
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
