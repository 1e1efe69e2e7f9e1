"""A step in two calls, as frameworks make it: the first one clips, the second one updates.

The first call only reads the gradients and returns their norm. The second one unscales and clips
them in the pass of the update. A step that fastamp does not make itself is clipped at once.
"""

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fastamp import _ops
from fastamp.step import native
from fastamp.step.arguments import as_bound
from fastamp.step.native import parameters_of
from fastamp.step.scaler import GradScaler, is_told, refuse_float16

_WRITTEN = (
    "the gradients were changed between clip_grad_norm_() and step(), and are unscaled and clipped "
    "only in step(): change them before clip_grad_norm_(), or call prepare(..., fold=False), which "
    "clips at once"
)


def _read(parameter: Tensor) -> tuple[Tensor, Tensor | None, int]:
    """Return a parameter, its gradient, and how often that was written."""
    grad = parameter.grad
    return parameter, grad, 0 if grad is None else _ops.count_writes(_ops.local_of(grad))


def _grads_of(optimizer: Optimizer) -> list[Tensor | None]:
    return [parameter.grad for parameter in parameters_of([optimizer])]


class _Pending(NamedTuple):
    """A clip that the next step makes."""

    max_norm: float
    stats: _ops.GradStats
    read: list[tuple[Tensor, Tensor | None, int]]
    """The gradients that it is for."""
    hook: Any
    """The handle of a hook that clips if the optimizer's own `step` is called."""

    def is_cleared(self) -> bool:
        """Say whether the gradients are gone or zeros; raise an error if they were changed."""
        if self.is_unchanged():
            return False
        grads = [parameter.grad for parameter, *_ in self.read if parameter.grad is not None]
        if any(_ops.local_of(grad).any() for grad in grads):
            raise RuntimeError(_WRITTEN)
        return True

    def is_unchanged(self) -> bool:
        """Say whether the gradients are the same tensors with the same elements."""
        pairs = [(_read(old[0]), old) for old in self.read]
        return all(new[1] is old[1] and new[2] == old[2] for new, old in pairs)


class SplitStep:
    """`clip_grad_norm_` and `step` of a scaler, sharing one read of the gradients.

    Args:
        scaler: makes the steps; not enabled if the loss is not scaled.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self._pending: WeakKeyDictionary[Optimizer, _Pending] = WeakKeyDictionary()
        # Unscaled and clipped, and not yet stepped: what was found, and the gradients.
        self._clipped: WeakKeyDictionary[Optimizer, tuple[_ops.GradStats, list[Tensor | None]]]
        self._clipped = WeakKeyDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without the gradients."""
        return SplitStep, (self.scaler,)

    @_ops.untraced
    def clip_grad_norm_(
        self, optimizers: Sequence[Optimizer], max_norm: float, *, fold: bool = True
    ) -> Tensor | None:
        """Clip the gradients of optimizers to one norm: in the steps that follow, or now.

        They are clipped now if `fold` is False, and those of a step that torch makes.

        Returns:
            The norm of the unscaled gradients, a 0-dim tensor, without a wait; None if torch has to
            clip them, and nothing was done.

        Raises:
            RuntimeError: the gradients have been unscaled since the last update, or written to
                since an earlier call whose clip is still pending.
            TypeError: `max_norm` is not a number.
            ValueError: `max_norm` is NaN or below 0, or a gradient to unscale is float16.
        """
        max_norm, optimizers = as_bound("max_norm", max_norm), [*optimizers]
        for optimizer in optimizers:
            self.settle(optimizer)
        states = self.scaler._states_of(optimizers)
        is_ready = states[0]["stage"] is OptState.READY
        if self.scaler.is_enabled() and not is_ready:
            self.scaler.unscale_(optimizers[0])  # raises torch's error
        grads = self.scaler._hold(optimizers)
        count = sum(len(parameters_of([each])) for each in optimizers)
        are_shared = len(parameters_of(optimizers)) < count
        if grads is None or are_shared or any(map(is_told, optimizers)):
            return None
        if is_ready:
            refuse_float16(grads)
        stats = self.scaler._measure(states, grads, max_norm)
        for each in optimizers:
            if fold and isinstance(native.prepare(each), tuple):
                self._pend(each, max_norm, stats)
            else:
                self._clip(each, max_norm, stats)
        return stats.norm

    def _pend(self, optimizer: Optimizer, max_norm: float, stats: _ops.GradStats) -> None:
        read = [_read(parameter) for parameter in parameters_of([optimizer])]
        hook = optimizer.register_step_pre_hook(lambda stepped, *_: self._clip_now(stepped))
        self._pending[optimizer] = _Pending(max_norm, stats, read, hook)

    def _clip(self, optimizer: Optimizer, max_norm: float, stats: _ops.GradStats) -> None:
        self.scaler._known = stats
        try:
            self.scaler.clip_grad_norm_(optimizer, max_norm)
        finally:
            self.scaler._known = None
        self._note_clip(optimizer, stats)

    def _note_clip(self, optimizer: Optimizer, stats: _ops.GradStats) -> None:
        stats = stats.replace(factor=torch.ones_like(stats.factor))
        self._clipped[optimizer] = stats, _grads_of(optimizer)

    def settle(self, optimizer: Optimizer) -> bool:
        """Make a pending clip of the optimizer's gradients now; say whether they are clipped.

        Raises:
            RuntimeError: the gradients have been written to since they were read.
        """
        pending = self._pending.pop(optimizer, None)
        if pending is not None:
            pending.hook.remove()
            if not pending.is_cleared():
                self._clip(optimizer, pending.max_norm, pending.stats)
        return self._found(optimizer) is not None

    def _found(self, optimizer: Optimizer) -> _ops.GradStats | None:
        """Return what was found in gradients that are clipped, unless they are others by now."""
        if optimizer not in self._clipped:
            return None
        stats, grads = self._clipped[optimizer]
        pairs = zip(grads, _grads_of(optimizer), strict=True)
        return stats if all(old is new for old, new in pairs) else None

    def _clip_now(self, optimizer: Optimizer) -> None:
        self.settle(optimizer)

    def forget(self, optimizer: Optimizer) -> None:
        """Drop the pending clip and the gradients that were read."""
        self._clipped.pop(optimizer, None)
        if (pending := self._pending.pop(optimizer, None)) is not None:
            pending.hook.remove()

    def before_backward(self) -> None:
        """Make all pending clips, since a backward pass adds to the gradients; not with scaling.

        With scaling the next call raises an error, as torch's scaler does.
        """
        for optimizer, pending in [*self._pending.items()]:
            if not self.scaler.is_enabled():
                self.settle(optimizer)
            elif not pending.is_unchanged() and pending.is_cleared():
                self.forget(optimizer)
        self._clipped.clear()

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step as `GradScaler.step`, with the pending clip, and update the scale.

        Raises:
            RuntimeError: the gradients have been written to between clip and step.
        """
        pending = self._pending.get(optimizer)
        if pending is not None and (args or kwargs or pending.is_cleared()):
            self.settle(optimizer)
            pending = None
        stats = self._found(optimizer) if pending is None else pending.stats
        if stats is None or args or kwargs:
            result = self.scaler.step(optimizer, *args, **kwargs)
        else:
            max_norm = inf
            if pending is not None:
                max_norm = pending.max_norm
                self.forget(optimizer)
            self.scaler._known = stats
            try:
                result = self.scaler.step(optimizer, max_norm=max_norm)
            except BaseException:  # a second call makes the same step
                if pending is not None and pending.is_unchanged():
                    self._pend(optimizer, max_norm, stats)
                elif pending is not None:
                    self._note_clip(optimizer, stats)
                raise
            finally:
                self.scaler._known = None
        self.forget(optimizer)
        self.scaler.update()
        return result
