"""torch's GradScaler around fastamp's step: the scale, its state, and what each step found."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.optim import Optimizer

from fastamp import _ops
from fastamp._ops import Clip, GradStats, Why
from fastamp.step.arguments import above_zero, as_bound, check_group, check_optimizers
from fastamp.step.make_step import (
    NOTHING_CHECKED,
    SkipCounts,
    hold_of,
    make_step,
    measure,
    refuse_float16,
    refuse_fsdp1,
    rescale,
)
from fastamp.step.native import parameters_of
from fastamp.step.report import NonFinite, StepReport, nonfinite_parameters, unread

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

    DTensors may have any placements on meshes of the same ranks. They cost one all-reduce a group;
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
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)  # disabled, too
        self._skipped = SkipCounts()
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

    @_ops.untraced
    def step(  # noqa: C901, PLR0912 - the hot path: no calls of Python to be short
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
                have been unscaled and others not.
            TypeError: `optimizer` is not an optimizer, or `max_norm` is not a number; or torch has
                to tell one of several optimizers how to unscale.
            ValueError: `max_norm` is NaN or below 0; a list is empty, has an optimizer twice, or
                one parameter in two optimizers; or a gradient is float16 and the optimizer is not
                fused.
        """
        several = isinstance(optimizer, list | tuple)
        optimizers: list[Optimizer] = [*optimizer] if several else [optimizer]  # type: ignore[misc, list-item]
        why = self._check_arguments(args, kwargs, max_norm) if args or kwargs else None
        if max_norm is not None and not (type(max_norm) is float and max_norm >= 0):
            max_norm = as_bound("max_norm", max_norm)
        states = self._states_of(optimizers)
        self._dropped = zero_grad = bool(zero_grad)
        is_ready = states[0]["stage"] is OptState.READY
        before = known = None
        if not is_ready and (before := _joined(states)) is not None:
            known = self._read_before(states, before)
        elif self._enabled and not is_ready and max_norm is None:
            raise AssertionError(NOTHING_CHECKED)
        cls: Any = type(self)
        if _overrides(cls) or not vars(self).keys().isdisjoint(_CALLED):
            told = "a method of the scaler is overridden"
        else:
            told = ""
            for each in optimizers if self._enabled else ():
                kind: Any = type(each)
                if hasattr(each, "grad_scale") or (
                    getattr(each, "_step_supports_amp_scaling", False) and not _is_torchs(kind.step)
                ):
                    told = "torch's scaler tells the optimizer how to unscale"
        if told:
            results = self._step_as_torch(optimizers, states, max_norm, told, args, kwargs)
            for each in optimizers if zero_grad else ():
                each.zero_grad()
        else:
            self.last_step, results = make_step(
                optimizers,
                Clip(self._scale if is_ready else None, max_norm, before=before),
                states,
                group=self.process_group,
                known=known,
                counts=self._skipped,
                zero_grad=zero_grad,
                why=why,
                args=args,
                kwargs=kwargs,
            )
            if self._enabled and not is_ready and max_norm is not None:
                self.last_step.set_scale(self._loss_scale())
            if self._enabled:
                stats = self.last_step._stats
                flag = stats[1] if isinstance(stats, Tensor) else self.last_step.found_inf
                for state in states:
                    state["found_inf_per_device"] = {flag.device: flag}
        for state in states:
            state["stage"] = OptState.STEPPED
        reads = self._enabled or max_norm is not None or before is not None
        for reference in self._observers if reads else ():
            if (observer := reference()) is not None:
                observer.stepped()
        return results if several else results[0]

    @_ops.untraced
    def clip_grad_norm_(
        self, optimizer: Optimizer | Sequence[Optimizer], max_norm: float
    ) -> Tensor:
        """Unscale the gradients, check them and clip them, in place, for use before the step.

        If a gradient is not finite they are only unscaled, and the next `step` skips, without a
        second read, of a scaler that is not enabled, too.

        Args:
            optimizer: owns the gradients; they may have been unscaled already. Several optimizers
                in a list or tuple are clipped to one norm.
            max_norm: largest norm of all unscaled gradients together.

        Returns:
            The norm of the unscaled gradients before clipping, a 0-dim tensor.

        Raises:
            RuntimeError: `step` has been called since the last `update`.
            TypeError: `optimizer` is not an optimizer, or `max_norm` is not a number.
            ValueError: `max_norm` is NaN or below 0, or a gradient is float16.
        """
        max_norm = as_bound("max_norm", max_norm)
        several = isinstance(optimizer, list | tuple)
        optimizers: list[Optimizer] = [*optimizer] if several else [optimizer]  # type: ignore[misc, list-item]
        states = self._states_of(optimizers, "clip_grad_norm_")
        refuse_fsdp1(optimizers, self.process_group)
        grads = hold_of(optimizers, self.process_group)
        is_ready = states[0]["stage"] is OptState.READY
        if is_ready and (grads is None or _overrides(cast(Any, type(self)))):
            for each in optimizers:
                self.unscale_(each)
            is_ready = False
        if grads is None:
            return torch.tensor(0.0)
        if is_ready:
            refuse_float16(grads)
        scale = self._scale if is_ready else None
        stats = measure(grads, Clip(scale, max_norm, before=_joined(states)))
        if self._enabled and not is_ready:
            stats = stats.replace(scale=self._loss_scale())
        rescale(grads, stats, states)
        if not self._enabled:  # until the next call of `step` or `update`
            self._per_optimizer_states.update(zip(map(id, optimizers), states, strict=True))
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
        if not self._enabled:
            self._per_optimizer_states.clear()
        elif new_scale is None:
            states = [*self._per_optimizer_states.values()]
            found = [flag for state in states for flag in state["found_inf_per_device"].values()]
            scale = self._scale
            if len(found) > 1 or (found and scale is not None and found[0].device != scale.device):
                # torch would add them up in place, in a tensor that `last_step` may hold, and on
                # the CPU it would read one from a GPU before it has arrived.
                flag = cast(Tensor, _joined(states, None if scale is None else scale.device))
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
        """
        if self._enabled and "scale" in state_dict:
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
    ) -> Why | None:
        """Refuse arguments of `step`, or say why they need torch's step."""
        if self._enabled and "closure" in kwargs:
            msg = "Closure use is not currently supported if GradScaler is enabled."
            raise RuntimeError(msg)
        if max_norm is not None and (args[0] if args else kwargs.get("closure")) is not None:
            msg = f"{max_norm=} cannot clip gradients that a closure recomputes inside the step"
            raise RuntimeError(msg)
        given = (*args, *kwargs.values())
        is_bare = not given or (given == (None,) and not kwargs.keys() - {"closure"})
        return None if is_bare else Why("torch", "the step has arguments")

    def _states_of(self, optimizers: list[Optimizer], caller: str = "step") -> list[dict[str, Any]]:
        """Return the optimizers' states in this iteration.

        Without scaling they are UNSCALED, and taken: `clip_grad_norm_` leaves one for one `step`.
        """
        needed = "param_groups" if self._enabled else "step"
        if len(optimizers) != 1 or not hasattr(optimizers[0], needed):
            check_optimizers(optimizers, needed)
        states: list[dict[str, Any]] = []
        for each in optimizers:
            if self._enabled:
                if self._scale is None or self._growth_tracker is None:
                    self._check_scale_growth_tracker(caller)  # raises torch's error
                state = self._per_optimizer_states[id(each)]
            else:
                new = {"stage": OptState.UNSCALED, "found_inf_per_device": {}}
                known = self._per_optimizer_states.pop(id(each), new)
                state = known if caller == "step" else new
            if state["stage"] is OptState.STEPPED:
                again = "has already been called since the last update()"
                again = again if caller == "step" else "is being called after step()"
                msg = f"{caller}() {again}."
                raise RuntimeError(msg)
            states.append(state)
            if state["stage"] is not states[0]["stage"]:
                msg = "optimizer: of several, some were unscaled by unscale_() and some were not"
                raise RuntimeError(msg)
        return states

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
            found_inf = _joined([state])
            if found_inf is None:
                found_inf = torch.zeros((), dtype=torch.float32)
            self._skipped.on(found_inf.device).add_(found_inf)
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
        check_optimizers([optimizer], "param_groups")
        refuse_fsdp1([optimizer], self.process_group)
        grads = hold_of([optimizer], self.process_group)
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

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        """Make the scale, as torch does, and the count of skipped steps beside it."""
        super()._lazy_init_scale_growth_tracker(dev)
        if not (dev.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self._skipped.on(dev)

    def __getstate__(self) -> dict[str, Any]:
        """Keep the number of skipped steps; drop tensors, the process group and observers."""
        count = {"_skipped_before": self.skipped_steps, "_skipped": SkipCounts()}
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


@lru_cache(maxsize=64)
def _is_torchs(step: Any) -> bool:
    """Say whether an optimizer's step is one of torch's."""
    return (getattr(step, "__module__", None) or "").startswith("torch.optim.")


def _joined(states: list[dict[str, Any]], device: torch.device | None = None) -> Tensor | None:
    """Join the flags of optimizers by their maximum, on a device; None if nothing was checked."""
    flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
    if not flags:
        return None
    device = flags[0].device if device is None else device
    flags = [*{id(flag): _ops.moved(flag, device) for flag in flags}.values()]
    return flags[0] if len(flags) == 1 else torch.stack(flags).amax()
