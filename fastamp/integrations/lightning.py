"""Lightning: a precision plugin, a callback that logs, and a LightningModule of any model."""

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from fastamp.data.structure import contents_of
from fastamp.integrations.of_lightning import OfLightning
from fastamp.metrics import MetricsTracker
from fastamp.metrics.sinks import Scalar
from fastamp.metrics.watch import ScalerWatch
from fastamp.step import GradScaler, StepReport, clip_grad_norm_
from fastamp.step.native import parameters_of
from fastamp.train import ModelCall

__all__ = ["AmpCallback", "AmpPrecision", "to_lightning_module"]

SCALED_BY_STRATEGY = ("FSDPStrategy", "DeepSpeedStrategy")
_PRECISIONS = ("16-mixed", "bf16-mixed", "32-true")
EVENTS = ("train/loss_scale", "train/gradient_overflow", "train/skipped_steps")


class AmpPrecision(OfLightning):
    """Lightning's MixedPrecision plugin with `fastamp.GradScaler`.

    `Trainer(gradient_clip_val=...)` supports fused optimizers (Lightning's own plugin raises an
    error), and clipping by norm is part of the step. Schedulers with the interval "step" do not
    advance when a step is skipped, because of inf or NaN in a gradient; reading that waits for the
    device once a step. "bf16-mixed" and "32-true" scale nothing, but clip and skip in the same way:
    `scaler` is a disabled one (None in Lightning's own plugins). LBFGS, and optimizers whose `step`
    is neither torch's nor fastamp's, call the closure by themselves, as in Lightning's own plugins:
    gradients are clipped when the closure ends, and no step is skipped.

    It works with DDP and with FSDP2 (`ModelParallelStrategy`), where clipping to a norm costs one
    all-reduce of two numbers, and "16-mixed" is possible.

    Gradients are scaled until the step, for example in `on_after_backward`. If the module or a
    callback has a hook between backward and step, they are unscaled before that.

    A module's `optimizer_step` may run the closure by itself and then call `optimizer.step()`, with
    "16-mixed" too (there Lightning's own plugin never steps, without an error).

    Args:
        precision: "16-mixed", "bf16-mixed" or "32-true".
        device: type of the device to train on; None is "cuda" if there is one, else "cpu".
        scaler: for "16-mixed"; None makes one.
        package: "lightning.pytorch" or "pytorch_lightning", if both are imported.

    Raises:
        ImportError: Lightning is not installed; it comes with the extra `lightning`.
        TypeError: `scaler` is not a `fastamp.GradScaler`; or the plugin is given to Fabric, for
            which there is `fastamp.integrations.fabric`.
        ValueError: both packages are imported and `package` is None; or another precision.

    Example:
        >>> import lightning.pytorch as pl
        >>> precision = AmpPrecision("16-mixed", device="cpu")
        >>> options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        >>> trainer = pl.Trainer(plugins=[precision], gradient_clip_val=1.0, **options)
        >>> trainer.scaler is precision.scaler
        True
    """

    base = "plugins.MixedPrecision"
    key = "MixedPrecision"
    scaler: GradScaler

    def __init__(
        self,
        precision: str = "16-mixed",
        device: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        *,
        package: str | None = None,  # noqa: ARG002 - __new__ has read it
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
        known = "bf16-mixed" if precision == "32-true" else precision
        super().__init__(known, device, scaler)  # type: ignore[call-arg]
        self.precision = precision
        self.scaler = scaler or GradScaler(device, enabled=False)
        self._max_norms: dict[int, float] = {}
        self._clips_in_step: bool | None = None  # False: the module clips; None: outside of a step
        self._report: StepReport | None = None  # of the latest batch's step, if it took one
        self._is_left_out = False
        self._module: Any = None

    def __bool__(self) -> bool:
        """Raise an error in Fabric, whose only call this is before it sets a model up."""
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.endswith("fabric.connector"):
            msg = (
                "AmpPrecision is a plugin for the Trainer: call "
                f"fastamp.integrations.fabric.prepare(Fabric(precision={self.precision!r}))"
            )
            raise TypeError(msg)
        return True

    def autocast_context_manager(self) -> AbstractContextManager[Any]:
        """Return torch.autocast, or nothing in FP32."""
        if self.precision == "32-true":
            return nullcontext()
        return super().autocast_context_manager()  # type: ignore[misc, no-any-return]

    def convert_module(self, module: Any) -> Any:
        """Refuse strategies that scale by themselves, and wrap the hook that steps schedulers."""
        names = {cls.__name__ for cls in type(module.trainer.strategy).__mro__}
        if refused := names.intersection(SCALED_BY_STRATEGY):
            msg = f"{refused.pop()} scales by itself: use Trainer(precision=...) without a plugin"
            raise TypeError(msg)
        module.lr_scheduler_step, self._module = _StepIfTaken(self, module), module
        return super().convert_module(module)  # type: ignore[misc]

    def teardown(self) -> None:
        """Unwrap the hook."""
        if self._module is not None:
            vars(self._module).pop("lr_scheduler_step", None)
            self._module = None
        super().teardown()  # type: ignore[misc]

    def train_step_context(self) -> AbstractContextManager[None]:
        """Begin a batch."""
        self._report, self._is_left_out = None, False
        return super().train_step_context()  # type: ignore[misc, no-any-return]

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run forward and backward, clip, step unless a gradient is not finite, adapt the scale."""
        is_scaling = self.scaler.is_enabled()
        if is_scaling and isinstance(optimizer, torch.optim.LBFGS):  # Lightning raises its error
            return super().optimizer_step(optimizer, model, closure, **kwargs)  # type: ignore[misc]
        if not is_scaling and _needs_closure(optimizer):
            return self._step_unfolded(optimizer, model, closure, **kwargs)
        result = closure()
        # None: training_step left the batch out, unless the module has run the closure by itself
        is_done = closure is self._lightning.core.optimizer.do_nothing_closure
        is_none = is_scaling and result is None and model.automatic_optimization
        self._is_left_out = is_none and not (is_done and _has_grads(optimizer))
        if is_scaling and not self._is_left_out and self._has_hook_before_step(model):
            self._unscale(optimizer)
        self._clips_in_step = not self._has_own_clipping(model)
        try:
            self._after_closure(model, optimizer)  # type: ignore[attr-defined]
        finally:
            self._clips_in_step = None
        if self._is_left_out:
            return None
        unclipped = None if is_scaling else math.inf  # inf makes the step check
        max_norm = self._max_norms.pop(id(optimizer), unclipped)
        retval = self.scaler.step(optimizer, max_norm=max_norm, **kwargs)
        self.scaler.update()
        self._report = self.scaler.last_step
        return result if retval is None and not is_scaling else retval

    def _step_unfolded(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Let the optimizer call the closure itself; clip at the end of each call."""

        def run() -> Any:
            self._clips_in_step = False
            try:
                return self._wrap_closure(model, optimizer, closure)  # type: ignore[attr-defined]
            finally:
                self._clips_in_step = None
                self.scaler.update()  # forgets this clip: the optimizer may call again

        return optimizer.step(closure=run, **kwargs)

    def clip_gradients(
        self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm"
    ) -> None:
        """Clip now, or to a norm in the step that follows if the module does not clip by itself.

        With a loss scale, a clip by hand to a norm is also made in the step: until then gradients
        are scaled.
        """
        if clip_val <= 0 or self._is_left_out:
            return
        if isinstance(optimizer, self._lightning.core.optimizer.LightningOptimizer):
            optimizer = optimizer.optimizer  # `optimizer_step` is given this one
        by_hand = self._clips_in_step is None
        if gradient_clip_algorithm == "norm":
            if self._clips_in_step or (by_hand and self.scaler.is_enabled()):
                self._max_norms[id(optimizer)] = float(clip_val)
            elif _has_grads(optimizer):
                self.scaler.clip_grad_norm_(optimizer, float(clip_val))
        elif _has_grads(optimizer):  # the scaler remembers an overflow, and skips the step
            self._unscale(optimizer)
            self.clip_grad_by_value(optimizer, clip_val)  # type: ignore[attr-defined]

    @property
    def _lightning(self) -> Any:
        """The package whose plugin this is."""
        (name,) = type(self).made_of[1]  # type: ignore[attr-defined]
        return sys.modules[name]

    def _unscale(self, optimizer: Any) -> None:
        """Unscale the gradients unless they are unscaled; without scaling, inf becomes NaN.

        Clipping to a value would hide an inf from the step.
        """
        if self.scaler.is_enabled():
            self.scaler.clip_grad_norm_(optimizer, math.inf)
        else:
            clip_grad_norm_(parameters_of([optimizer]), math.inf)

    def _has_hook_before_step(self, model: Any) -> bool:
        is_overridden = self._lightning.utilities.model_helpers.is_overridden
        step = "on_before_optimizer_step"
        callbacks, base = model.trainer.callbacks, self._lightning.Callback
        return (
            is_overridden(step, model)
            or self._has_own_clipping(model)
            or any(is_overridden(step, callback, base) for callback in callbacks)
        )

    def _has_own_clipping(self, model: Any) -> bool:
        is_overridden = self._lightning.utilities.model_helpers.is_overridden
        return bool(is_overridden("configure_gradient_clipping", model))


class _StepIfTaken:
    """A module's `lr_scheduler_step`, which steps per-step schedulers only after a step was taken.

    Its pickle and its copy are the module's own hook.
    """

    def __init__(self, plugin: AmpPrecision, module: Any) -> None:
        self._plugin, self._module = plugin, module
        self.__wrapped__ = module.lr_scheduler_step  # Lightning checks whether it is overridden

    def __call__(self, scheduler: Any, metric: Any) -> None:
        configs, report = self._module.trainer.lr_scheduler_configs, self._plugin._report
        by_epoch = any(c.scheduler is scheduler and c.interval == "epoch" for c in configs)
        if by_epoch or not (report and report.skipped):
            self.__wrapped__(scheduler, metric)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "lr_scheduler_step")


def _has_grads(optimizer: Any) -> bool:
    return any(parameter.grad is not None for parameter in parameters_of([optimizer]))


def _needs_closure(optimizer: Any) -> bool:
    """Say whether its `step` may do more with a closure than call it first."""
    module = getattr(optimizer.step, "__module__", "")
    is_known = module.startswith(("torch.optim.", "fastamp."))
    return isinstance(optimizer, torch.optim.LBFGS) or not is_known


class AmpCallback(OfLightning):
    """Log overflows, the loss scale, norms and the throughput to the loggers of a Trainer.

    - When it changes: "train/loss_scale".
    - At every overflow: "train/gradient_overflow" and "train/skipped_steps".
    - Every `log_every_n_steps` batches: "train/batches_per_s", "train/samples_per_s" if a batch
      holds tensors, and "train/grad_norm", the last finite one.

    All are logged with their steps. Only every `log_every_n_steps` batches does the callback wait
    for the device and call the loggers.

    Raises:
        ImportError: Lightning is not installed; it comes with the extra `lightning`.

    Example:
        >>> import lightning.pytorch as pl
        >>> options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        >>> trainer = pl.Trainer(callbacks=[AmpCallback()], **options)
    """

    base = "Callback"
    tracker: MetricsTracker
    """Holds what was logged; made when training starts."""
    _start_s = 0.0
    _watch: ScalerWatch | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the tracker, whose loggers stay with the original."""
        out = ("tracker", "_watch")
        return {name: value for name, value in vars(self).items() if name not in out}

    def on_train_start(self, trainer: Any, _module: Any) -> None:
        """Watch the scaler."""
        self.tracker = MetricsTracker(sinks=[partial(_log, trainer.loggers)])
        self._watch = None
        if isinstance(trainer.scaler, GradScaler):
            self._watch = self.tracker._watch_scaler(trainer.scaler, trainer.global_step)
        self._n_batches, self._n_samples, self._start_s = 0, 0, time.perf_counter()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Number steps as Lightning does, which counts those that a module leaves out."""
        if self._watch is not None:
            self._watch.step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, _module: Any, _outputs: Any, batch: Any, _batch_idx: int
    ) -> None:
        """Count, and log every `log_every_n_steps` batches."""
        self._n_samples += _count_samples(batch)
        self._n_batches += 1
        if self._n_batches == trainer.log_every_n_steps:
            step, now_s = max(trainer.global_step - 1, 0), time.perf_counter()
            for name, count in (("batches", self._n_batches), ("samples", self._n_samples)):
                if count:
                    rate = count / (now_s - self._start_s)
                    self.tracker.log_scalar(f"train/{name}_per_s", rate, step)
            # The wait for the device counts towards the next batches.
            self._n_batches, self._n_samples, self._start_s = 0, 0, now_s
            self.tracker.flush()

    def on_validation_start(self, *_: Any) -> None:
        """Stop the clock."""
        self._paused_s = time.perf_counter()

    def on_validation_end(self, *_: Any) -> None:
        """Restart the clock."""
        self._start_s += time.perf_counter() - self._paused_s

    def on_train_end(self, *_: Any) -> None:
        """Log the rest, also after an exception."""
        if hasattr(self, "tracker"):
            self.tracker.close()

    on_exception = on_train_end


def _count_samples(batch: Any) -> int:
    """Return the length of a batch's first tensor that has one, else 0."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.ndim else 0
    contents = contents_of(batch) or {}  # torch's pytree does not look into a BatchEncoding
    return next(filter(None, map(_count_samples, contents.values())), 0)


def _log(loggers: Iterable[Any], scalars: list[Scalar]) -> None:
    """Pass every event, and the last finite value of everything else, to Lightning's loggers.

    An overflow is an event; its norm, inf or NaN, would spoil a logger's curve.
    """
    scalars = [scalar for scalar in scalars if math.isfinite(scalar[2])]
    last = {name: step for name, step, _ in scalars}
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    for name, step, value in scalars:
        if name in EVENTS or step == last[name]:
            rows[step][name] = value
    for step, row in sorted(rows.items()):
        for logger in loggers:
            logger.log_metrics(row, step=step)


class _Module(OfLightning):
    """A model, how to call it, and the function that makes its optimizer."""

    base = "LightningModule"

    def __init__(
        self, model: torch.nn.Module, model_call: ModelCall, optimizer: Callable[[Any], Any]
    ) -> None:
        super().__init__()
        self.model, self._model_call, self._optimizer = model, model_call, optimizer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def training_step(self, batch: Any, _batch_idx: int) -> torch.Tensor:
        loss = self._model_call(self.model, batch)
        self.log("train/loss", loss)  # type: ignore[attr-defined]
        return loss

    def validation_step(self, batch: Any, _batch_idx: int) -> None:
        loss = self._model_call(self.model, batch)
        self.log("val/loss", loss, prog_bar=True)  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        return self._optimizer(self.parameters())  # type: ignore[attr-defined]


def to_lightning_module(
    model: torch.nn.Module,
    *,
    optimizer: Callable[[Any], Any] = torch.optim.AdamW,
    loss_fn: Callable[[torch.Tensor, Any], torch.Tensor] | None = None,
    model_call: ModelCall | None = None,
    package: str | None = None,
) -> Any:
    """Make a LightningModule from any model, with the loss that `fastamp.fine_tune` computes.

    It logs "train/loss" and "val/loss".

    Args:
        model: any module.
        optimizer: a function of the parameters; `configure_optimizers` returns its result.
        loss_fn: `loss_fn(output, target)`; None chooses by the target, see `ModelCall.loss`.
        model_call: how to call the model and compute its loss, in place of `loss_fn`.
        package: "lightning.pytorch" or "pytorch_lightning", if both are imported.

    Raises:
        ImportError: Lightning is not installed; it comes with the extra `lightning`.
        ValueError: both packages are imported and `package` is None.

    Example:
        >>> import lightning.pytorch as pl
        >>> module = to_lightning_module(torch.nn.Linear(4, 2))
        >>> isinstance(module, pl.LightningModule)
        True
    """
    made = _Module.__new__(_Module, package=package)
    made.__init__(model, model_call or ModelCall(loss_fn), optimizer)  # type: ignore[misc]
    return made
