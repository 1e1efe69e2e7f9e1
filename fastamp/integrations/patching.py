"""Changes to a framework's objects: methods of ours before their own, and our scaler's step."""

from functools import cache
from typing import Any

from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fastamp.step import GradScaler


def is_unscaled(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Say whether gradients are unscaled, as by `clip_grad_norm_`, and still to be stepped with."""
    states = scaler._per_optimizer_states
    return id(optimizer) in states and states[id(optimizer)]["stage"] is OptState.UNSCALED


def step_and_update(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Step; update the scale once all optimizers that were clipped have stepped."""
    result = scaler.step(optimizer, *args, **kwargs)
    states = scaler._per_optimizer_states.values()
    if all(state["stage"] is not OptState.UNSCALED for state in states):
        scaler.update()
    return result


class Methods:
    """A base of methods to put in front of an object's own, which they call by `super()`."""

    @classmethod
    def put_before(cls: Any, instance: Any) -> None:
        """Make an object's class a subclass of this one and of its own, once."""
        if not isinstance(instance, cls):
            before: Any = type(instance)
            instance.__class__ = _subclass(cls, before)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle and copy the object; unpickling makes the class again."""
        reduced: Any = super().__reduce_ex__(protocol)
        return (_make, type(self).__bases__, *reduced[2:])


@cache
def _subclass(ours: Any, cls: Any) -> Any:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (ours, cls), names)


def _make(ours: Any, cls: Any) -> Any:
    made = _subclass(ours, cls)
    return made.__new__(made)
