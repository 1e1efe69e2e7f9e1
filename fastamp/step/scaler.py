"""torch's GradScaler with one read of the gradients before the update, and no wait."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.optim import Optimizer

from fastamp import _ops
from fastamp._ops import ANOTHER_TYPE, Clip, Grads, GradStats
from fastamp.step import native
from fastamp.step.alike import compare_ranks
from fastamp.step.arguments import (
    above_zero,
    as_bound,
    as_state,
    check_group,
    check_optimizer,
)
from fastamp.step.native import parameters_of
from fastamp.step.report import NonFinite, StepReport, has_value, nonfinite_parameters, unread
from fastamp.step.unfused import is_torchs, right_kernels

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# What torch's `step` calls on its scaler: where one is overridden, torch's `step` makes the step.
_CALLED = ("unscale_", "_unscale_grads_", "_maybe_opt_step", "_check_inf_per_device")


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler that unscales, checks, clips and steps with one read of the gradients.

    On the CPU and CUDA, one call of fastamp's core makes the whole step of torch's Adam, AdamW
    and SGD, if the optimizer is fused or was given neither `fused` nor `foreach`; the optimizer
    state stays torch's, and nothing waits for the device. The step of torch's Muon is fastamp's,
    too, with products of stacked matrices. Any other optimizer costs one in-place multiply, left
    out when the factor is 1, and one read of a flag, before its own `step`. So does an optimizer
    with something that only Python would respect, such as a step hook.

    DTensors may have any meshes and placements. They cost one all-reduce for each process group;
    all ranks get the same norm, found_inf and scale, and each updates the shards that it holds. The
    same goes for plain gradients with a `process_group`. With DDP leave it out: all ranks have the
    same gradients.

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
        process_group: ranks that hold different gradients: the shards of FSDP1, or the stages of a
            pipeline. DTensors on a mesh inside it are counted once. A pickled or copied scaler has
            none.

    Raises:
        ValueError: a scale is not a number above 0, or `init_scale` not between the two bounds.
        TypeError: `process_group` is not a process group, or this rank is not in it.

    Example:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> scaler = fastamp.GradScaler("cpu")
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     loss = model(torch.ones(2, 4)).square().mean()
        >>> scaler.scale(loss).backward()
        >>> scaler.step(optimizer, max_norm=1.0, zero_grad=True)
        >>> scaler.update()
        >>> scaler.last_step.skipped
        False
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
        low = 0.0 if min_scale is None else above_zero("min_scale", min_scale)
        high = math.inf if max_scale is None else above_zero("max_scale", max_scale)
        if not low <= above_zero("init_scale", init_scale) <= high:
            msg = f"init_scale: expected {min_scale=} <= {init_scale} <= {max_scale=}"
            raise ValueError(msg)
        self._min_scale = None if min_scale is None else low
        self._max_scale = None if max_scale is None else high
        check_group(process_group)
        self.process_group = process_group
        self._skipped: dict[torch.device, Tensor] = {}
        self._skipped_before = 0  # by the instance that this one was unpickled from
        # Weak references to objects to notify after every step and update; see fastamp.metrics.
        self._observers: list[Callable[[], Any]] = []
        self._dropped = False  # whether the last step had zero_grad=True
        self._known: GradStats | None = None  # used in place of the next read; see `split`
        self.last_step: StepReport = StepReport(None, "no step yet")
        """What the last call of `step` found."""

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped so far; waits for the device."""
        return self._skipped_before + sum(int(count.item()) for count in self._skipped.values())

    @_ops.untraced
    def step(  # noqa: C901 - the two ways, in order
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        *args: Any,
        max_norm: float | None = None,
        zero_grad: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Unscale the gradients, check them, clip them to `max_norm`, and step if all are finite.

        A gradient that is not finite skips the step if the scaler is enabled or `max_norm` is set.
        Otherwise the step does not read the gradients first, as in torch.

        Afterwards `last_step` says what happened, and `.grad` is unscaled and clipped, as after
        torch's `unscale_`, `clip_grad_norm_` and `step`. After a skipped step `.grad` still holds
        every inf and NaN, for `nonfinite_parameters`. With `max_norm` a `step_pre_hook` of the
        optimizer sees unscaled, clipped gradients.

        Args:
            optimizer: applies the gradients. Several optimizers in a list or tuple are clipped to
                one norm of all their gradients; one that is not finite skips all their steps.
            *args: handed on to `optimizer.step`.
            max_norm: largest norm of all unscaled gradients of these optimizers together; None does
                not clip.
            zero_grad: set the optimizers' gradients to None afterwards, also after a skipped step.
                This saves writing them back unscaled and clipped. A loop that catches an error of
                the backward pass, as out of memory, and tries again calls `optimizer.zero_grad()`
                in the handler: half a gradient is left.
            **kwargs: handed on to `optimizer.step`.

        Returns:
            What `optimizer.step` returned, in a list for several; None where it was not called.

        Raises:
            RuntimeError: `closure=` was given to an enabled scaler, or any closure with `max_norm`;
                or `step` was called twice since the last `update`, or some optimizers of a list
                have been unscaled and others not; or one of a list failed after others had stepped.
            TypeError: `optimizer` is not an optimizer, or `max_norm` is not a number; or torch has
                to tell one of several optimizers how to unscale.
            ValueError: `max_norm` is NaN or below 0; a list is empty, has an optimizer twice, or
                one parameter in two optimizers; or a gradient is float16 and the optimizer is not
                fused.
        """
        several = isinstance(optimizer, list | tuple)
        optimizers: list[Optimizer] = [*optimizer] if several else [optimizer]  # type: ignore[misc, list-item]
        why = self._check_arguments(args, kwargs, max_norm) if args or kwargs else ""
        if max_norm is not None and not (type(max_norm) is float and max_norm >= 0):
            max_norm = as_bound("max_norm", max_norm)
        states = self._states_of(optimizers)
        self._dropped = zero_grad = bool(zero_grad)
        cls: Any = type(self)
        if not why and (_overrides(cls) or not vars(self).keys().isdisjoint(_CALLED)):
            why = "a method of the scaler is overridden"
        grads: Grads | None = None
        if not why and not several and self.process_group is None and self._known is None:
            why = self._step_at_once(optimizers[0], states[0], max_norm, zero_grad=zero_grad)
            is_spread = why == ANOTHER_TYPE
        else:
            is_spread = not why
        if is_spread:
            grads, why = self._step_in_halves(optimizers, states, max_norm, zero_grad=zero_grad)
        results: list[float | None] = [None] * len(optimizers)
        if why:
            results = self._step_by_torch(optimizers, states, max_norm, grads, why, args, kwargs)
        for state in states:
            state["stage"] = OptState.STEPPED
        for each in optimizers if zero_grad else ():
            if why or native.has_own_zero_grad(each):
                each.zero_grad()
        reads = self._enabled or max_norm is not None
        for reference in self._observers if reads else ():
            if (observer := reference()) is not None:
                observer.stepped()
        return results if several else results[0]

    @_ops.untraced
    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Unscale the gradients, check them and clip them, in place, for use before the step.

        If a gradient is not finite they are only unscaled, and `step` will skip; that of a scaler
        that is not enabled skips only with a `max_norm` of its own.

        Args:
            optimizer: owns the gradients; they may have been unscaled already.
            max_norm: largest norm of all unscaled gradients together.

        Returns:
            The norm of the unscaled gradients before clipping, a 0-dim tensor.

        Raises:
            RuntimeError: `step` has been called since the last `update`.
            TypeError: `optimizer` is not an optimizer, or `max_norm` is not a number.
            ValueError: `max_norm` is NaN or below 0, or a gradient is float16.
        """
        max_norm = as_bound("max_norm", max_norm)
        states = self._states_of([optimizer], "clip_grad_norm_")
        if states[0]["stage"] is OptState.READY and _overrides(cast(Any, type(self))):
            self.unscale_(optimizer)
        grads = self._hold([optimizer])
        if grads is None:
            if states[0]["stage"] is OptState.READY:
                self.unscale_(optimizer)
            return torch.tensor(0.0)
        if states[0]["stage"] is OptState.READY:
            refuse_float16(grads)
        stats = self._measure(states, grads, max_norm)
        self._rescale(states, grads, stats)
        return stats.norm

    @_ops.untraced
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the loss scale to what the steps found, or set it; see `torch.amp.GradScaler`.

        Args:
            new_scale: the scale from now on; None multiplies it by `backoff_factor` after an
                overflow, and by `growth_factor` after `growth_interval` steps without one.

        Raises:
            AssertionError: no loss was scaled, or no gradient read since the last `update`; or
                `new_scale` is a tensor of another device, dtype or length, as in torch.
        """
        if self._enabled and new_scale is None:
            states = [*self._per_optimizer_states.values()]
            found = [flag for state in states for flag in state["found_inf_per_device"].values()]
            scale = self._scale
            if len(found) > 1 or (found and scale is not None and found[0].device != scale.device):
                # torch would add them up in place, in a tensor that `last_step` may hold, and on
                # the CPU it would read one from a GPU before it has arrived.
                flag = cast(
                    Tensor, _joined(states, found[0].device if scale is None else scale.device)
                )
                state = _refresh_per_optimizer_state()
                state["found_inf_per_device"] = {flag.device: flag}
                self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state, {0: state})
        super().update(new_scale)
        if self._enabled and self._scale is not None and (self._min_scale or self._max_scale):
            self._scale.clamp_(self._min_scale, self._max_scale)
        for reference in self._observers:
            if (observer := reference()) is not None:
                observer.updated()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this class or of torch's scaler returned.

        A scale outside of `min_scale` and `max_scale` becomes the nearer one.

        Raises:
            RuntimeError: it is empty, as that of a scaler that is not enabled.
            ValueError: it is not such a state; the scaler is unchanged.
        """
        if self._enabled and state_dict != {}:
            state_dict = as_state(state_dict)
            least, most = self._min_scale or 0.0, self._max_scale or math.inf
            state_dict = {**state_dict, "scale": min(max(state_dict["scale"], least), most)}
        super().load_state_dict(state_dict)

    def nonfinite_parameters(self, module: torch.nn.Module) -> list[NonFinite]:
        """Name the parameters of a module whose gradients hold inf or NaN.

        Like `fastamp.nonfinite_parameters`, with the scaler's `process_group`.

        Raises:
            RuntimeError: the last step was made with zero_grad=True, and no gradient is left.

        Example:
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters())
            >>> scaler = fastamp.GradScaler("cpu")
            >>> scaler.scale(model(torch.tensor([[1.0, torch.inf]]))).backward()
            >>> scaler.step(optimizer)
            >>> scaler.nonfinite_parameters(model)
            [NonFinite(name='weight', n_nan=0, n_inf=1, first_index=1, rank=None)]
        """
        if self._dropped and all(parameter.grad is None for parameter in module.parameters()):
            msg = "zero_grad=True: the last step set all gradients to None; leave it out"
            raise RuntimeError(msg)
        return nonfinite_parameters(module, self.process_group)

    def _check_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], max_norm: float | None
    ) -> str:
        """Refuse arguments of `step`, or say why they need torch's step: "" if they do not."""
        if self._enabled and "closure" in kwargs:
            msg = "Closure use is not currently supported if GradScaler is enabled."
            raise RuntimeError(msg)
        if max_norm is not None and (args[0] if args else kwargs.get("closure")) is not None:
            msg = f"{max_norm=} cannot clip gradients that a closure recomputes inside the step"
            raise RuntimeError(msg)
        given = (*args, *kwargs.values())
        is_bare = not given or (given == (None,) and not kwargs.keys() - {"closure"})
        return "" if is_bare else "the step has arguments"

    def _states_of(self, optimizers: list[Optimizer], caller: str = "step") -> list[dict[str, Any]]:
        """Return the optimizers' states in this iteration; without scaling they are UNSCALED."""
        needed = "param_groups" if self._enabled else "step"
        states: list[dict[str, Any]] = []
        for place, each in enumerate(optimizers):
            if not hasattr(each, needed):
                name = f"optimizer[{place}]" if len(optimizers) > 1 else "optimizer"
                check_optimizer(each, name, needed)
            if self._enabled:
                if self._scale is None or self._growth_tracker is None:
                    self._check_scale_growth_tracker(caller)  # raises torch's error
                state = self._per_optimizer_states[id(each)]
            else:
                state = {"stage": OptState.UNSCALED, "found_inf_per_device": {}}
            if state["stage"] is OptState.STEPPED:
                again = "has already been called since the last update()"
                again = again if caller == "step" else "is being called after step()"
                msg = f"{caller}() {again}."
                raise RuntimeError(msg)
            states.append(state)
        if len(states) != 1:
            _check_several(optimizers, states)
        return states

    def _step_at_once(  # noqa: C901, PLR0912 - the hot path: no calls of Python to be short
        self,
        optimizer: Optimizer,
        state: dict[str, Any],
        max_norm: float | None,
        *,
        zero_grad: bool,
    ) -> str:
        """Make the step in one call of the core; or return why it has to be made otherwise."""
        prepared = native.prepare(optimizer)
        if isinstance(prepared, str):
            return prepared
        backend, update = prepared
        device = backend.device
        is_ready = state["stage"] is OptState.READY
        measures = is_ready or max_norm is not None
        scale = before = skipped = None
        if measures or self._enabled:
            skipped = self._skipped.get(device)
            if skipped is None or device.type == "cuda":
                skipped = self._counter(device)
            if self._enabled:
                skipped = skipped.detach()  # made in a torch.func transform, it is a wrapper
        if is_ready:
            scale = self._scale.detach()  # type: ignore[union-attr]
            if scale.device != device:
                scale = _ops.moved(scale, device)
        elif self._enabled:
            before = _joined([state], device)
            if before is None and not measures:
                return "no gradient was checked"  # torch raises its error
        drops = zero_grad and not native.has_own_zero_grad(optimizer)
        step = backend.step
        if _ops.is_profiling():
            step = native.in_range(optimizer, step)
        for is_again in (False, True):
            found = step(
                update,
                optimizer.param_groups,
                optimizer.state,
                measures,
                scale,
                max_norm,
                before,
                skipped,
                drops,
            )
            if not isinstance(found, str):
                break
            if found != _ops.NO_STATE or is_again:
                return found
            if why := native.make_state(optimizer):
                return why
        if measures:
            if self._enabled:
                state["found_inf_per_device"] = {device: found[1]}
                if not is_ready:
                    found = GradStats(found).replace(scale=self._loss_scale())
        elif self._enabled:
            cast(Tensor, skipped).add_(cast(Tensor, before))
            found = self._read_before([state], cast(Tensor, before))
        self.last_step = StepReport(found, "native")
        if "step" in vars(optimizer):
            native.note_step(optimizer)
        return ""

    def _step_in_halves(
        self,
        optimizers: list[Optimizer],
        states: list[dict[str, Any]],
        max_norm: float | None,
        *,
        zero_grad: bool,
    ) -> tuple[Grads | None, str]:
        """Measure several optimizers or ranks together, then update; or return why torch has to."""
        is_ready = states[0]["stage"] is OptState.READY
        measures = is_ready or max_norm is not None
        grads = self._hold(optimizers)
        steps = native.read_all(optimizers)
        if isinstance(steps, str):
            return grads, steps
        compare_ranks(optimizers, "")
        factor = None
        stats: GradStats | None
        if measures:
            held = cast(Grads, grads)
            stats = self._measure(states, held, max_norm, self._counter(held.device))
            factor, found_inf = stats.factor, stats.found_inf
            for state in states:
                state["found_inf_per_device"] = {held.device: found_inf}
        else:
            flag = _joined(states, steps[0].backend.device) if self._enabled else None
            if flag is None and self._enabled:
                return grads, "no gradient was checked"
            found_inf = cast(Tensor, flag)
            stats = self._read_before(states, found_inf) if self._enabled else None
            if self._enabled:
                self._counter(found_inf.device).add_(found_inf)
        self.last_step = StepReport(stats, "native")
        for step in steps:
            place = optimizers.index(step.optimizer)
            with _said(place):
                step.apply(factor, found_inf, zero_grad=zero_grad)
            states[place]["stage"] = OptState.STEPPED
        return grads, ""

    def _step_by_torch(
        self,
        optimizers: list[Optimizer],
        states: list[dict[str, Any]],
        max_norm: float | None,
        grads: Grads | None,
        why: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[float | None]:
        """Unscale, check and clip in place, then let each optimizer step unless it is skipped."""
        is_ready = states[0]["stage"] is OptState.READY
        measures = is_ready or max_norm is not None
        if measures and grads is None:
            grads = self._hold(optimizers)
        compare_ranks(optimizers, why)
        overridden = why == "a method of the scaler is overridden"
        told = self._enabled and any(map(is_told, optimizers))
        if (measures and grads is None) or overridden or told:
            return self._step_as_torch(optimizers, states, max_norm, why, args, kwargs)
        report = StepReport(None, f"torch's: {why}")
        if measures:
            if is_ready and not all(map(_takes_float16, optimizers)):
                refuse_float16(cast(Grads, grads))
            held = cast(Grads, grads)
            skipped = self._counter(held.device) if has_value(held.held[0]) else None
            stats = self._measure(states, held, max_norm, skipped)
            self._rescale(states, held, stats)
            report = StepReport(stats, report.way)
        elif self._enabled:
            device = (
                parameters_of(optimizers)[0].device if self._scale is None else self._scale.device
            )
            found_inf = _joined(states, device)
            if found_inf is None:
                msg = "No inf checks were recorded for this optimizer."
                raise AssertionError(msg)
            self._counter(device).add_(found_inf)
            for state in states:  # what one of several has found, skips all
                state["found_inf_per_device"] = {device: found_inf}
            report = StepReport(self._read_before(states, found_inf), report.way)
        results = []
        self.last_step = report
        for place, (each, state) in enumerate(zip(optimizers, states, strict=True)):
            with _said(place), right_kernels(each):
                if has_value(report.found_inf):
                    results.append(self._maybe_opt_step(each, state, *args, **kwargs))
                else:
                    results.append(each.step(*args, **kwargs))
            state["stage"] = OptState.STEPPED
        self.last_step = report  # a hook may have made another step
        return results

    def _step_as_torch(
        self,
        optimizers: list[Optimizer],
        states: list[dict[str, Any]],
        max_norm: float | None,
        why: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[float | None]:
        """Let torch's scaler step, with the methods that it calls."""
        if len(optimizers) > 1 and any(p.grad is not None for p in parameters_of(optimizers)):
            msg = "optimizer: several cannot step together, since torch's scaler has to: " + why
            raise TypeError(msg)
        results = []
        for each, state in zip(optimizers, states, strict=True):
            norm = None if max_norm is None else self.clip_grad_norm_(each, max_norm)
            results.append(super().step(each, *args, **kwargs))
            found_inf = _joined([state], torch.device("cpu") if norm is None else norm.device)
            if found_inf is None:
                found_inf = torch.zeros((), dtype=torch.float32)
            self._counter(found_inf.device).add_(found_inf)
            stats = self._read_before([state], found_inf)
            if norm is not None and "stats" not in state:
                stats = stats.replace(norm=norm)
            self.last_step = StepReport(stats, f"torch's: {why}")
        return results

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,  # noqa: FBT001 - torch's signature
    ) -> dict[torch.device, Tensor]:
        """Unscale in place: torch's hook, behind unscale_ and _check_inf_per_device."""
        check_optimizer(optimizer, "optimizer", "param_groups")
        grads = self._hold([optimizer])
        if grads is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        if not allow_fp16:
            refuse_float16(grads)
        inv_scale = _ops.moved(inv_scale, grads.device).reshape(())
        stats = grads.measure(Clip(scale=inv_scale.reciprocal()))
        grads.rescale_(inv_scale)
        if not allow_fp16:  # else it is called for the check alone, with a scale of 1
            stats = stats.replace(scale=self._loss_scale())
            self._per_optimizer_states[id(optimizer)]["stats"] = stats
        return {grads.device: stats.found_inf}

    def _hold(self, optimizers: list[Optimizer]) -> Grads | None:
        """Return the optimizers' gradients on their backends; None where no rank has any."""
        parameters = parameters_of(optimizers)
        grads = [grad for parameter in parameters if (grad := parameter.grad) is not None]
        return _ops.hold(grads, self.process_group, owners=parameters)

    def _measure(
        self,
        states: list[dict[str, Any]],
        grads: Grads,
        max_norm: float | None,
        skipped: Tensor | None = None,
    ) -> GradStats:
        """Read every gradient once, unless `split` has done so before."""
        stats, self._known = self._known, None
        if stats is None:
            is_ready, device = states[0]["stage"] is OptState.READY, grads.device
            scale = _ops.moved(cast(Tensor, self._scale), device) if is_ready else None
            before = _joined(states, device)
            stats = grads.measure(Clip(scale, max_norm, before=before, skipped=skipped))
            if self._enabled and not is_ready:
                stats = stats.replace(scale=self._loss_scale())
        elif skipped is not None:
            skipped.add_(stats.found_inf)
        return stats

    def _rescale(self, states: list[dict[str, Any]], grads: Grads, stats: GradStats) -> None:
        """Unscale and clip gradients that were read, in at most one write, and note it."""
        grads.rescale_(stats.factor)
        for state in states:
            state["stage"], state["stats"] = OptState.UNSCALED, stats
            state["found_inf_per_device"] = {grads.device: stats.found_inf}

    def _loss_scale(self) -> Tensor:
        """Return a copy of the loss scale; 1 without scaling."""
        scale: Tensor | None = getattr(self, "_scale", None)
        return torch.ones((), dtype=torch.float32) if scale is None else scale.clone()

    def _read_before(self, states: list[dict[str, Any]], found_inf: Tensor) -> GradStats:
        """Return the statistics of an earlier read in this iteration, with another flag."""
        stats: GradStats | None = states[0].get("stats")
        # Those of separate `unscale_` calls are each of one optimizer.
        if stats is None or any(state.get("stats") is not stats for state in states):
            return unread(found_inf, self._loss_scale())
        return stats.replace(found_inf=found_inf)

    def _counter(self, device: torch.device) -> Tensor:
        """Return the device's count of skipped steps, for the current stream."""
        count = self._skipped.get(device)
        if count is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                msg = (
                    f"the first step on {device} is in the capture of a CUDA graph, whose replays "
                    "would reset the count of skipped steps: make one step before the capture"
                )
                raise RuntimeError(msg)
            # Later steps may count outside of inference mode. torch 2.6 cannot trace the change.
            inside = torch.is_inference_mode_enabled()
            with torch.inference_mode(mode=False) if inside else nullcontext():
                count = torch.zeros((), dtype=torch.float32, device=device)
            if not hasattr(count, "fake_mode"):
                self._skipped[device] = count
        elif device.type == "cuda":  # its memory must not be reused before this stream is done
            count.record_stream(torch.cuda.current_stream(device))
        return count

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        """Make the scale, as torch does, and the count of skipped steps beside it."""
        super()._lazy_init_scale_growth_tracker(dev)
        if not (dev.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self._counter(dev)

    def __getstate__(self) -> dict[str, Any]:
        """Keep the number of skipped steps; drop tensors, the process group and observers."""
        count = {"_skipped_before": self.skipped_steps, "_skipped": {}, "_known": None}
        state = super().__getstate__() | count | {"_observers": [], "process_group": None}
        del state["last_step"]  # tensors made here would be gone before a spawned process gets them
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load the state, with no report of a last step."""
        super().__setstate__(state)
        self.last_step = StepReport(None, "no step yet")


@lru_cache(maxsize=64)
def _overrides(cls: Any) -> bool:
    """Say whether a class overrides a method that torch's `step` calls."""
    stock = torch.amp.GradScaler
    return any(
        getattr(cls, name) not in (vars(GradScaler).get(name), getattr(stock, name))
        for name in _CALLED
    )


def _check_several(optimizers: list[Optimizer], states: list[dict[str, Any]]) -> None:
    """Refuse optimizers that cannot step together."""
    if not optimizers:
        msg = "optimizer: expected at least one, got an empty list"
        raise ValueError(msg)
    places = {id(each): place for place, each in enumerate(optimizers)}
    for place, each in enumerate(optimizers):
        if (again := places[id(each)]) != place:
            msg = f"optimizer[{again}]: the same as optimizer[{place}]; expected each once"
            raise ValueError(msg)
    parameters = [parameters_of([each]) for each in optimizers]
    if len(parameters_of(optimizers)) < sum(map(len, parameters)):
        raise ValueError(_shared_by(parameters))
    if len({state["stage"] for state in states}) > 1:
        msg = "optimizer: of several, some were unscaled by unscale_() and some were not"
        raise RuntimeError(msg)
    if any(hasattr(each, "grad_scale") for each in optimizers):
        msg = "optimizer: several cannot step together if one has its own grad_scale attribute"
        raise RuntimeError(msg)


def _shared_by(parameters: list[list[Tensor]]) -> str:
    """Say which optimizers of a list have a parameter in common."""
    owners: dict[int, int] = {}
    for place, own in enumerate(parameters):
        for index, each in enumerate(own):
            if (first := owners.setdefault(id(each), place)) != place:
                shared = f"parameter {index}, of shape {tuple(each.shape)}"
                return f"optimizer[{place}]: {shared}, is also in optimizer[{first}]"
    return ""


def is_told(optimizer: Optimizer) -> bool:
    """Say whether torch's scaler tells an optimizer how to unscale, and torch's kernels do not."""
    if hasattr(optimizer, "grad_scale"):
        return True
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not is_torchs(optimizer)


def _takes_float16(optimizer: Optimizer) -> bool:
    """Say whether torch's scaler would let the optimizer have float16 gradients: it is fused."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and all(
        group.get("fused") for group in optimizer.param_groups
    )


def refuse_float16(grads: Grads) -> None:
    """Raise torch's error for float16 gradients, which only fused optimizers support."""
    if any(grad.dtype == torch.float16 for grad in grads.held):
        msg = "Attempting to unscale FP16 gradients."
        raise ValueError(msg)


def _joined(states: list[dict[str, Any]], device: torch.device) -> Tensor | None:
    """Join the flags of optimizers by their maximum, on a device; None if nothing was checked."""
    flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
    flags = [*{id(flag): _ops.moved(flag, device) for flag in flags}.values()]
    if len(flags) < 2:
        return flags[0] if flags else None
    return torch.stack(flags).amax()


class _said:  # noqa: N801 - reads as a statement
    """Say which optimizers of a list have stepped when one of them fails."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.place and isinstance(error, Exception):
            before = ", ".join(f"optimizer[{place}]" for place in range(self.place))
            msg = f"optimizer[{self.place}]: its step failed after {before} had stepped"
            raise RuntimeError(msg) from error
