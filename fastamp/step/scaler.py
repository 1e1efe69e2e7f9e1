"""torch's GradScaler with one read of the gradients before the update, and no wait."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.optim import Optimizer

from fastamp import _ops
from fastamp.step import native
from fastamp.step.arguments import above_zero, as_bound, check_group, check_state
from fastamp.step.by_torch import step_by_torch
from fastamp.step.clip import torch_clip_grad_norm_
from fastamp.step.fused import call_step, is_fused, parameters_of, share_parameters
from fastamp.step.reading import Reading, join_flags, join_flags_of, refuse_float16
from fastamp.step.report import NonFinite, StepReport, nonfinite_parameters
from fastamp.step.schedule import Schedulers, advance, check_schedulers, settle

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class GradScaler(Reading):
    """torch.amp.GradScaler that unscales, checks, clips and steps with one read of the gradients.

    On the CPU and CUDA, fastamp itself updates the parameters of torch's Adam, AdamW, SGD and
    Adagrad, in the pass that unscales and clips, if the optimizer is fused or was given neither
    `fused` nor `foreach`; the optimizer state stays torch's. For other fused optimizers, unscaling
    and clipping are folded into their kernels. Nothing waits for the device. Any other optimizer
    costs one in-place multiply, left out when the factor is 1, and one read of a flag.

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
        self.last_step: StepReport = StepReport(None, "no step yet")
        """What the last call of `step` found."""

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped so far; waits for the device."""
        return self._skipped_before + sum(int(count.item()) for count in self._skipped.values())

    @_ops.outside_graphs
    def step(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        *args: Any,
        max_norm: float | None = None,
        zero_grad: bool = False,
        scheduler: Schedulers = None,
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
                This saves writing them back unscaled and clipped.
            scheduler: one or, in a list or tuple, several learning rate schedulers to step unless
                the optimizer's step is skipped. Do not call `scheduler.step()` as well. On CUDA
                they do not wait for the device: they step when the next step begins, when they are
                used (`get_last_lr()`, `state_dict()`), or when an optimizer's state is saved or
                loaded. Until then `optimizer.param_groups` holds the learning rate of the last
                step: do not change it there.
            **kwargs: handed on to `optimizer.step`.

        Returns:
            What `optimizer.step` returned, in a list for several; None where it was not called.

        Raises:
            RuntimeError: `closure=` was given to an enabled scaler, or any closure with `max_norm`;
                or `step` was called twice since the last `update`, or some optimizers of a list
                have been unscaled and others not.
            TypeError: `optimizer` is not an optimizer, or `max_norm` is not a number; or torch has
                to step one of several optimizers, e.g. because its gradients are of a tensor
                subclass other than DTensor; or `scheduler` is not a scheduler, or is a
                ReduceLROnPlateau, which needs a metric.
            ValueError: `max_norm` is NaN or below 0; a list is empty or has an optimizer twice; or
                a gradient is float16 and the optimizer is not fused.
        """
        several = isinstance(optimizer, list | tuple)
        optimizers: list[Optimizer] = [*optimizer] if several else [optimizer]  # type: ignore[misc, list-item]
        max_norm = None if max_norm is None else as_bound("max_norm", max_norm)
        if self._enabled and "closure" in kwargs:
            msg = "Closure use is not currently supported if GradScaler is enabled."
            raise RuntimeError(msg)
        if max_norm is not None and (args[0] if args else kwargs.get("closure")) is not None:
            msg = f"{max_norm=} cannot clip gradients that a closure recomputes inside the step"
            raise RuntimeError(msg)
        schedulers = check_schedulers(scheduler)
        states = self._states_of(optimizers)
        if self._enabled:
            self._unscale_as_replaced(optimizers, states)
        settle(optimizers)
        self._dropped = zero_grad = bool(zero_grad)
        steps = self._read_natively(optimizers, *args, **kwargs)
        if not self._enabled and max_norm is None:
            way = "native" if isinstance(steps, list) else f"torch's ({steps})"
            self.last_step = StepReport(None, f"{way}, bare: neither scaling nor max_norm")
            results = _step_bare(optimizers, steps, self.last_step, zero_grad, *args, **kwargs)
            advance(schedulers, optimizers, self.last_step)
            return results if several else results[0]
        if isinstance(steps, list):
            results = self._step_natively(optimizers, states, steps, max_norm, zero_grad=zero_grad)
        else:
            results = step_by_torch(self, optimizers, states, max_norm, steps, *args, **kwargs)
            for each in optimizers if zero_grad else ():
                each.zero_grad()
        for state in states:
            state["stage"] = OptState.STEPPED
        advance(schedulers, optimizers, self.last_step)
        for reference in self._observers:
            if (observer := reference()) is not None:
                observer.stepped()
        return results if several else results[0]

    @_ops.outside_graphs
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
            refuse_float16(packed)
        clip = self._clip(packed.device, state, max_norm)
        stats = self._record([state], packed.device, self._measure(packed, clip), clip)
        self._rescale_(packed, stats.factor, stats.found_inf)
        state["stage"] = OptState.UNSCALED
        return stats.norm

    @_ops.outside_graphs
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
            states = self._per_optimizer_states.values()
            found = [flag for state in states for flag in state["found_inf_per_device"].values()]
            scale = self._scale
            if len(found) > 1 or (found and scale is not None and found[0].device != scale.device):
                # torch would add them up in place, in a tensor that `last_step` may hold, and on
                # the CPU it would read one from a GPU before it has arrived.
                flag = join_flags(found)
                flag = flag if scale is None else _ops.moved(flag, scale.device)
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
            check_state(state_dict)
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

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        """Make the scale, as torch does, and the count of skipped steps beside it."""
        super()._lazy_init_scale_growth_tracker(dev)
        if not (dev.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self._counter(dev)

    def __getstate__(self) -> dict[str, Any]:
        """Keep the number of skipped steps; drop tensors, the process group and observers."""
        count = {"_skipped_before": self.skipped_steps, "_skipped": {}}
        state = super().__getstate__() | count | {"_observers": [], "process_group": None}
        del state["last_step"]  # tensors made here would be gone before a spawned process gets them
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load the state, with no report of a last step."""
        super().__setstate__(state)
        self.last_step = StepReport(None, "no step yet")

    def _unscale_as_replaced(
        self, optimizers: list[Optimizer], states: list[dict[str, Any]]
    ) -> None:
        """Call `unscale_` first if somebody has replaced it, or the `_unscale_grads_` it calls."""
        own, names = type(self), ("unscale_", "_unscale_grads_")
        if any(n in vars(self) or getattr(own, n) is not getattr(Reading, n) for n in names):
            for each, state in zip(optimizers, states, strict=True):
                if state["stage"] is OptState.READY:
                    self.unscale_(each)

    def _read_natively(
        self, optimizers: list[Optimizer], *args: Any, **kwargs: Any
    ) -> list[native.NativeStep] | str:
        """Prepare the steps that fastamp makes itself, or return the reason why torch has to."""
        given = (*args, *kwargs.values())
        if given and (given != (None,) or kwargs.keys() - {"closure"}):  # None is no closure
            return "the step has arguments"
        steps: list[native.NativeStep] = []
        for optimizer in optimizers:
            step = native.read(optimizer)
            if steps and not isinstance(step, str) and step.grads.device != steps[0].grads.device:
                step.forget()
                step = "the optimizers are on several devices"
            if isinstance(step, str):
                for other in steps:
                    other.forget()
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
        stats, found_inf = None, None
        if not is_ready and max_norm is None:
            # It may be on another device if somebody has replaced `unscale_`.
            found_inf = _ops.moved(join_flags_of(states), steps[0].grads.device)
        else:
            grads = steps[0].grads
            if len(steps) > 1 or steps[0].parts is not None or self.process_group is not None:
                grads = cast("_ops.Packed", self._pack(optimizers))
            if is_ready and grads.has_float16 and not all(map(is_fused, optimizers)):
                for step in steps:
                    step.forget()
                refuse_float16(grads)
            reads_all = is_ready or not self._enabled  # else `unscale_` may have found an inf, too
            skipped = self._counter(grads.device) if reads_all else None
            clip = self._clip(grads.device, states[0], max_norm, skipped=skipped)
            stats = self._record(states, grads.device, self._measure(grads, clip), clip)
            if len(optimizers) > 1 and share_parameters(optimizers):
                found_inf = stats.found_inf
                self._rescale_(grads, stats.factor, found_inf)
                stats = None
        by_python = steps[0].grads.has_fallback
        report = self._report(states, "native" + "; by the fallback" * by_python, found_inf)
        if self._enabled and not is_ready:
            self._counter(report.found_inf.device).add_(report.found_inf)
        for step in steps:
            step.apply(stats, found_inf, zero_grad=zero_grad)
            if step.notify is not None:
                step.notify(report)
        return [None] * len(steps)


def _step_bare(
    optimizers: list[Optimizer],
    steps: list[native.NativeStep] | str,
    report: StepReport,
    zero_grad: bool,  # noqa: FBT001 - the arguments after it are the optimizer's
    *args: Any,
    **kwargs: Any,
) -> list[float | None]:
    """Step without reading the gradients first."""
    if isinstance(steps, str):
        results = [call_step(each, each.step, *args, **kwargs) for each in optimizers]
        for each in optimizers if zero_grad else ():
            each.zero_grad()
        return results
    for step in steps:
        step.apply(None, zero_grad=zero_grad)
        if step.notify is not None:
            step.notify(report)
    return [None] * len(steps)
