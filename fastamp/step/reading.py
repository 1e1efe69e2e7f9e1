"""How a scaler reads gradients, and what it keeps of them until its next update."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fastamp import _ops
from fastamp._ops import Clip, Held
from fastamp.step.arguments import check_optimizer
from fastamp.step.fused import is_fused, parameters_of
from fastamp.step.report import StepReport, unread

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_FAKE = torch._C._TorchDispatchModeKey.FAKE


class Reading(torch.amp.GradScaler):
    """The private base of fastamp.GradScaler, which reads, unscales and clips gradients."""

    process_group: "ProcessGroup | None"
    last_step: StepReport
    clip_grad_norm_: Callable[[Optimizer, float], Tensor]
    _skipped: dict[torch.device, Tensor]
    _skipped_before: int
    _known: _ops.GradStats | None = None  # used in place of the next read; see `split`

    def _measure(self, packed: _ops.Packed, clip: Clip) -> _ops.GradStats:
        """Read every gradient once, unless `split` has done so before."""
        known, self._known = self._known, None
        if known is None:
            return packed.grad_stats(2.0, clip)
        if clip.skipped is not None:
            clip.skipped.add_(known.found_inf)
        return known

    def _state_of(
        self, optimizer: Optimizer, caller: str, name: str = "optimizer"
    ) -> dict[str, Any]:
        """Return the optimizer's state in this iteration, which without scaling is UNSCALED."""
        check_optimizer(optimizer, name, "param_groups" if self._enabled else "step")
        if not self._enabled:
            return {"stage": OptState.UNSCALED, "found_inf_per_device": {}}
        self._check_scale_growth_tracker(caller)
        return self._per_optimizer_states[id(optimizer)]

    def _states_of(self, optimizers: list[Optimizer]) -> list[dict[str, Any]]:
        """Return the states of optimizers that may step together."""
        if not optimizers:
            msg = "optimizer: expected at least one, got an empty list"
            raise ValueError(msg)
        states = []
        for place, each in enumerate(optimizers):
            name = f"optimizer[{place}]" if len(optimizers) > 1 else "optimizer"
            state = self._state_of(each, "step", name)
            if state["stage"] is OptState.STEPPED:
                msg = "step() has already been called since the last update()."
                raise RuntimeError(msg)
            states.append(state)
        if len(states) == 1:
            return states
        places = {id(each): place for place, each in enumerate(optimizers)}
        for place, each in enumerate(optimizers):
            if (again := places[id(each)]) != place:
                msg = f"optimizer[{again}]: the same as optimizer[{place}]; expected each once"
                raise ValueError(msg)
        if len({state["stage"] for state in states}) > 1:
            msg = "optimizer: of several, some were unscaled by unscale_() and some were not"
            raise RuntimeError(msg)
        if any(hasattr(each, "grad_scale") for each in optimizers):
            msg = "optimizer: several cannot step together if one has its own grad_scale attribute"
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
            refuse_float16(packed)
        inv_scale = _ops.moved(inv_scale, packed.device).reshape(())
        stats = packed.grad_stats(2.0, Clip(scale=inv_scale.reciprocal()))
        packed.rescale_(inv_scale)
        stats = stats.replace(scale=self._loss_scale())
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
        scale = None if given_scale is None else _ops.moved(given_scale, device)
        if state["stage"] is OptState.READY:
            assert self._scale is not None  # noqa: S101 - _state_of has checked it
            own = _ops.moved(self._scale, device)
            scale = own if scale is None else own * scale
        return Clip(scale, max_norm, only_finite=self._enabled, skipped=skipped)

    def _record(
        self, states: list[dict[str, Any]], device: torch.device, stats: _ops.GradStats, clip: Clip
    ) -> _ops.GradStats:
        """Store the statistics in the states of the optimizers."""
        # The flags of unscale_ still count: the gradients may have changed since.
        before = [flag for state in states for flag in state["found_inf_per_device"].values()]
        if before:
            stats = stats.replace(found_inf=join_flags([stats.found_inf, *before]))
        if self._enabled and clip.scale is not self._scale:
            stats = stats.replace(scale=self._loss_scale())
        for state in states:
            state["stats"] = stats
            if self._enabled:
                state["found_inf_per_device"] = {device: stats.found_inf}
        return stats

    def _rescale_(self, packed: _ops.Packed, factor: Tensor, found_inf: Tensor) -> None:
        """Unscale and clip in place, but never clip by a norm that is not finite: it leaves NaN."""
        if not self._enabled:  # else `Clip.only_finite` has left the clip out
            factor = torch.where(found_inf == 0, factor, 1.0)
        packed.rescale_(_ops.moved(factor, packed.device))

    def _loss_scale(self) -> Tensor:
        """Return a copy of the loss scale; 1 without scaling."""
        scale: Tensor | None = getattr(self, "_scale", None)
        return torch.ones(()) if scale is None else scale.clone()

    def _hold(self, optimizers: list[Optimizer]) -> "Held | None":
        """Return what this rank holds of the gradients; None where torch has to handle them."""
        # A parameter may be there twice, as tied weights, also in one optimizer.
        parameters = [*{id(each): each for each in parameters_of(optimizers)}.values()]
        grads = [grad for parameter in parameters if (grad := parameter.grad) is not None]
        if not grads and self.process_group is None:
            return None
        align = any(map(is_fused, optimizers))
        return _ops.hold(grads, self.process_group, owners=parameters, align=align)

    def _pack(self, optimizers: list[Optimizer], grads: "Held | None" = None) -> _ops.Packed | None:
        """Hand the optimizers' gradients to their backends; None where torch has to handle them."""
        grads = self._hold(optimizers) if grads is None else grads
        return None if grads is None else grads.pack()

    def _report(
        self, states: list[dict[str, Any]], way: str, found_inf: Tensor | None = None
    ) -> StepReport:
        """Make `last_step` from what was read in this iteration, with another flag if given."""
        stats: _ops.GradStats | None = states[0].get("stats")
        # Those of separate `unscale_` calls are each of one optimizer.
        if stats is None or any(state.get("stats") is not stats for state in states):
            stats = unread(found_inf, self._loss_scale())
        elif found_inf is not None:
            stats = stats.replace(found_inf=found_inf)
        self.last_step = StepReport(stats, way)
        return self.last_step

    def _counter(self, device: torch.device) -> Tensor:
        """Return the device's count of skipped steps."""
        in_transform = torch._C._functorch.peek_interpreter_stack() is not None
        if in_transform or torch._C._get_dispatch_mode(_FAKE) is not None:
            return torch.zeros((), dtype=torch.float32, device=device)  # not kept
        if device not in self._skipped:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                msg = (
                    f"the first step on {device} is in the capture of a CUDA graph, whose replays "
                    "would reset the count of skipped steps: make one step before the capture"
                )
                raise RuntimeError(msg)
            # Later steps may count outside of inference mode. torch 2.6 cannot trace the change.
            inside = torch.is_inference_mode_enabled()
            with torch.inference_mode(mode=False) if inside else nullcontext():
                self._skipped[device] = torch.zeros((), dtype=torch.float32, device=device)
        return self._skipped[device]


def refuse_float16(packed: _ops.Packed) -> None:
    """Raise torch's error for float16 gradients, which only fused optimizers support."""
    if packed.has_float16:
        msg = "Attempting to unscale FP16 gradients."
        raise ValueError(msg)


def join_flags_of(states: Iterable[dict[str, Any]]) -> Tensor:
    """Join the flags of optimizers that step together, also those of separate `unscale_` calls."""
    flags = (flag for state in states for flag in state["found_inf_per_device"].values())
    return join_flags({id(flag): flag for flag in flags}.values())


def join_flags(flags: Iterable[Tensor]) -> Tensor:
    """Join flags of 0 and 1 by their maximum, since fused optimizers test for 1, on one device."""
    flags = list(flags)
    if not flags:
        msg = "No inf checks were recorded for this optimizer."
        raise AssertionError(msg)
    if len(flags) == 1:
        return flags[0]
    device = flags[0].device
    return torch.stack([_ops.moved(flag, device) for flag in flags]).amax()
