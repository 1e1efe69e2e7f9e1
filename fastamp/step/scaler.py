"""torch's GradScaler with one read of the gradients and no wait for the device."""

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from fastamp import _ops
from fastamp._ops import Clip, Held
from fastamp.step.report import NonFinite, StepReport, find_nonfinite, unmeasured

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler that unscales, checks, clips and steps with one read of the gradients.

    With torch's fused optimizers (Adam, AdamW, SGD and Adagrad with fused=True) unscaling and
    clipping are folded into the optimizer's kernel, and nothing waits for the device. Any other
    optimizer costs one in-place multiply, left out when the factor is 1, and one read of a flag.

    DTensors, of any meshes and placements, cost one all-reduce for each process group, and all
    ranks find the same norm, verdict and scale. So do plain gradients with a `process_group`; with
    DDP, where all ranks have the same ones, leave it out.

    Args:
        device: type of the device that the losses are on.
        init_scale: first loss scale.
        growth_factor: multiplies the scale after `growth_interval` steps without an overflow.
        backoff_factor: multiplies the scale after a step with an overflow.
        growth_interval: steps without an overflow until the scale grows.
        enabled: False scales nothing, for FP32 and bf16; `step(..., max_norm=...)` still clips, and
            skips the step when a gradient is not finite.
        min_scale: the scale never falls below this.
        max_scale: the scale never grows above this.
        process_group: ranks that hold other gradients than this one: the parts of FSDP1, or the
            stages of a pipeline. DTensors on a mesh inside of it count once. A pickled or copied
            scaler has none.

    Raises:
        ValueError: a scale is not a number above 0, or `init_scale` not between the two bounds.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,  # noqa: FBT001, FBT002 - torch's signature
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        process_group: "ProcessGroup | None" = None,
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        low = 0.0 if min_scale is None else _above_zero("min_scale", min_scale)
        high = math.inf if max_scale is None else _above_zero("max_scale", max_scale)
        if not low <= _above_zero("init_scale", init_scale) <= high:
            msg = f"init_scale: expected {min_scale=} <= {init_scale} <= {max_scale=}"
            raise ValueError(msg)
        self._min_scale = min_scale
        self._max_scale = max_scale
        self.process_group = process_group
        self._skipped: dict[torch.device, Tensor] = {}
        self._skipped_before = 0  # by the instance that this one was unpickled from
        self._observers: list[Any] = []  # told of every step and update; see fastamp.metrics
        self.last_step: StepReport | None = None
        """What the last call of `step` found; None before the first."""

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped so far; waits for the device."""
        return self._skipped_before + sum(int(count.item()) for count in self._skipped.values())

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        *args: Any,
        max_norm: float | None = None,
        **kwargs: Any,
    ) -> float | None:
        """Unscale the gradients, check them, clip them to `max_norm`, and step if all are finite.

        Afterwards `last_step` tells what happened, and `.grad` is unscaled and clipped, as after
        torch's unscale_, clip_grad_norm_ and step. After a skipped step `.grad` still holds every
        inf and NaN, for `nonfinite_parameters`.

        Args:
            optimizer: applies the gradients.
            *args: handed on to `optimizer.step`.
            max_norm: longest norm of all unscaled gradients together; None does not clip.
            **kwargs: handed on to `optimizer.step`.

        Returns:
            What `optimizer.step` returned; None where it was not called.

        Raises:
            RuntimeError: a closure was given, or `step` was called twice since the last `update`.
            ValueError: a gradient is float16 and the optimizer is not fused.
        """
        if not self._enabled and max_norm is None:
            self.last_step = unmeasured(torch.zeros(()))
            retval: float | None = optimizer.step(*args, **kwargs)
            return retval
        max_norm = None if max_norm is None else float(max_norm)
        if "closure" in kwargs:
            msg = "Closure use is not currently supported if GradScaler is enabled."
            raise RuntimeError(msg)
        state = self._state_of(optimizer, "step")
        if state["stage"] is OptState.STEPPED:
            msg = "step() has already been called since the last update()."
            raise RuntimeError(msg)
        grads = self._hold(optimizer)
        if grads is None or _takes_scaler(type(optimizer).step):
            retval = self._step_as_torch(optimizer, state, max_norm, *args, **kwargs)
        elif _folds(optimizer):
            retval = self._step_folded(optimizer, state, grads, max_norm, *args, **kwargs)
        else:
            retval = self._step_in_place(optimizer, state, grads, max_norm, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        for observer in self._observers:
            observer.stepped()
        return retval

    def clip_grad_norm_(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Unscale the gradients, check them and clip them, in place, for use before the step.

        Where a gradient is not finite they are only unscaled: `step` will skip.

        Args:
            optimizer: owns the gradients; they may have been unscaled already.
            max_norm: longest norm of all unscaled gradients together.

        Returns:
            The norm of the unscaled gradients before clipping, a 0-dim tensor.

        Raises:
            RuntimeError: `step` has been called since the last `update`.
            ValueError: a gradient is float16.
        """
        max_norm = float(max_norm)
        state = self._state_of(optimizer, "clip_grad_norm_")
        if state["stage"] is OptState.STEPPED:
            msg = "clip_grad_norm_() is being called after step()."
            raise RuntimeError(msg)
        grads = self._hold(optimizer)
        if grads is None:
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            return torch.nn.utils.clip_grad_norm_(_parameters_of(optimizer), max_norm)
        packed = self._pack(optimizer, grads)
        if state["stage"] is OptState.READY:
            _refuse_float16(packed)
        stats = packed.grad_stats(2.0, self._clip(packed.device, state, max_norm))
        stats = self._record(state, packed.device, stats)
        packed.rescale_(stats.factor)
        state["stage"] = OptState.UNSCALED
        return stats.norm

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the loss scale to what the steps found, or set it; see `torch.amp.GradScaler`.

        Args:
            new_scale: the scale from now on; None multiplies it by `backoff_factor` after an
                overflow, and by `growth_factor` after `growth_interval` steps without one.
        """
        if self._enabled and new_scale is None:
            states = self._per_optimizer_states.values()
            found = [flag for state in states for flag in state["found_inf_per_device"].values()]
            if len(found) > 1:
                # torch would add them up in place, in a tensor that `last_step` may hold.
                state = _refresh_per_optimizer_state()
                state["found_inf_per_device"] = {found[0].device: _any(found)}
                self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state, {0: state})
        super().update(new_scale)
        if self._enabled and self._scale is not None and (self._min_scale or self._max_scale):
            self._scale.clamp_(self._min_scale, self._max_scale)
        for observer in self._observers:
            observer.updated()

    def nonfinite_parameters(self, module: torch.nn.Module) -> list[NonFinite]:
        """Name the parameters of a module whose gradients hold inf or NaN.

        Call it after a step that was skipped and before the gradients are cleared; it reads all
        of them and waits for the device. With DTensors or a `process_group` all ranks have to call
        it, and get the same list.

        Args:
            module: its named parameters are looked at.

        Returns:
            One entry for each such parameter, and for each rank that holds such values: name,
            number of NaN, number of inf, and the index of the first of either in the flattened
            gradient, which is the whole one of a DTensor. The attribute `rank` tells whose it is.
        """
        return find_nonfinite(module, self.process_group)

    def __getstate__(self) -> dict[str, Any]:
        """Keep the number of skipped steps, and drop tensors, ranks and observers."""
        count = {"_skipped_before": self.skipped_steps, "_skipped": {}, "last_step": None}
        return super().__getstate__() | count | {"_observers": [], "process_group": None}

    def _state_of(self, optimizer: torch.optim.Optimizer, caller: str) -> dict[str, Any]:
        """Return the optimizer's state in this iteration; without scaling, all is unscaled."""
        if not self._enabled:
            return _refresh_per_optimizer_state() | {"stage": OptState.UNSCALED}
        self._check_scale_growth_tracker(caller)
        return self._per_optimizer_states[id(optimizer)]

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,  # noqa: FBT001 - torch's signature
    ) -> dict[torch.device, Tensor]:
        """Unscale in place: torch's hook, behind unscale_ and _check_inf_per_device."""
        grads = self._hold(optimizer)
        if grads is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        packed = self._pack(optimizer, grads)
        if not allow_fp16:
            _refuse_float16(packed)
        inv_scale = inv_scale.to(packed.device, non_blocking=True).reshape(())
        stats = packed.grad_stats(2.0, Clip(scale=inv_scale.reciprocal()))
        packed.rescale_(inv_scale)
        self._per_optimizer_states[id(optimizer)]["stats"] = stats
        return {packed.device: stats.found_inf}

    def _clip(
        self,
        device: torch.device,
        state: dict[str, Any],
        max_norm: float | None,
        *,
        given_scale: Tensor | None = None,
        skipped: Tensor | None = None,
    ) -> Clip:
        """Say how gradients on a device are to be unscaled and clipped at this stage."""
        scale = given_scale
        if state["stage"] is OptState.READY:
            assert self._scale is not None  # noqa: S101 - _state_of has checked it
            scale = self._scale.to(device, non_blocking=True)
            scale = scale if given_scale is None else scale * given_scale
        return Clip(scale, max_norm, only_finite=self._enabled, skipped=skipped)

    def _record(
        self, state: dict[str, Any], device: torch.device, stats: _ops.GradStats
    ) -> _ops.GradStats:
        """Keep what the gradients hold in the optimizer's state."""
        before = state["found_inf_per_device"].values()
        if before:  # by unscale_, and the gradients may have changed since
            stats = stats._replace(found_inf=_any([stats.found_inf, *before]))
        state["found_inf_per_device"] = {device: stats.found_inf}
        state["stats"] = stats
        return stats

    def _step_folded(
        self,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        grads: "Held",
        max_norm: float | None,
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        """Let the optimizer's kernel unscale, clip and skip: it divides by `grad_scale`."""
        # The user's own scale is taken out as well.
        given: Tensor | None = getattr(optimizer, "grad_scale", None)
        is_ready = state["stage"] is OptState.READY
        grad_scale: Tensor | None
        if is_ready or max_norm is not None:
            packed = self._pack(optimizer, grads)
            device = packed.device
            skipped = self._counter(device) if is_ready else None
            clip = self._clip(device, state, max_norm, given_scale=given, skipped=skipped)
            stats = self._record(state, device, packed.grad_stats(2.0, clip))
            grad_scale, found_inf = stats.grad_scale, stats.found_inf
        else:
            grad_scale, found_inf = given, _any(state["found_inf_per_device"].values())
        if not is_ready:
            self._counter(found_inf.device).add_(found_inf)
        self._report(state, found_inf)
        optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        try:
            retval: float | None = grads.on_parts(optimizer.step)(*args, **kwargs)
            given = None  # it has had its effect, and goes as it does in torch
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
            if given is not None:
                optimizer.grad_scale = given  # type: ignore[attr-defined]
        return retval

    def _step_in_place(
        self,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        grads: "Held",
        max_norm: float | None,
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        """Multiply the gradients by one factor, unless the step is skipped."""
        packed = None
        if state["stage"] is OptState.READY or max_norm is not None:
            packed = self._pack(optimizer, grads)
            if state["stage"] is OptState.READY:
                _refuse_float16(packed)
            clip = self._clip(packed.device, state, max_norm)
            self._record(state, packed.device, packed.grad_stats(2.0, clip))
        found_inf = _any(state["found_inf_per_device"].values())
        if self._report(state, found_inf).skipped:
            self._skipped_before += 1
            return None
        if packed is not None:
            packed.rescale_(state["stats"].factor)
            state["stage"] = OptState.UNSCALED  # should the optimizer raise
        retval: float | None = optimizer.step(*args, **kwargs)
        return retval

    def _step_as_torch(
        self,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        max_norm: float | None,
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        """Take torch's own sequence: no gradients, subclasses, optimizers that take the scaler."""
        norm = None
        if max_norm is not None:
            norm = self.clip_grad_norm_(optimizer, max_norm)
        if self._enabled:
            retval = super().step(optimizer, *args, **kwargs)
            found = list(state["found_inf_per_device"].values())
        else:
            found = [] if norm is None else [norm.isfinite().logical_not().to(torch.float32)]
            retval = None if found and found[0].item() else optimizer.step(*args, **kwargs)
        report = self._report(state, _any(found) if found else torch.zeros(()))
        self._counter(report.found_inf.device).add_(report.found_inf)
        return retval

    def _hold(self, optimizer: torch.optim.Optimizer) -> "Held | None":
        """Return what this rank holds of the gradients; None where torch has to handle them."""
        parameters = _parameters_of(optimizer)
        grads = [grad for parameter in parameters if (grad := parameter.grad) is not None]
        if not grads and self.process_group is None:
            return None
        return _ops.hold(grads, self.process_group, owners=parameters, align=_folds(optimizer))

    def _pack(self, optimizer: torch.optim.Optimizer, grads: "Held") -> _ops.Packed:
        """Hand the optimizer's gradients to their backends.

        torch's fused kernels take gradients with gaps or sharing in their memory for contiguous
        ones, and read past their end: they get copies.
        """
        packed = grads.pack()
        if not (packed.has_fallback and _folds(optimizer)):
            return packed
        for parameter in _parameters_of(optimizer):
            grad = parameter.grad
            if grad is None or grad.layout is not torch.strided or grad.is_contiguous():
                continue
            if grad.stride() != parameter.stride():
                with torch.no_grad():
                    parameter.grad = torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)
        return cast("Held", self._hold(optimizer)).pack()

    def _report(self, state: dict[str, Any], found_inf: Tensor) -> StepReport:
        """Make `last_step` from what was read in this iteration."""
        stats: _ops.GradStats | None = state.get("stats")
        if stats is None:
            self.last_step = unmeasured(found_inf)
        else:
            self.last_step = StepReport(stats.norm, stats.clip_coef, found_inf, stats.scale)
        return self.last_step

    def _counter(self, device: torch.device) -> Tensor:
        """Return the device's count of skipped steps."""
        if device not in self._skipped:
            self._skipped[device] = torch.zeros((), dtype=torch.float32, device=device)
        return self._skipped[device]


def _above_zero(name: str, value: float) -> float:
    """Return an argument as a float, or raise an error that names it."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not number > 0:
        msg = f"{name}: expected a number above 0, got {value!r}"
        raise ValueError(msg)
    return number


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@cache
def _takes_scaler(step: Callable[..., object]) -> bool:
    """Say whether an optimizer's `step` has the deprecated argument `grad_scaler`."""
    return "grad_scaler" in inspect.signature(step).parameters


def _folds(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether the optimizer's kernel divides by `grad_scale` and skips by `found_inf`."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def _refuse_float16(packed: _ops.Packed) -> None:
    if packed.has_float16:
        msg = "Attempting to unscale FP16 gradients."
        raise ValueError(msg)


def _any(flags: Iterable[Tensor]) -> Tensor:
    """Join flags of 0 and 1 on the first one's device; the fused optimizers test for 1."""
    flags = list(flags)
    if not flags:
        msg = "No inf checks were recorded for this optimizer."
        raise AssertionError(msg)
    if len(flags) == 1:
        return flags[0]
    device = flags[0].device
    return torch.stack([flag.to(device, non_blocking=True) for flag in flags]).amax()
