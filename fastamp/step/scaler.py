"""torch's GradScaler around fastamp's step: the scale, its state, and what each step found."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.optim import Optimizer

from fastamp import _ops
from fastamp._ops import Clip, StepReport
from fastamp.step.arguments import as_bound, check_group, check_optimizers
from fastamp.step.make_step import (
    NOTHING_CHECKED,
    SkipCounts,
    grads_to_read,
    make_step,
    measure,
    rescale,
)
from fastamp.step.nonfinite import NonFinite, nonfinite_parameters

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# What torch's `step` calls on its scaler: where one is overridden, torch's `step` makes the step.
_CALLED = {"unscale_", "_unscale_grads_", "_maybe_opt_step", "_check_inf_per_device"}


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler that unscales, checks, clips and steps with one read of the gradients.

    On the CPU and CUDA fastamp's core makes the step of torch's Adam, AdamW, SGD and Muon, if they
    are fused or were given neither `fused` nor `foreach`; the state stays torch's, and nothing
    waits for the device. Any other optimizer, and one with a step hook, costs one multiply in place
    and one read of a flag, before its own `step`. With DTensors, and with a `process_group`, all
    ranks get the same norm, found_inf and scale.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval: as in
            torch.amp.GradScaler.
        enabled: False scales nothing, for FP32 and bf16; `step(..., max_norm=...)` still clips, and
            skips the step when a gradient is not finite.
        min_scale: the scale never falls below this.
        max_scale: the scale never grows above this.
        process_group: ranks that hold different gradients: the shards of FSDP1, or the stages of a
            pipeline; it has all ranks of DTensors' meshes. A copied or pickled scaler has none.

    Raises:
        ValueError: a scale is not above 0, or `init_scale` not between the two bounds.
        TypeError: a scale is not a number, or `process_group` not a group with this rank in it.

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

    last_step: StepReport = StepReport(None, "no step yet")
    """What the last call of `step` found."""
    process_group: "ProcessGroup | None" = None
    _skipped_before = 0  # by the instance that this one was unpickled from

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
        init_scale = as_bound("init_scale", init_scale, above_zero=True)
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        low = 0.0 if min_scale is None else as_bound("min_scale", min_scale, above_zero=True)
        high = math.inf if max_scale is None else as_bound("max_scale", max_scale, above_zero=True)
        if not low <= init_scale <= high:
            msg = f"init_scale: expected {min_scale=} <= {init_scale} <= {max_scale=}"
            raise ValueError(msg)
        self._bounds = low, high
        check_group(process_group)
        self.process_group = process_group
        if not enabled:
            fresh: Any = partial(dict, stage=OptState.UNSCALED, found_inf_per_device={})
            self._per_optimizer_states = defaultdict(fresh)
        self._skipped = SkipCounts()
        # Weak references to objects to notify after every step and update; see fastamp.metrics.
        self._observers: list[Callable[[], Any]] = []

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped so far; waits for the device."""
        return self._skipped_before + sum(int(count.item()) for count in self._skipped.values())

    @_ops.untraced
    def step(  # noqa: C901, PLR0912, PLR0915 - the hot path: no calls of Python to be short
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        *args: Any,
        max_norm: float | None = None,
        zero_grad: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Unscale the gradients, check them, clip them to `max_norm`, and step if all are finite.

        A gradient that is not finite skips the step if the scaler is enabled or `max_norm` is set;
        else the gradients are not read, as in torch. Afterwards `.grad` is unscaled and clipped.

        Args:
            optimizer: applies the gradients. Several in a list or tuple are clipped to one norm,
                and skip together.
            *args: handed on to `optimizer.step`, as are `kwargs`.
            max_norm: largest norm of all unscaled gradients together; None does not clip.
            zero_grad: set the gradients to None afterwards, which saves writing them back; see
                `optimizer_step`.
            **kwargs: see `args`.

        Returns:
            What `optimizer.step` returned, in a list for several; None where it was not called.

        Raises:
            RuntimeError: a closure with an enabled scaler or `max_norm`; `step` was called twice
                since the last `update`; or some optimizers of a list are unscaled and others not.
            TypeError, ValueError: as in `optimizer_step`; or one of several optimizers unscales
                itself, or a gradient is float16 and the optimizer not fused.
        """
        several = isinstance(optimizer, list | tuple)
        optimizers: list[Optimizer] = [*optimizer] if several else [optimizer]  # type: ignore[misc, list-item]
        if args or kwargs:
            if self._enabled and "closure" in kwargs:
                msg = "Closure use is not currently supported if GradScaler is enabled."
                raise RuntimeError(msg)
            closure = (args or [kwargs.get("closure")])[0]
            if isinstance(closure, float | int):
                msg = f"step: expected a closure, got {closure!r}; to clip: max_norm={closure}"
                raise TypeError(msg)
            if closure is not None and max_norm is not None:
                msg = f"{max_norm=} cannot clip gradients that a closure recomputes inside the step"
                raise RuntimeError(msg)
            if (args, kwargs) in [((None,), {}), ((), {"closure": None})]:
                args, kwargs = (), {}
        if max_norm is not None and not (type(max_norm) is float and max_norm >= 0):
            max_norm = as_bound("max_norm", max_norm)
        states = self._states_of(optimizers)
        zero_grad = bool(zero_grad)
        is_ready = states[0]["stage"] is OptState.READY
        known = None if is_ready else _read_before(states)
        by_torch = ""
        cls: Any = type(self)
        if self._enabled and (_overrides(cls) or not _CALLED.isdisjoint(vars(self))):
            by_torch = "a method of the scaler is overridden"
        for each in optimizers if self._enabled else ():
            kind: Any = type(each)
            if hasattr(each, "grad_scale") or (
                getattr(each, "_step_supports_amp_scaling", False)
                and not (getattr(kind.step, "__module__", None) or "").startswith("torch.optim.")
            ):
                by_torch = "torch's scaler tells the optimizer how to unscale"
        if by_torch:
            if len(optimizers) > 1:
                msg = f"optimizer: several cannot step together: torch's scaler has to, {by_torch}"
                raise TypeError(msg)
            norm = None if max_norm is None else self.clip_grad_norm_(optimizers[0], max_norm)
            results = [super().step(optimizers[0], *args, **kwargs)]
            stats = _read_before(states) or StepReport(None)  # if the optimizer takes the scaler
            self._skipped.on(stats.found_inf.device).add_(stats.found_inf)
            stats = stats if norm is None else stats.replace(norm=norm)
            self.last_step = StepReport(stats.values, f"torch's: {by_torch}")
            if zero_grad:
                optimizers[0].zero_grad()
        else:
            if self._enabled and not is_ready and known is None and max_norm is None:
                raise AssertionError(NOTHING_CHECKED)
            self.last_step, results = make_step(
                optimizers,
                Clip(self._scale if is_ready else None, max_norm),
                states,
                group=self.process_group,
                known=known,
                counts=self._skipped,
                zero_grad=zero_grad,
                args=args,
                kwargs=kwargs,
            )
            if self._enabled:
                values = self.last_step.values
                flag = self.last_step.found_inf if values is None else values[1]
                for state in states:
                    state["found_inf_per_device"] = {flag.device: flag}
        if self._enabled and (by_torch or not is_ready):
            self.last_step = self.last_step.replace(scale=cast(Tensor, self._scale).clone())
        for state in states:
            state["stage"] = OptState.STEPPED
        reads = self._enabled or max_norm is not None or known is not None
        for reference in self._observers if reads else ():
            if (observer := reference()) is not None:
                observer.stepped()
        return results if several else results[0]

    @_ops.untraced
    def clip_grad_norm_(
        self, optimizer: Optimizer | Sequence[Optimizer], max_norm: float
    ) -> Tensor:
        """Unscale the gradients, check them and clip them, in place, for use before the step.

        If one is not finite they are only unscaled, and the next `step` skips without a second
        read, also with `enabled=False`. The arguments are those of `step`; the gradients may be
        unscaled already.

        Returns:
            The norm of the unscaled gradients before clipping, a 0-dim tensor.

        Raises:
            RuntimeError: `step` has been called since the last `update`.
            TypeError, ValueError: as in `step`.
        """
        max_norm = as_bound("max_norm", max_norm)
        several = isinstance(optimizer, list | tuple)
        optimizers: list[Optimizer] = [*optimizer] if several else [optimizer]  # type: ignore[misc, list-item]
        states = self._states_of(optimizers, "clip_grad_norm_")
        is_ready = states[0]["stage"] is OptState.READY
        if is_ready and _overrides(cast(Any, type(self))):
            for each in optimizers:
                self.unscale_(each)
            is_ready = False
        grads = grads_to_read(optimizers, self.process_group, allow_float16=not is_ready)
        if grads is None:
            return torch.tensor(0.0)
        clip = Clip(self._scale if is_ready else None, max_norm, before=_joined(states))
        stats = measure(grads, clip)
        rescale(grads, stats, states)
        return stats.norm

    @_ops.untraced
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the loss scale to the steps since the last call, or set it: as torch's `update`."""
        if not self._enabled:
            self._per_optimizer_states.clear()
        elif new_scale is None and self._scale is not None:
            # torch would add the flags up in place, in a tensor that `last_step` may hold, and on
            # the CPU it would read one from a GPU before it has arrived.
            states, device = [*self._per_optimizer_states.values()], self._scale.device
            is_one = len(states) == 1 and [*states[0]["found_inf_per_device"]] == [device]
            if not is_one and (flag := _joined(states, device)) is not None:
                state = _refresh_per_optimizer_state()
                state["found_inf_per_device"] = {flag.device: flag}
                self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state, {0: state})
        super().update(new_scale)
        if self._enabled and self._scale is not None and self._bounds != (0.0, math.inf):
            self._scale.clamp_(*self._bounds)
        for reference in self._observers:
            if (observer := reference()) is not None:
                observer.updated()

    def nonfinite_parameters(self, module: torch.nn.Module) -> list[NonFinite]:
        """Name the parameters of a module whose gradients hold inf or NaN.

        See `fastamp.nonfinite_parameters`; a module without any gradient is a RuntimeError.
        """
        found = nonfinite_parameters(module)
        if all(parameter.grad is None for parameter in module.parameters()):
            msg = "module: no parameter has a gradient; leave zero_grad=True out of the step"
            raise RuntimeError(msg)
        return found

    def _states_of(self, optimizers: list[Optimizer], caller: str = "step") -> list[dict[str, Any]]:
        """Return the optimizers' states; without scaling a clip leaves them for one step."""
        needed = "param_groups" if self._enabled else "step"
        if len(optimizers) != 1 or not hasattr(optimizers[0], needed):
            check_optimizers(optimizers, needed)
        if self._enabled and self._scale is None:
            self._check_scale_growth_tracker(caller)  # raises torch's error
        states: list[dict[str, Any]] = []
        for each in optimizers:
            if not self._enabled and caller != "step":
                self._per_optimizer_states.pop(id(each), None)
            state = self._per_optimizer_states[id(each)]
            if not self._enabled and caller == "step":
                del self._per_optimizer_states[id(each)]
            if state["stage"] is OptState.STEPPED:
                msg = "step() has already been called since the last update()."
                raise RuntimeError(msg)
            states.append(state)
            if state["stage"] is not states[0]["stage"]:
                msg = "optimizer: of several, some were unscaled by unscale_() and some were not"
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
        check_optimizers([optimizer], "param_groups")
        grads = grads_to_read([optimizer], self.process_group, allow_float16=allow_fp16)
        if grads is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        inv_scale = _ops.moved(inv_scale, grads.device).reshape(())
        stats = grads.measure(Clip(scale=inv_scale.reciprocal()))
        grads.rescale_(inv_scale)
        if not allow_fp16:  # else it is called for the check alone, with a scale of 1
            self._per_optimizer_states[id(optimizer)]["stats"] = stats
        return {grads.device: stats.found_inf}

    def __getstate__(self) -> dict[str, Any]:
        """Keep the number of skipped steps; drop tensors, the process group and observers."""
        count = {"_skipped_before": self.skipped_steps, "_skipped": SkipCounts()}
        state = super().__getstate__() | count | {"_observers": []}
        # Tensors made here would be gone before a spawned process gets them.
        return {name: state[name] for name in state.keys() - {"last_step", "process_group"}}


@lru_cache(maxsize=64)
def _overrides(cls: Any) -> bool:
    """Say whether a class overrides a method that torch's `step` calls."""
    stock = torch.amp.GradScaler
    return any(
        getattr(cls, name) not in (vars(GradScaler).get(name), getattr(stock, name))
        for name in _CALLED
    )


def _joined(states: list[dict[str, Any]], device: torch.device | None = None) -> Tensor | None:
    """Join the flags of optimizers by their maximum, on a device; None if nothing was checked."""
    flags = {id(f): f for state in states for f in state["found_inf_per_device"].values()}
    if not flags:
        return None
    device = device or next(iter(flags.values())).device
    first, *others = (_ops.moved(flag, device) for flag in flags.values())
    return torch.stack([first, *others]).amax() if others else first


def _read_before(states: list[dict[str, Any]]) -> StepReport | None:
    """Return the statistics of earlier reads in this iteration; None if there were none."""
    found_inf = _joined(states)
    if found_inf is None:
        return None
    stats: StepReport | None = states[0].get("stats")
    # Those of separate `unscale_` calls are each of one optimizer.
    if stats is None or any(state.get("stats") is not stats for state in states):
        return StepReport(_ops.unread(found_inf))
    return stats.replace(found_inf=found_inf)
