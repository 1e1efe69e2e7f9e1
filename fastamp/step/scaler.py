"""torch's GradScaler with one read of the gradients and no wait for the device."""

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.optim import Optimizer

from fastamp import _ops
from fastamp._ops import Clip, Held
from fastamp.step import native
from fastamp.step.clip import as_bound, torch_clip_grad_norm_
from fastamp.step.fused import (
    call_folded,
    call_step,
    check_optimizer,
    has_pre_hook,
    is_fused,
    parameters_of,
    takes_scaler,
    why_in_place,
)
from fastamp.step.report import NonFinite, StepReport, find_nonfinite, unmeasured

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# What a scaler's state holds, and the most of each: the scale is a float32, the tracker an int32.
_STATE: dict[str, tuple[Any, float]] = {
    "scale": (Real, torch.finfo(torch.float32).max),
    "growth_factor": (Real, sys.float_info.max),
    "backoff_factor": (Real, sys.float_info.max),
    "growth_interval": (Integral, 2**63 - 1),
    "_growth_tracker": (Integral, 2**31 - 1),
}


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler that unscales, checks, clips and steps with one read of the gradients.

    On the CPU torch's Adam, AdamW, SGD and Adagrad are updated by fastamp itself, in the same pass,
    if they are fused or left open (neither `fused` nor `foreach` given); the state stays torch's.
    On other devices unscaling and clipping are folded into torch's fused kernels, and nothing waits
    for the device. Any other optimizer costs one in-place multiply, left out when the factor is 1,
    and one read of a flag.

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
        # Weak references to what is told of every step and update; see fastamp.metrics.
        self._observers: list[Callable[[], Any]] = []
        self._dropped = False  # the last step's gradients
        self.last_step: StepReport = unmeasured("no step yet")
        """What the last call of `step` found."""

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped so far; waits for the device."""
        return self._skipped_before + sum(int(count.item()) for count in self._skipped.values())

    def step(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        *args: Any,
        max_norm: float | None = None,
        zero_grad: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Unscale the gradients, check them, clip them to `max_norm`, and step if all are finite.

        A gradient that is not finite skips the step wherever the gradients are read before it: with
        scaling, and with `max_norm`. Without both this is the optimizer's bare step, as in torch.

        Afterwards `last_step` tells what happened, and `.grad` is unscaled and clipped, as after
        torch's unscale_, clip_grad_norm_ and step. After a skipped step `.grad` still holds every
        inf and NaN, for `nonfinite_parameters`. With `max_norm` a `step_pre_hook` of the optimizer
        sees unscaled, clipped gradients.

        Args:
            optimizer: applies the gradients. Of several optimizers in a list or tuple, all
                gradients together are clipped to one norm, and one that is not finite skips all.
            *args: handed on to `optimizer.step`.
            max_norm: longest norm of all unscaled gradients together; None does not clip. It
                counts the gradients of this call's optimizers only.
            zero_grad: set the optimizers' gradients to None afterwards, also after a skipped step.
                Then they are not written back unscaled and clipped, which takes memory's time.
            **kwargs: handed on to `optimizer.step`.

        Returns:
            What `optimizer.step` returned, in a list for several; None where it was not called.

        Raises:
            RuntimeError: a closure was given, or `step` was called twice since the last `update`,
                or some optimizers of a list have been unscaled and others not.
            TypeError: `optimizer` is none, or `max_norm` is not a number, or an optimizer of a list
                needs torch's own way, as for tensor subclasses that are no DTensors.
            ValueError: `max_norm` is NaN or below 0; a list is empty or has an optimizer twice; or
                a gradient is float16 and the optimizer is not fused.
        """
        if torch.compiler.is_compiling():
            return _step_outside_graph(
                self, optimizer, *args, max_norm=max_norm, zero_grad=zero_grad, **kwargs
            )
        several = isinstance(optimizer, list | tuple)
        optimizers: list[Optimizer] = [*optimizer] if several else [optimizer]  # type: ignore[misc, list-item]
        max_norm = None if max_norm is None else as_bound("max_norm", max_norm)
        if self._enabled and "closure" in kwargs:
            msg = "Closure use is not currently supported if GradScaler is enabled."
            raise RuntimeError(msg)
        if max_norm is not None and (args[0] if args else kwargs.get("closure")) is not None:
            msg = f"{max_norm=} cannot clip what a closure computes anew in the optimizer's step"
            raise RuntimeError(msg)
        states = self._states_of(optimizers)
        self._dropped = zero_grad
        steps = self._read_natively(optimizers, *args, **kwargs)
        if not self._enabled and max_norm is None:
            self.last_step = unmeasured("bare: neither scaling nor max_norm")
            results = _step_bare(optimizers, steps, zero_grad, *args, **kwargs)
            return results if several else results[0]
        if isinstance(steps, list):
            results = self._step_natively(optimizers, states, steps, max_norm, zero_grad=zero_grad)
        else:
            results = self._step_by_torch(optimizers, states, max_norm, steps, *args, **kwargs)
            for each in optimizers if zero_grad else ():
                each.zero_grad()
        for state in states:
            state["stage"] = OptState.STEPPED
        for reference in self._observers:
            if (observer := reference()) is not None:
                observer.stepped()
        return results if several else results[0]

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Unscale the gradients, check them and clip them, in place, for use before the step.

        Where a gradient is not finite they are only unscaled: `step` will skip.

        Args:
            optimizer: owns the gradients; they may have been unscaled already.
            max_norm: longest norm of all unscaled gradients together.

        Returns:
            The norm of the unscaled gradients before clipping, a 0-dim tensor.

        Raises:
            RuntimeError: `step` has been called since the last `update`.
            TypeError: `optimizer` is none, or `max_norm` is not a number.
            ValueError: `max_norm` is NaN or below 0, or a gradient is float16.
        """
        max_norm = as_bound("max_norm", max_norm)
        state = self._state_of(optimizer, "clip_grad_norm_")
        if state["stage"] is OptState.STEPPED:
            msg = "clip_grad_norm_() is being called after step()."
            raise RuntimeError(msg)
        packed = self._pack([optimizer])
        if packed is None:
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
            return torch_clip_grad_norm_(parameters_of([optimizer]), max_norm)
        if state["stage"] is OptState.READY:
            _refuse_float16(packed)
        clip = self._clip(packed.device, state, max_norm)
        stats = self._record([state], packed.device, packed.grad_stats(2.0, clip), clip)
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
        for reference in self._observers:
            if (observer := reference()) is not None:
                observer.updated()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, of this class or of torch's; see there.

        Raises:
            RuntimeError: it is empty, as a scaler's that is not enabled.
            ValueError: it is no such state; the scaler is as it was.
        """
        if self._enabled and state_dict != {}:
            _check_state(state_dict)
        super().load_state_dict(state_dict)

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

        Raises:
            RuntimeError: the last step was made with zero_grad=True, and no gradient is left.
        """
        if self._dropped and all(parameter.grad is None for parameter in module.parameters()):
            msg = "zero_grad=True: the last step left no gradients to look at; leave it out"
            raise RuntimeError(msg)
        return find_nonfinite(module, self.process_group)

    def __getstate__(self) -> dict[str, Any]:
        """Keep the number of skipped steps, and drop tensors, ranks and observers."""
        count = {"_skipped_before": self.skipped_steps, "_skipped": {}}
        state = super().__getstate__() | count | {"_observers": [], "process_group": None}
        del state["last_step"]  # tensors made here would be gone before a spawned process gets them
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin without a report."""
        super().__setstate__(state)
        self.last_step = unmeasured("no step yet")

    def _state_of(
        self, optimizer: Optimizer, caller: str, name: str = "optimizer"
    ) -> dict[str, Any]:
        """Return the optimizer's state in this iteration; without scaling, all is unscaled."""
        check_optimizer(optimizer, name, "param_groups" if self._enabled else "step")
        if not self._enabled:
            return _refresh_per_optimizer_state() | {"stage": OptState.UNSCALED}
        self._check_scale_growth_tracker(caller)
        return self._per_optimizer_states[id(optimizer)]

    def _states_of(self, optimizers: list[Optimizer]) -> list[dict[str, Any]]:
        """Return the states of optimizers that may step together."""
        several = len(optimizers) > 1
        states = [
            self._state_of(each, "step", f"optimizer[{place}]" if several else "optimizer")
            for place, each in enumerate(optimizers)
        ]
        for state in states:
            if state["stage"] is OptState.STEPPED:
                msg = "step() has already been called since the last update()."
                raise RuntimeError(msg)
        if not optimizers:
            msg = "optimizer: expected at least one, got an empty list"
            raise ValueError(msg)
        if not several:
            return states
        places = {id(each): place for place, each in enumerate(optimizers)}
        for place, each in enumerate(optimizers):
            if (again := places[id(each)]) != place:
                msg = f"optimizer[{again}]: expected each once, it is optimizer[{place}]"
                raise ValueError(msg)
        if len({state["stage"] for state in states}) > 1:
            msg = "optimizer: of several, all have to be unscaled before, or none"
            raise RuntimeError(msg)
        if any(hasattr(each, "grad_scale") for each in optimizers):
            msg = "optimizer: of several, none may have a grad_scale of its own"
            raise RuntimeError(msg)
        return states

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,  # noqa: FBT001 - torch's signature
    ) -> dict[torch.device, Tensor]:
        """Unscale in place: torch's hook, behind unscale_ and _check_inf_per_device."""
        check_optimizer(optimizer, "optimizer", "param_groups")
        packed = self._pack([optimizer])
        if packed is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if not allow_fp16:
            _refuse_float16(packed)
        inv_scale = inv_scale.to(packed.device, non_blocking=True).reshape(())
        stats = packed.grad_stats(2.0, Clip(scale=inv_scale.reciprocal()))
        packed.rescale_(inv_scale)
        stats = stats._replace(scale=self._loss_scale())
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
        self, states: list[dict[str, Any]], device: torch.device, stats: _ops.GradStats, clip: Clip
    ) -> _ops.GradStats:
        """Keep what the gradients hold in the states of their optimizers."""
        # By unscale_, and the gradients may have changed since.
        before = [flag for state in states for flag in state["found_inf_per_device"].values()]
        if before:
            stats = stats._replace(found_inf=_any([stats.found_inf, *before]))
        if self._enabled and clip.scale is not self._scale:
            stats = stats._replace(scale=self._loss_scale())
        for state in states:
            state["found_inf_per_device"] = {device: stats.found_inf}
            state["stats"] = stats
        return stats

    def _loss_scale(self) -> Tensor:
        """Return a copy of the loss scale; 1 without scaling."""
        scale: Tensor | None = getattr(self, "_scale", None)
        return torch.ones(()) if scale is None else scale.clone()

    def _read_natively(
        self, optimizers: list[Optimizer], *args: Any, **kwargs: Any
    ) -> list[native.NativeStep] | str:
        """Read the gradients of optimizers that fastamp steps itself; or say why torch has to."""
        if any(given is not None for given in (*args, *kwargs.values())):
            return "the step has arguments"
        if self.process_group is not None:
            return "gradients are spread over a process_group"
        steps: list[native.NativeStep] = []
        for optimizer in optimizers:
            step = native.read(optimizer)
            if isinstance(step, str):
                for other in steps:
                    other.update.forget()
                return step
            steps.append(step)
        return steps

    def _step_natively(
        self,
        optimizers: list[Optimizer],
        states: list[dict[str, Any]],
        steps: list[native.NativeStep],
        max_norm: float | None,
        *,
        zero_grad: bool,
    ) -> list[float | None]:
        """Read all gradients once; unscale, clip, update and skip in one more pass."""
        is_ready = states[0]["stage"] is OptState.READY
        factor = None
        if is_ready or max_norm is not None:
            grads = steps[0].grads if len(steps) == 1 else self._pack(optimizers)
            assert grads is not None  # noqa: S101 - they are plain tensors
            if is_ready and grads.has_float16 and not all(map(is_fused, optimizers)):
                for step in steps:
                    step.update.forget()
                _refuse_float16(grads)
            skipped = self._counter(grads.device) if is_ready else None
            clip = self._clip(grads.device, states[0], max_norm, skipped=skipped)
            stats = self._record(states, grads.device, grads.grad_stats(2.0, clip), clip)
            factor = stats.factor
        found_inf = _any_of(states)
        by_python = steps[0].grads.has_fallback
        self._report(states[0], found_inf, "native" + "; by the fallback" * by_python)
        if not is_ready:
            self._counter(found_inf.device).add_(found_inf)
        for step in steps:
            step.apply(factor, found_inf, zero_grad=zero_grad)
            if step.told is not None:
                step.told(found_inf)
        return [None] * len(steps)

    def _step_by_torch(
        self,
        optimizers: list[Optimizer],
        states: list[dict[str, Any]],
        max_norm: float | None,
        why: str,
        *args: Any,
        **kwargs: Any,
    ) -> list[float | None]:
        """Unscale, check and clip, and let torch's optimizers step, for the reason `why`."""
        grads = self._hold(optimizers)
        if grads is not None and not any(takes_scaler(type(each)) for each in optimizers):  # type: ignore[arg-type]
            return self._step_together(optimizers, states, grads, max_norm, why, *args, **kwargs)
        if len(optimizers) > 1:
            msg = "optimizer: of several, all need gradients that are plain tensors or DTensors"
            raise TypeError(msg)
        return [self._step_as_torch(optimizers[0], states[0], max_norm, *args, **kwargs)]

    def _step_together(
        self,
        optimizers: list[Optimizer],
        states: list[dict[str, Any]],
        grads: "Held",
        max_norm: float | None,
        why: str,
        *args: Any,
        **kwargs: Any,
    ) -> list[float | None]:
        """Read all gradients once; unscale and clip in torch's kernels, or in place."""
        reasons = {each: why_in_place(each) for each in optimizers}
        waits = any(reasons.values())  # an optimizer without such a kernel has to be told to skip
        hooked = [] if max_norm is None else [each for each in optimizers if has_pre_hook(each)]
        in_place = [each for each in optimizers if reasons[each] or each in hooked]
        # The user's own scale is taken out as well.
        given: Tensor | None = None if waits else getattr(optimizers[0], "grad_scale", None)
        is_ready = states[0]["stage"] is OptState.READY
        whole, packed, grad_scale = None, None, given
        if is_ready or max_norm is not None:
            whole = cast("_ops.Packed", self._pack(optimizers, grads))
            if in_place:
                packed = whole if in_place == optimizers else self._pack(in_place)
            if is_ready and packed is not None and not all(map(is_fused, in_place)):
                _refuse_float16(packed)
            skipped = self._counter(whole.device) if is_ready and not waits else None
            clip = self._clip(whole.device, states[0], max_norm, given_scale=given, skipped=skipped)
            stats = self._record(states, whole.device, whole.grad_stats(2.0, clip), clip)
            grad_scale = stats.grad_scale
        found_inf = _any_of(states)
        report = self._report(states[0], found_inf, _way(reasons.values(), hooked, whole, why))
        if waits and report.skipped:
            self._skipped_before += 1
            return [None] * len(optimizers)
        if not waits and not is_ready:
            self._counter(found_inf.device).add_(found_inf)
        if packed is not None:
            packed.rescale_(stats.factor)
        results = []
        for each, state in zip(optimizers, states, strict=True):
            if packed is not None and each in in_place:
                state["stage"] = OptState.UNSCALED  # should the optimizer raise
            if reasons[each]:
                results.append(call_step(each, each.step, *args, **kwargs))
            else:
                step, scale = grads.on_parts(each.step), None if each in hooked else grad_scale
                results.append(call_folded(each, step, scale, found_inf, *args, **kwargs))
        return results

    def _step_as_torch(
        self,
        optimizer: Optimizer,
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
        found_inf = _any(found) if found else torch.zeros(())
        report = self._report(state, found_inf, "as torch: no gradient, or one of another kind")
        self._counter(report.found_inf.device).add_(report.found_inf)
        return retval

    def _hold(self, optimizers: list[Optimizer]) -> "Held | None":
        """Return what this rank holds of the gradients; None where torch has to handle them."""
        parameters = parameters_of(optimizers)
        grads = [grad for parameter in parameters if (grad := parameter.grad) is not None]
        if not grads and self.process_group is None:
            return None
        align = any(map(is_fused, optimizers))
        return _ops.hold(grads, self.process_group, owners=parameters, align=align)

    def _pack(self, optimizers: list[Optimizer], grads: "Held | None" = None) -> _ops.Packed | None:
        """Hand the optimizers' gradients to their backends; None where torch has to handle them.

        torch's fused kernels take gradients with gaps or sharing in their memory for contiguous
        ones, and read past their end: they get copies.
        """
        grads = self._hold(optimizers) if grads is None else grads
        packed = None if grads is None else grads.pack()
        if packed is None or not packed.has_fallback:
            return packed
        fused = [each for each in optimizers if is_fused(each)]
        for parameter in parameters_of(fused):
            grad = parameter.grad
            if grad is None or grad.layout is not torch.strided or grad.is_contiguous():
                continue
            if grad.stride() != parameter.stride():
                with torch.no_grad():
                    parameter.grad = torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)
        return cast("Held", self._hold(optimizers)).pack() if fused else packed

    def _report(self, state: dict[str, Any], found_inf: Tensor, way: str) -> StepReport:
        """Make `last_step` from what was read in this iteration."""
        stats: _ops.GradStats | None = state.get("stats")
        if stats is None:
            unread = unmeasured(way, found_inf)
            self.last_step = replace(unread, scale=self._loss_scale())
        else:
            self.last_step = StepReport(stats.norm, stats.clip_coef, found_inf, stats.scale, way)
        return self.last_step

    def _counter(self, device: torch.device) -> Tensor:
        """Return the device's count of skipped steps."""
        if device not in self._skipped:
            self._skipped[device] = torch.zeros((), dtype=torch.float32, device=device)
        return self._skipped[device]


@_disable_dynamo
def _step_outside_graph(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
    """Step where torch.compile has broken its graph, so that compiled loops get the same bits."""
    return scaler.step(*args, **kwargs)


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


def _check_state(state: Any) -> None:
    """Refuse what is not the state of a scaler, before any of it is loaded."""
    if not isinstance(state, dict):
        msg = f"state_dict: expected what GradScaler.state_dict returns, got {state!r:.200}"
        raise ValueError(msg)  # noqa: TRY004 - one kind of error for all that is no state
    for name, (kind, most) in _STATE.items():
        value = state.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) or not 0 <= value <= most:
            number = "an integer" if kind is Integral else "a number"
            msg = f"state_dict[{name!r}]: expected {number} from 0 to {most:g}, got {value!r:.200}"
            raise ValueError(msg)


def _step_bare(
    optimizers: list[Optimizer],
    steps: list[native.NativeStep] | str,
    zero_grad: bool,  # noqa: FBT001 - the arguments after it are the optimizer's
    *args: Any,
    **kwargs: Any,
) -> list[float | None]:
    """Step without a look at the gradients before."""
    if isinstance(steps, str):
        results = [call_step(each, each.step, *args, **kwargs) for each in optimizers]
        for each in optimizers if zero_grad else ():
            each.zero_grad()
        return results
    for step in steps:
        step.apply(None, None, zero_grad=zero_grad)
        if step.told is not None:
            step.told(None)
    return [None] * len(steps)


def _way(
    reasons: Iterable[str | None],
    hooked: Sequence[Optimizer],
    packed: _ops.Packed | None,
    why: str,
) -> str:
    """Say how a step is made, and why not faster."""
    found = [reason for reason in dict.fromkeys(reasons) if reason]
    found += ["a step_pre_hook looks on"] * bool(hooked)
    way = f"in place: {'; '.join(found)}" if found else "folded"
    way += f" ({why})"
    by_python = packed is not None and packed.has_fallback
    return f"{way}; some gradients are read by the fallback" if by_python else way


def _refuse_float16(packed: _ops.Packed) -> None:
    if packed.has_float16:
        msg = "Attempting to unscale FP16 gradients."
        raise ValueError(msg)


def _any_of(states: Iterable[dict[str, Any]]) -> Tensor:
    """Join what optimizers that step together have found, also each by its own `unscale_`."""
    flags = (flag for state in states for flag in state["found_inf_per_device"].values())
    return _any({id(flag): flag for flag in flags}.values())


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
