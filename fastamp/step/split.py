"""A step in two calls, as frameworks make it: the first one clips, the second one updates.

The first call only reads the gradients and returns their norm. The second one unscales and clips
them in the pass of the update.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fastamp import _ops
from fastamp.step.arguments import as_bound
from fastamp.step.fused import (
    has_pre_hook,
    parameters_of,
    share_parameters,
    takes_scaler,
    why_in_place,
)
from fastamp.step.reading import refuse_float16
from fastamp.step.scaler import GradScaler

_WRITTEN = (
    "the gradients were changed between clip_grad_norm_() and step(), and are unscaled and clipped "
    "only in step(): change them before clip_grad_norm_(), or call prepare(..., fold=False), which "
    "clips at once"
)


class _Now(Enum):
    """How gradients have changed since they were read."""

    SAME = "the same tensors, unchanged"
    WRITTEN = "written, or some replaced"
    REPLACED = "all replaced"
    CLEARED = "all gone, or set to zero"


class _Ahead:
    """The gradients of one optimizer that were read before its step, and their statistics."""

    def __init__(self, optimizer: Optimizer, max_norm: float, stats: _ops.GradStats) -> None:
        self.max_norm, self.stats, self.is_clipped = max_norm, stats, False
        self._parameters = parameters_of([optimizer])
        self._grads = [parameter.grad for parameter in self._parameters]
        self._versions = self._count_writes()

    def _count_writes(self) -> list[int]:
        return [_ops.local_of(grad)._version for grad in self._grads if grad is not None]

    def look(self) -> _Now:
        """Compare the gradients with those that were read; a write after the clip is fine."""
        now = [parameter.grad for parameter in self._parameters]
        pairs = list(zip(now, self._grads, strict=True))
        if all(new is old for new, old in pairs):
            if self.is_clipped or self._count_writes() == self._versions:
                return _Now.SAME
            is_zero = not any(_ops.local_of(each).any() for each in now if each is not None)
            return _Now.CLEARED if is_zero else _Now.WRITTEN
        if any(new is old for new, old in pairs if old is not None):
            return _Now.WRITTEN
        return _Now.CLEARED if all(new is None for new in now) else _Now.REPLACED

    def clipped(self) -> None:
        """Note that the gradients are unscaled and clipped: of the read only found_inf counts."""
        one = torch.ones_like(self.stats.factor)
        self.stats, self.is_clipped = self.stats.replace(factor=one, grad_scale=one), True


def _may_share(optimizers: list[Optimizer]) -> bool:
    """Say whether optimizers that step one by one may use the statistics of one read."""
    if len(optimizers) == 1:
        return True
    devices = {parameter.device for parameter in parameters_of(optimizers)}
    return len(devices) == 1 and not share_parameters(optimizers)


class SplitStep:
    """`clip_grad_norm_` and `step` of a scaler, sharing one read of the gradients.

    Args:
        scaler: makes the steps; not enabled if the loss is not scaled.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self._ahead: WeakKeyDictionary[Optimizer, _Ahead] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without the gradients."""
        return SplitStep, (self.scaler,)

    @_ops.outside_graphs
    def clip_grad_norm_(
        self, optimizers: Sequence[Optimizer], max_norm: float, *, fold: bool = True
    ) -> Tensor | None:
        """Clip the gradients of optimizers to one norm: in the steps that follow, or now.

        They are clipped now if `fold` is False, or if a step cannot fold the clip into its pass.

        Returns:
            The norm of the unscaled gradients, a 0-dim tensor, without a wait; None if torch has to
            clip them, and nothing was done.

        Raises:
            RuntimeError: the gradients have been unscaled since the last update, or written to
                since an earlier call whose clip is still pending.
            TypeError: `max_norm` is not a number.
            ValueError: `max_norm` is NaN or below 0, or a gradient to unscale is float16.
        """
        max_norm = as_bound("max_norm", max_norm)
        for optimizer in optimizers:
            self.settle(optimizer)
        found = self._read([*optimizers], max_norm)
        if found is None:
            return None
        stats, can_fold = found
        for optimizer in optimizers:
            self._ahead[optimizer] = _Ahead(optimizer, max_norm, stats)
            if not (fold and can_fold):
                self.settle(optimizer)
        return stats.norm

    def _read(
        self, optimizers: list[Optimizer], max_norm: float
    ) -> tuple[_ops.GradStats, bool] | None:
        """Read the gradients, and say whether the optimizers' steps can clip them."""
        scaler = self.scaler
        states = scaler._states_of(optimizers)
        is_ready = states[0]["stage"] is OptState.READY
        if scaler.is_enabled() and not is_ready:
            scaler.unscale_(optimizers[0])  # raises torch's error
        if any(takes_scaler(type(each)) or hasattr(each, "grad_scale") for each in optimizers):  # type: ignore[arg-type]
            return None  # somebody else tells an optimizer how to unscale
        if not _may_share(optimizers):
            return None
        steps = scaler._read_natively(optimizers)
        if isinstance(steps, str):
            packed, steps, can_fold = scaler._pack(optimizers), [], False
            if len(optimizers) == 1:
                can_fold = why_in_place(optimizers[0]) is None and not has_pre_hook(optimizers[0])
        else:
            can_fold, packed = True, steps[0].grads
            if len(steps) > 1 or steps[0].parts is not None or scaler.process_group is not None:
                packed = scaler._pack(optimizers)
        try:
            if packed is None:
                return None
            if is_ready:
                refuse_float16(packed)
            # Not the scaler's own count: whether a step follows is unknown.
            device = packed.device
            counts = is_ready and can_fold
            count = torch.zeros((), dtype=torch.float32, device=device) if counts else None
            clip = scaler._clip(device, states[0], max_norm, skipped=count)
            return packed.grad_stats(2.0, clip), can_fold
        finally:
            for step in steps:
                step.forget()

    def settle(self, optimizer: Optimizer) -> bool:
        """Make a pending clip of the optimizer's gradients now; say whether they are clipped.

        Raises:
            RuntimeError: the gradients have been written to since they were read.
        """
        ahead = self._ahead.get(optimizer)
        now = None if ahead is None else ahead.look()
        if ahead is None or now in (_Now.CLEARED, _Now.REPLACED):
            self.forget(optimizer)
            return False
        if ahead.is_clipped:
            return True
        if now is _Now.WRITTEN:
            self.forget(optimizer)
            raise RuntimeError(_WRITTEN)
        self.scaler._known = ahead.stats
        try:
            self.scaler.clip_grad_norm_(optimizer, ahead.max_norm)
        finally:
            self.scaler._known = None
        ahead.clipped()
        return True

    def forget(self, optimizer: Optimizer) -> None:
        """Drop the pending clip and the gradients that were read."""
        self._ahead.pop(optimizer, None)

    def before_backward(self) -> None:
        """Make all pending clips, since a backward pass adds to the gradients; not with scaling.

        With scaling the next call raises an error, as torch's scaler does.
        """
        for optimizer in [*self._ahead]:
            if not self.scaler.is_enabled():
                self.settle(optimizer)
                self.forget(optimizer)
            elif self._ahead[optimizer].look() is _Now.CLEARED:
                self.forget(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step as `GradScaler.step`, with the pending clip, and update the scale.

        Raises:
            RuntimeError: the gradients have been written to between clip and step.
        """
        if args or kwargs:  # a closure, which would compute gradients anew
            self.settle(optimizer)
            self.forget(optimizer)
        ahead = self._ahead.pop(optimizer, None)
        now = _Now.CLEARED if ahead is None else ahead.look()
        if ahead is None or now is _Now.CLEARED or (now is _Now.REPLACED and ahead.is_clipped):
            result = self.scaler.step(optimizer, *args, **kwargs)
        elif now is not _Now.SAME and not ahead.is_clipped:
            raise RuntimeError(_WRITTEN)
        else:
            self.scaler._known = ahead.stats
            try:
                result = self.scaler.step(optimizer, max_norm=ahead.max_norm)
            finally:
                self.scaler._known = None
        self.scaler.update()
        return result
