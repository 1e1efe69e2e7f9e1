"""The native step: which optimizers fastamp updates itself, their state, and whom to notify.

The optimizer's state stays torch's own, so that anyone can call `optimizer.step()` at any time.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fastamp import _ops
from fastamp._ops import Apply, Packed, Rule, Update
from fastamp.step import counts
from fastamp.step.report import StepReport

if TYPE_CHECKING:
    from fastamp._ops.parts import Parts

_Notify: TypeAlias = Callable[[StepReport], None] | None
_CPU = torch.device("cpu")
_ZERO_GRAD = Optimizer.zero_grad
_RULES = {Adam: Rule.ADAM, AdamW: Rule.ADAMW, SGD: Rule.SGD, Adagrad: Rule.ADAGRAD}
_updates: "WeakKeyDictionary[Optimizer, tuple[_ops.Ops, torch.device, Update]]" = (
    WeakKeyDictionary()
)


class NativeStep(NamedTuple):
    """One optimizer's step, with its gradients collected and its update still to be made."""

    grads: Packed
    """The gradients, or this rank's shards of them."""
    parts: "Parts | None"
    """This rank's shards, where other ranks hold others."""
    apply: Apply
    """The update, in the range that torch's step opens while a profiler runs."""
    notify: _Notify
    """Called with what the step did, after the update."""

    def forget(self) -> None:
        """Release this rank's shards, in place of `apply`."""
        if self.parts is not None:
            self.parts.forget()


def read(optimizer: Optimizer) -> NativeStep | str:
    """Collect an optimizer's gradients for a step; or say why torch has to make this step."""
    notify = _check(optimizer)
    if isinstance(notify, str):
        return notify
    rule = _RULES[type(optimizer)]
    update = _update_of(optimizer, rule)
    if isinstance(update, str):
        return update
    found, parts = _read(optimizer, update)
    if found == _ops.NO_STATE:
        reason = _make_state(optimizer, rule)
        found, parts = (reason, None) if reason else _read(optimizer, update)
    if isinstance(found, str):
        return found
    grads, apply = found
    if update.counts_on_host:
        counts.watch(optimizer, update)
    if parts is not None:
        apply = parts.wrap(apply)
    if "zero_grad" in vars(optimizer) or type(optimizer).zero_grad is not _ZERO_GRAD:
        apply = _with_own_zero_grad(apply, optimizer)
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        name = f"Optimizer.step#{type(optimizer).__name__}.step"
        apply = torch.autograd.profiler.record_function(name)(apply)
    return NativeStep(grads, parts, apply, notify)


def _with_own_zero_grad(apply: Apply, optimizer: Optimizer) -> Apply:
    """Return an update that calls the optimizer's `zero_grad`, which somebody has replaced."""

    def apply_and_call(*args: Any, zero_grad: bool = False) -> None:
        apply(*args)
        if zero_grad:
            optimizer.zero_grad()

    return apply_and_call


def _read(
    optimizer: Optimizer, update: Update
) -> "tuple[tuple[Packed, Apply] | str, Parts | None]":
    """Collect the gradients, of DTensors this rank's shards; or say why torch has to step."""
    found = update.read(optimizer.param_groups, optimizer.state)
    if found != _ops.OTHER_TYPE:
        return found, None
    parts = _ops.parts_of(optimizer.param_groups, optimizer.state)
    if isinstance(parts, str):
        return parts, None
    found = update.read(parts.groups, parts.states)
    if isinstance(found, str):
        parts.forget()
    return found, parts


def _check(optimizer: Optimizer) -> _Notify | str:
    """Return what to call after a native step; or say what only torch's step would respect."""
    if type(optimizer) not in _RULES:  # a subclass may do anything
        kind, name = type(optimizer), type(optimizer).__name__
        if getattr(torch.optim, name, None) is kind:
            return f"fastamp has no update of its own for {name}"
        return f"{name} is not one of torch's own"
    own = vars(optimizer)
    hooks = own["_optimizer_step_pre_hooks"], own["_optimizer_step_post_hooks"]
    if counts.others_in(*hooks) or _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        return "there is a step hook"
    if "grad_scale" in own or "found_inf" in own:
        return "the optimizer has a grad_scale of its own"
    step = type(optimizer).step
    if not inspect.isfunction(step) or not _is_torchs(step):  # a mock would record the reads
        return f"{type(optimizer).__name__}.step is patched"
    return _notifier(optimizer, own["step"]) if "step" in own else None


def _update_of(optimizer: Optimizer, rule: Rule) -> Update | str:
    """Return the optimizer's `Update`, kept between steps; or say why torch has to step."""
    params = optimizer.param_groups[0]["params"] if optimizer.param_groups else ()
    device = params[0].device if params else _CPU
    ops = _ops.ops_for(device)
    if _ops.clones_what_is_written():
        return "allow_mutation_on_saved_tensors is on"
    if ops is _ops.FALLBACK and (device != _CPU or not _ops.is_chosen("fallback")):
        # It would take longer than torch's kernels, and wait for a device.
        return f"no compiled code for {device.type}"
    if device != _CPU and torch.cuda.is_current_stream_capturing():
        return "a graph captures the step"
    known = _updates.get(optimizer)
    if known is None or known[0] is not ops or known[1] != device:
        if known is not None:
            known[2].settle(optimizer.state)
        known = _updates[optimizer] = (ops, device, ops.update(rule, device))
    return known[2]


@torch.no_grad()
def _make_state(optimizer: Optimizer, rule: Rule) -> str | None:
    """Make the state of parameters that have none, as torch's step does; or say why torch has to.

    For SGD, buffers of zeros are equivalent to none, except with dampening: SGD keeps no count of
    steps, so a skipped first step must leave no buffer behind.
    """
    for group in optimizer.param_groups:
        if rule is Rule.ADAGRAD or (rule is Rule.SGD and not group["momentum"]):
            continue  # Adagrad makes its state itself; SGD without momentum has none
        if rule is Rule.SGD and len({*map(id, group["params"])}) < len(group["params"]):
            return "a parameter is twice in a group"  # for which torch makes two buffers
        for param in group["params"]:
            if param.grad is None:
                continue
            state: dict[str, Any] = optimizer.state[param]
            if rule is not Rule.SGD and not state:
                wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
                dtype = torch.float64 if wide else torch.float32
                on_device = param.device if group.get("fused") else None
                state["step"] = torch.zeros((), dtype=dtype, device=on_device)
                names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(group["amsgrad"])
                for name in names:
                    state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
            elif rule is Rule.SGD and state.get("momentum_buffer") is None:
                if group["dampening"]:
                    return "the first step of SGD with dampening"
                state["momentum_buffer"] = torch.zeros_like(param.grad)
    return None


@cache
def _is_torchs(step: Any) -> bool:
    """Say whether a class's `step` is torch's own, wrapped by nothing but torch's decorators."""
    while inspect.isfunction(step):
        if not step.__globals__.get("__name__", "").startswith("torch.optim."):
            return False
        wrapped = getattr(step, "__wrapped__", None)
        if wrapped is None:
            return True
        step = wrapped
    return False


def _notifier(optimizer: Optimizer, step: Any) -> _Notify | str:
    """Return a function that does what the known patches of `optimizer.step` do in a step.

    torch's schedulers note that `step` was called. Accelerate takes a step for skipped if `step`
    was not called: it is told of a skipped one only for fused optimizers, as by torch's scaler.
    """
    accelerated = None
    if (
        inspect.isfunction(step)
        and step.__module__ == "accelerate.optimizer"
        and step.__name__ == "patched_step"
    ):
        inside = inspect.getclosurevars(step).nonlocals
        accelerated, step = inside["accelerated_optimizer"], inside["method"]
    is_bound = getattr(step, "__func__", None) is type(optimizer).step
    is_scheduled = (
        inspect.isfunction(step)
        and getattr(step, "_wrapped_by_lr_sched", False)
        and step.__globals__["__name__"] == "torch.optim.lr_scheduler"
        and getattr(step, "__wrapped__", None) is type(optimizer).step
    )
    if not (is_bound or is_scheduled):
        return "optimizer.step is patched"

    def notify(report: StepReport) -> None:
        if is_scheduled:
            optimizer._opt_called = True  # type: ignore[attr-defined]
        if accelerated is not None:
            fused = all(group.get("fused") for group in optimizer.param_groups)
            if fused or not report.skipped:
                accelerated._accelerate_step_called = True

    return notify
