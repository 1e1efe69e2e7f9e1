"""Changes to a framework's objects: methods of ours before their own, and our scaler's step."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fastamp.step import GradScaler


def replace_scaler(owner: Any, name: str) -> GradScaler:
    """Replace torch's scaler by one of ours in the same state; without one, return a disabled one.

    Raises:
        TypeError: `owner`, which is called `name`, has a scaler of another kind.
    """
    stock = getattr(owner, "scaler", None)
    if stock is None or isinstance(stock, GradScaler):
        return stock or GradScaler(enabled=False)
    if type(stock) is not torch.amp.GradScaler:
        msg = f"{name}.scaler: expected a torch.amp.GradScaler, got {type(stock).__name__}"
        raise TypeError(msg)
    scaler = GradScaler(stock._device, enabled=stock.is_enabled())
    scaler.load_state_dict(stock.state_dict())
    owner.scaler = scaler
    return scaler


def is_unscaled(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Say whether gradients are unscaled, as by `clip_grad_norm_`, and still to be stepped with."""
    states = scaler._per_optimizer_states
    return id(optimizer) in states and states[id(optimizer)]["stage"] is OptState.UNSCALED


def clip_once(scaler: GradScaler, optimizers: list[Optimizer], max_norm: float) -> Tensor:
    """Unscale and clip; raise torch's error where gradients have been unscaled before."""
    for each in optimizers:
        if scaler.is_enabled() and is_unscaled(scaler, each):
            scaler.unscale_(each)
    return scaler.clip_grad_norm_(optimizers, max_norm)


def step_and_update(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Step; update the scale once all optimizers that were clipped have stepped."""
    result = scaler.step(optimizer, *args, **kwargs)
    states = scaler._per_optimizer_states.values()
    if all(state["stage"] is not OptState.UNSCALED for state in states):
        scaler.update()
    return result


def has_methods_of(instance: Any, ours: Any) -> bool:
    """Say whether `put_before` has given these methods to an object."""
    return getattr(type(instance), "ours", None) is ours


def put_before(instance: Any, ours: Any) -> None:
    """Put the methods of a class in front of an object's own, once: its class becomes a subclass.

    They call the methods that they replace by `stock(self)`.
    """
    if not has_methods_of(instance, ours):
        cls: Any = type(instance)
        instance.__class__ = _subclass(ours, cls)


def stock(instance: Any) -> Any:
    """Return an object's own methods, as `super()` does."""
    made: Any = type(instance)
    return super(made.made, instance)


@cache
def _subclass(ours: Any, cls: Any) -> Any:
    def reduce_ex(self: Any, protocol: Any) -> tuple[Any, ...]:
        """Pickle and copy the object; unpickling makes the class again."""
        reduced: Any = stock(self).__reduce_ex__(protocol)
        return (_make, (ours, cls), *reduced[2:])

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "ours": ours}
    own = {name: value for name, value in vars(ours).items() if name not in ("__dict__", *names)}
    made: Any = type(cls.__name__, (cls,), own | names | {"__reduce_ex__": reduce_ex})
    made.made = made
    return made


def _make(ours: Any, cls: Any) -> Any:
    made = _subclass(ours, cls)
    return made.__new__(made)
