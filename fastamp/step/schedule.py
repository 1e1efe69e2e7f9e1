"""Schedules that advance only after steps that were taken, without a wait for the device."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from threading import RLock
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from fastamp.step.report import StepReport

Schedulers: TypeAlias = "LRScheduler | Sequence[LRScheduler] | None"
_KEY = "_fastamp_pending"


def check_schedulers(scheduler: Schedulers) -> list[LRScheduler]:
    """Return the schedulers as a list, or raise an error that names the argument."""
    if scheduler is None:
        return []
    several = isinstance(scheduler, list | tuple)
    found: list[Any] = [*scheduler] if several else [scheduler]  # type: ignore[misc]
    for place, each in enumerate(found):
        name = f"scheduler[{place}]" if several else "scheduler"
        if isinstance(each, ReduceLROnPlateau):
            msg = f"{name}: ReduceLROnPlateau steps by a metric: call its step(metric) yourself"
            raise TypeError(msg)
        if isinstance(each, Optimizer) or not callable(getattr(each, "step", None)):
            msg = f"{name}: expected a learning rate scheduler, got a {type(each).__name__}"
            raise TypeError(msg)
        if any(each is other for other in found[:place]):
            msg = f"{name}: expected each once"
            raise ValueError(msg)
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        msg = "scheduler: a captured step cannot step a schedule: step it after the replay"
        raise RuntimeError(msg)
    return found


def settle(optimizers: Sequence[Optimizer]) -> None:
    """Step the schedulers that still wait for an earlier step of these optimizers."""
    for optimizer in optimizers:
        hooks = getattr(optimizer, "__dict__", {}).get("_optimizer_step_pre_hooks")
        for hook in [*hooks.values()] if hooks else ():
            if isinstance(hook, _Pending):
                hook.remove()


def advance(
    schedulers: Sequence[LRScheduler], optimizers: Sequence[Optimizer], report: StepReport
) -> None:
    """Step the schedulers if the optimizers' step was taken: on the CPU now, on CUDA later.

    From CUDA the flag is copied to the host while the device works, and is read when the next step
    begins or a scheduler is used.
    """
    if schedulers and report.found_inf.is_cuda:
        _Pending(schedulers, optimizers, report.found_inf)
    elif schedulers and not report.skipped:
        for scheduler in schedulers:
            scheduler.step()


class _Pending:
    """A flag that is being copied to the host, and the schedulers that wait for it.

    Until the flag is read, each scheduler has a class that reads it at any access to an attribute,
    and each optimizer has hooks that read it before it steps, or saves or loads its state.
    """

    def __init__(
        self, schedulers: Sequence[LRScheduler], optimizers: Sequence[Any], found_inf: Tensor
    ) -> None:
        self._found_inf = found_inf.to("cpu", non_blocking=True)  # into pinned memory
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record(torch.cuda.current_stream(found_inf.device))
        self._schedulers: Sequence[LRScheduler] = schedulers
        self._classes: list[Any] = [type(scheduler) for scheduler in schedulers]
        self._handles: list[Any] = []
        self._lock = RLock()
        try:
            for each in optimizers:
                self._handles.append(each.register_step_pre_hook(self))
                self._handles.append(each.register_state_dict_pre_hook(self))
                self._handles.append(each.register_load_state_dict_pre_hook(self))
            for scheduler, cls in zip(schedulers, self._classes, strict=True):
                scheduler.__dict__[_KEY] = self
                scheduler.__class__ = _waiting(cls)
        except (AttributeError, TypeError):  # an unusual class: read the flag now
            self.remove()

    def __call__(self, *_: object) -> None:
        """Read the flag. As a hook it stays registered, since torch is iterating over the hooks."""
        with self._lock:
            schedulers, self._schedulers = self._schedulers, ()
            for scheduler, cls in zip(schedulers, self._classes, strict=False):
                object.__setattr__(scheduler, "__class__", cls)
                getattr(scheduler, "__dict__", {}).pop(_KEY, None)
            if schedulers:
                self._copied.synchronize()
                if not self._found_inf.item():
                    for scheduler in schedulers:
                        scheduler.step()

    def remove(self) -> None:
        """Remove the hooks and read the flag."""
        for handle in self._handles:
            handle.remove()
        self()


@lru_cache(maxsize=64)
def _waiting(cls: Any) -> Any:
    """Return a subclass that, at any access, reads the flag and restores the class `cls`."""

    def after_reading(access: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: object, *args: Any) -> Any:
            pending = object.__getattribute__(self, "__dict__").get(_KEY)
            if pending is not None:  # else another thread has read it by now
                pending()
            return access(self, *args)

        return method

    accesses: dict[str, Callable[..., Any]]
    accesses = {"__getattribute__": getattr, "__setattr__": setattr, "__delattr__": delattr}
    methods = {name: after_reading(access) for name, access in accesses.items()}
    own = {"__slots__": (), "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), methods | own)
