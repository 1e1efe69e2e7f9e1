"""Lightning: a precision plugin, and a LightningModule of any model; the callback that logs."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fastamp.integrations.lightning_callbacks import AmpCallback, pl
from fastamp.integrations.patching import is_unscaled, step_and_update
from fastamp.step import GradScaler, StepReport
from fastamp.train import ModelCall

__all__ = ["AmpCallback", "AmpPrecision", "to_lightning_module"]

SCALED_BY_STRATEGY = ("FSDPStrategy", "DeepSpeedStrategy")
_PRECISIONS = ("16-mixed", "bf16-mixed", "32-true")
_optimizers: Any = pl.core.optimizer
_is_overridden: Any = pl.utilities.model_helpers.is_overridden


class AmpPrecision(pl.plugins.MixedPrecision):  # type: ignore[misc]
    """Lightning's MixedPrecision plugin with `fastamp.GradScaler`.

    `Trainer(gradient_clip_val=...)` supports fused optimizers (Lightning's own plugin raises an
    error). Schedulers with the interval "step" do not advance when a step is skipped, because of
    inf or NaN in a gradient; reading that waits for the device once a step. "bf16-mixed" and
    "32-true" scale nothing, but clip and skip in the same way: `scaler` is a disabled one (None in
    Lightning's own plugins). LBFGS, and optimizers whose `step` is neither torch's nor fastamp's,
    call the closure by themselves, as in Lightning's own plugins: gradients are clipped when the
    closure ends, and no step is skipped.

    It works with DDP and with FSDP2 (`ModelParallelStrategy`), where clipping to a norm costs one
    all-reduce of two numbers, and "16-mixed" is possible.

    Gradients are scaled in `on_after_backward`, and unscaled in all hooks between backward and
    step. `clip_gradients` clips at once; the step that follows skips by what its read has found.

    Args:
        precision: "16-mixed", "bf16-mixed" or "32-true".
        device: type of the device to train on; None is "cuda" if there is one, else "cpu".
        scaler: for "16-mixed"; None makes one.

    Raises:
        TypeError: `scaler` is not a `fastamp.GradScaler`; or a model is set up in Fabric, where
            `fastamp.optimizer_step` takes the place of the plugin.
        ValueError: another precision.
        RuntimeError: with "16-mixed" a module's `optimizer_step` runs the closure by itself (there
            Lightning's own plugin never steps, without an error).

    Example:
        >>> import lightning.pytorch as pl
        >>> precision = AmpPrecision("16-mixed", device="cpu")
        >>> options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        >>> trainer = pl.Trainer(plugins=[precision], gradient_clip_val=1.0, **options)
        >>> trainer.scaler is precision.scaler
        True
    """

    scaler: GradScaler

    def __init__(
        self,
        precision: str = "16-mixed",
        device: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if precision not in _PRECISIONS:
            msg = f"precision: expected one of {_PRECISIONS}, got {precision!r}"
            raise ValueError(msg)
        if scaler is not None and not isinstance(scaler, GradScaler):
            msg = f"scaler: expected a fastamp.GradScaler, got {scaler!r}"
            raise TypeError(msg)
        if precision == "16-mixed" and scaler is None:
            scaler = GradScaler(device)
        # Lightning's class knows mixed precisions only.
        super().__init__("bf16-mixed" if precision == "32-true" else precision, device, scaler)
        self.precision = precision
        self.scaler = scaler or GradScaler(device, enabled=False)
        self._report: StepReport | None = None  # of the latest batch's step, if it took one
        self._is_left_out = False
        self._loop: Any = None  # Lightning's, while it fits

    def autocast_context_manager(self) -> AbstractContextManager[Any]:
        """Return torch.autocast, or nothing in FP32."""
        if self.precision == "32-true":
            return nullcontext()
        return super().autocast_context_manager()  # type: ignore[no-any-return]

    def convert_module(self, module: Any) -> Any:
        """Refuse what scales by itself, and hold back schedulers of steps after a skipped one."""
        if not hasattr(module, "trainer"):
            msg = "AmpPrecision is a plugin for the Trainer: in Fabric call fastamp.optimizer_step "
            msg += "or fastamp.GradScaler's step in fp16, after fabric.backward"
            raise TypeError(msg)
        names = {cls.__name__ for cls in type(module.trainer.strategy).__mro__}
        if refused := names.intersection(SCALED_BY_STRATEGY):
            msg = f"{refused.pop()} scales by itself: use Trainer(precision=...) without a plugin"
            raise TypeError(msg)
        self._loop = module.trainer.fit_loop.epoch_loop
        update = type(self._loop).update_lr_schedulers.__get__(self._loop)

        def update_if_taken(interval: str, *args: Any, **kwargs: Any) -> None:
            waits = any(each.interval == "step" for each in module.trainer.lr_scheduler_configs)
            if interval == "epoch" or not (waits and self._report and self._report.skipped):
                update(interval, *args, **kwargs)

        self._loop.update_lr_schedulers = update_if_taken
        return super().convert_module(module)

    def teardown(self) -> None:
        """Give the schedulers back."""
        if self._loop is not None:
            vars(self._loop).pop("update_lr_schedulers", None)
            self._loop = None
        super().teardown()

    def train_step_context(self) -> AbstractContextManager[None]:
        """Begin a batch."""
        self._report, self._is_left_out = None, False
        return super().train_step_context()  # type: ignore[no-any-return]

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run forward and backward, clip, step unless a gradient is not finite, adapt the scale."""
        is_scaling = self.scaler.is_enabled()
        if is_scaling and isinstance(optimizer, torch.optim.LBFGS):  # Lightning raises its error
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        if not is_scaling and _needs_closure(optimizer):
            return pl.plugins.Precision.optimizer_step(self, optimizer, model, closure, **kwargs)
        result = closure()
        # None: training_step left the batch out
        self._is_left_out = is_scaling and result is None and model.automatic_optimization
        if self._is_left_out and closure is _optimizers.do_nothing_closure:
            msg = "optimizer_step: in fp16 call optimizer.step(closure=closure), not the closure"
            raise RuntimeError(msg)
        clips_itself = _is_overridden("configure_gradient_clipping", model)
        if is_scaling and not self._is_left_out and (clips_itself or _has_hook_before_step(model)):
            self.scaler.clip_grad_norm_(optimizer, math.inf)  # unscales
        self._after_closure(model, optimizer)
        if self._is_left_out:
            return None
        # Without a scale and a clip a norm of inf makes the step check.
        is_checked = is_scaling or is_unscaled(self.scaler, optimizer)
        kwargs["max_norm"] = None if is_checked else math.inf
        retval = step_and_update(self.scaler, optimizer, **kwargs)
        self._report = self.scaler.last_step
        return result if retval is None and not is_scaling else retval

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm"
    ) -> None:
        """Unscale and clip at once; after an overflow the step is skipped."""
        if clip_val <= 0 or self._is_left_out:
            return
        if isinstance(optimizer, _optimizers.LightningOptimizer):
            optimizer = optimizer.optimizer  # `optimizer_step` is given this one
        by_norm = gradient_clip_algorithm == "norm"
        self.scaler.clip_grad_norm_(optimizer, float(clip_val) if by_norm else math.inf)
        if not by_norm:
            self.clip_grad_by_value(optimizer, clip_val)


# A checkpoint holds the plugin's state under this name, as that of Lightning's own plugin; pickle
# finds the class by it.
AmpPrecision.__qualname__ = "MixedPrecision"
MixedPrecision = AmpPrecision


def _has_hook_before_step(model: Any) -> bool:
    step, callbacks = "on_before_optimizer_step", model.trainer.callbacks
    return _is_overridden(step, model) or any(
        _is_overridden(step, callback, pl.Callback) for callback in callbacks
    )


def _needs_closure(optimizer: Any) -> bool:
    """Say whether its `step` may do more with a closure than call it first."""
    module = getattr(optimizer.step, "__module__", "")
    is_known = module.startswith(("torch.optim.", "fastamp."))
    return isinstance(optimizer, torch.optim.LBFGS) or not is_known


class _Module(pl.LightningModule):  # type: ignore[misc]
    """A model, how to call it, and the function that makes its optimizer."""

    def __init__(
        self, model: torch.nn.Module, model_call: ModelCall, optimizer: Callable[[Any], Any]
    ) -> None:
        super().__init__()
        self.model, self._model_call, self._optimizer = model, model_call, optimizer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def training_step(self, batch: Any, _batch_idx: int) -> torch.Tensor:
        loss = self._model_call(self.model, batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, _batch_idx: int) -> None:
        loss = self._model_call(self.model, batch)
        self.log("val/loss", loss, prog_bar=True)

    def configure_optimizers(self) -> Any:
        return self._optimizer(self.parameters())


def to_lightning_module(
    model: torch.nn.Module,
    *,
    optimizer: Callable[[Any], Any] = torch.optim.AdamW,
    loss_fn: Callable[[torch.Tensor, Any], torch.Tensor] | None = None,
    model_call: ModelCall | None = None,
) -> Any:
    """Make a LightningModule from any model, with the loss that `fastamp.fine_tune` computes.

    It logs "train/loss" and "val/loss".

    Args:
        model: any module.
        optimizer: a function of the parameters; `configure_optimizers` returns its result.
        loss_fn: `loss_fn(output, target)`; None chooses by the target, see `ModelCall.loss`.
        model_call: how to call the model and compute its loss, in place of `loss_fn`.

    Example:
        >>> import lightning.pytorch as pl
        >>> module = to_lightning_module(torch.nn.Linear(4, 2))
        >>> isinstance(module, pl.LightningModule)
        True
    """
    return _Module(model, model_call or ModelCall(loss_fn), optimizer)
