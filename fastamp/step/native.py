"""The native step: which optimizers the core updates, in one call, and their state.

The optimizer's state stays torch's own, so that anyone can call `optimizer.step()` at any time.
"""

import inspect
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastamp import _ops
from fastamp._ops import NO_GRADIENT, NO_STATE, Why
from fastamp.step import muon
from fastamp.step.shards import Shards, shards_of

# The class of an optimizer, and its declaration in csrc/step/rules.h. AdamW is an Adam, and Muon's
# arithmetic is in `muon`.
RULES = {
    "torch.optim.adam.Adam": "Adam",
    "torch.optim.sgd.SGD": "SGD",
    "torch.optim.Muon": muon.RULE,
    "fastamp.step.lean.Lean": "lean",
}
OWN = "lean"  # its class names the rule
# Options of all torch's optimizers, beside those that a rule declares.
_COMMON = {"lr", "foreach", "capturable", "differentiable", "fused"}


class Known(NamedTuple):
    """What is kept of an optimizer between its steps."""

    rule: str
    update: Any
    """The core's; None where another backend makes the step, in halves."""
    unknown: str
    """Its options that fastamp does not know, as those of a newer torch."""
    is_flat: bool
    """Whether FSDP1 has flattened a parameter."""


_known: "WeakKeyDictionary[Optimizer, Known]" = WeakKeyDictionary()


def parameters_of(optimizers: Any) -> list[Tensor]:
    """Return the parameters of all groups of optimizers, each once, in order."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    found = {id(parameter): parameter for group in groups for parameter in group["params"]}
    return [*found.values()]


def prepare(optimizer: Optimizer) -> tuple[Any, Known] | Why:  # noqa: C901, PLR0911 - one row a reason
    """Return the backend of an optimizer and what is kept of it; or say why torch has to step."""
    cls: Any = type(optimizer)
    own = vars(optimizer)
    rule, why = _rule_of(cls, cls.step, getattr(cls, "_init_group", None))
    if not rule:
        return Why("torch", why)
    if _ops.has_step_hook(own):
        return Why("torch", "there is a step hook")
    if "_init_group" in own:
        return Why("torch", "optimizer._init_group is patched")
    if "grad_scale" in own or "found_inf" in own:
        return Why("torch", "the optimizer has a grad_scale of its own")
    if "step" in own and not _is_schedulers(own["step"], cls.step):
        return Why("torch", "optimizer.step is patched")
    if _ops.in_dispatch_mode():
        return Why("torch", "a TorchDispatchMode is on")
    groups = optimizer.param_groups
    params = groups[0]["params"] if groups else ()
    device = params[0].device if type(params) is list and params else _device_of(groups)
    backend = _ops.backend_for(device)
    known = _known.get(optimizer)
    if known is None or known.rule != rule:
        known = _known[optimizer] = _know(optimizer, rule)
    if backend is None and rule != OWN:
        # An update in Python would take longer than torch's kernels.
        return Why("torch", f"no compiled code for {device.type}")
    if known.unknown:
        return Why("torch", f"fastamp does not know {cls.__name__}'s {known.unknown}")
    if (
        device.type == "cuda"
        and torch.cuda.is_current_stream_capturing()
        and not all(group.get("fused") or group.get("capturable") for group in groups)
    ):
        why = "a graph captures the step of a group that is neither fused nor capturable"
        return Why("torch", why)
    if backend is None:
        _ops.warn_of_fallback(device)
        return _ops.TorchBackend(device, cast(Any, optimizer).rule), known._replace(update=None)
    return (muon.MuonBackend(backend) if rule == muon.RULE else backend), known


def _know(optimizer: Optimizer, rule: str) -> Known:
    core = _ops.core()
    update: Any = None
    options: Any = muon.OPTIONS
    if core is not None and rule == OWN:
        update, options = core.Update(cast(Any, optimizer).rule, True), optimizer.defaults.keys()
    elif core is not None and rule != muon.RULE:
        update, options = core.Update(rule), _COMMON.union(core.rules[rule][3])
    unknown = () if core is None else sorted(optimizer.defaults.keys() - options)
    is_flat = any(map(is_fsdp1s, parameters_of([optimizer])))
    return Known(rule, update, ", ".join(unknown), is_flat)


def is_fsdp1s(parameter: Tensor) -> bool:
    """Say whether FSDP1 has flattened a parameter: its gradient is this rank's shard."""
    return hasattr(parameter, "_fsdp_flattened")


def has_stepped(optimizer: Optimizer) -> bool | None:
    """Say whether fastamp steps this optimizer; None if it has hooks, so that torch makes steps."""
    known = _known.get(optimizer)
    if known is not None:
        return not known.unknown and _ops.core() is not None
    return None if _ops.has_step_hook(vars(optimizer)) else False


def note_step(optimizer: Optimizer) -> None:
    """Note that a step was made, as the wrapper of torch's schedulers around `step` does."""
    if "step" in vars(optimizer):
        _ops.note_step_called(optimizer)


def in_range(optimizer: Optimizer, function: Any) -> Any:
    """Return a function in the range that torch's step opens while a profiler runs."""
    name = f"Optimizer.step#{type(optimizer).__name__}.step"
    return torch.autograd.profiler.record_function(name)(function)


class NativeStep(NamedTuple):
    """One optimizer's step, read and still to be made: its half after an all-reduce."""

    optimizer: Optimizer
    backend: Any
    update: Any
    read: Any
    shards: Shards | None

    def apply(self, factor: Tensor | None, found_inf: Tensor | None, *, zero_grad: bool) -> None:
        """Multiply the gradients by `factor` and update, unless `found_inf` is 1.0."""
        device = self.backend.device
        if found_inf is not None:
            found_inf = _ops.moved(found_inf, device)
        if factor is not None:
            factor = _ops.moved(factor, device).to(torch.float32)
        apply = self.backend.apply
        if _ops.is_profiling():
            apply = in_range(self.optimizer, apply)
        apply(self.update, self.read, factor, found_inf, zero_grad)
        if self.shards is not None:
            self.shards.note_writes(drops=zero_grad)
        note_step(self.optimizer)


def read(optimizer: Optimizer) -> NativeStep | Why:
    """Read an optimizer, of DTensors this rank's shards; or say why torch has to step."""
    prepared = prepare(optimizer)
    if isinstance(prepared, Why):
        return prepared
    return _read(optimizer, prepared[0], prepared[1].update)


def read_all(optimizers: Sequence[Optimizer]) -> list[NativeStep] | Why:
    """Read those of several optimizers that have a gradient; or say why torch has to step."""
    steps, idle = [], []
    for each in optimizers:
        step = read(each)
        if not isinstance(step, Why):
            steps.append(step)
        elif step.kind == "no gradient":
            idle.append(each)
        else:
            return step
    if not steps:
        return NO_GRADIENT
    for each in idle:
        note_step(each)  # which does nothing
    return steps


def read_own(optimizer: Optimizer) -> NativeStep | Why:
    """Read a lean optimizer for its own `step`, whatever hooks and patches are around that."""
    device = _device_of(optimizer.param_groups)
    in_operators = _ops.TorchBackend(device, cast(Any, optimizer).rule)
    if (backend := _ops.backend_for(device)) is None:
        _ops.warn_of_fallback(device)
        return _read(optimizer, in_operators, None)
    known = _known.get(optimizer) or _known.setdefault(optimizer, _know(optimizer, OWN))
    found = _read(optimizer, backend, known.update)
    if isinstance(found, Why):
        why, found = found, _read(optimizer, in_operators, None)
        if not isinstance(found, Why):  # else its reason names the parameter
            msg = f"{type(optimizer).__name__} steps in torch's operators, many times slower: "
            warnings.warn(msg + why.text, stacklevel=3)
    return found


def _read(optimizer: Optimizer, backend: Any, update: Any) -> NativeStep | Why:
    for is_again in (False, True):
        shards = shards_of(optimizer)
        if isinstance(shards, str):
            return Why("torch", shards)
        if shards is None:
            found = backend.read(update, optimizer.param_groups, optimizer.state, None)
        else:
            found = backend.read(update, shards.groups, shards.states, shards.grads)
        why = Why(*found) if type(found) is tuple else found
        if not isinstance(why, Why):
            return NativeStep(optimizer, backend, update, found, shards)
        if why.kind != "no state" or is_again:
            return why
        if reason := make_state(optimizer):
            return Why("torch", reason)
    return NO_STATE


@torch.no_grad()
def make_state(optimizer: Optimizer) -> str | None:  # noqa: C901, PLR0911, PLR0912 - as torch's
    """Make missing states as torch's step does; or say why torch has to.

    On a device the count of steps goes there also where torch keeps it on the host, so that a
    skipped step need not be known there: torch's own step then waits for it.
    """
    known = _known.get(optimizer)
    rule = OWN if known is None else known.rule
    if rule == OWN:
        why: str | None = cast(Any, optimizer).make_states()
        return why
    states, counts, first = muon.STATES if rule == muon.RULE else _ops.core().rules[rule][:3]
    if counts and _shares_counts(optimizer):
        return "tensors share their memory"  # torch adds 1 for each parameter
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        names = [name for name, option in states if not option or group.get(option)]
        if not counts and len({*map(id, group["params"])}) < len([*group["params"]]):
            return "a parameter is twice in a group"  # torch makes two buffers of one
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return "a graph captures the first step"
            state: dict[str, Any] = optimizer.state[param]
            missing = [name for name in names if state.get(name) is None]
            if missing and counts and state:
                return f"{missing[0]}: missing"  # torch's step raises its error
            if counts and "step" not in state:
                if state:
                    return "step: missing"
                if torch.get_default_dtype() == torch.float64 and not group.get("fused"):
                    return "torch counts steps in float64, the default dtype"
                state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            elif counts and not on_device and state["step"].device != param.device:
                state["step"] = state["step"].to(param.device)
            for name in missing:
                like = param.grad if first == "zeros of the gradient" else param
                state[name] = torch.zeros_like(like, memory_format=torch.preserve_format)
    return None


def _shares_counts(optimizer: Optimizer) -> bool:
    """Say whether two parameters have one tensor as their count of steps."""
    counts = [id(state["step"]) for state in optimizer.state.values() if "step" in state]
    return len({*counts}) < len(counts)


@lru_cache(maxsize=256)
def _rule_of(cls: Any, step: Any, init_group: Any) -> tuple[str, str]:
    """Return the rule that a class follows; or "", and why it follows none.

    A subclass follows its base's if it overrides nothing that torch's step calls. torch wraps
    `step` on each class: what is compared is the function inside.
    """
    name = cls.__name__
    for base in cls.__mro__:
        rule = RULES.get(f"{base.__module__}.{base.__qualname__}")
        if rule is not None:
            break
    else:
        is_torchs = getattr(torch.optim, name, None) is cls
        return (
            "",
            f"fastamp has no update for {name}" if is_torchs else f"{name} is not torch's own",
        )
    module = muon.MODULE if rule == muon.RULE else base.__module__
    theirs = getattr(base, "_init_group", None)
    if (
        _inside(init_group, module) is not _inside(theirs, module)
        or (theirs is not None and _inside(init_group, module) is None)
        or cls.__getattribute__ is not object.__getattribute__
        or hasattr(cls, "state")
        or hasattr(cls, "param_groups")
    ):
        return "", f"{name} overrides what torch's step calls"
    inside = _inside(step, module)
    if inside is None or inside is not _inside(base.step, module):
        return "", f"{name}.step is patched, or its own"
    return rule, ""


@lru_cache(maxsize=256)
def _inside(step: Any, module: str) -> Any:
    """Return the function that only torch's decorators wrap; None if there are others.

    Once torch.compile is used, it wraps methods of each optimizer's class.
    """
    while inspect.isfunction(step):  # a mock would answer every question
        wrapped = getattr(step, "__wrapped__", None)
        found = step.__globals__.get("__name__", "")
        if wrapped is None:
            return step if found == module else None
        if not found.startswith("torch."):
            return None
        step = wrapped
    return None


def _is_schedulers(step: Any, of_class: Any) -> bool:
    """Say whether a `step` on the instance is the class's, or torch's schedulers' around it."""
    if getattr(step, "__func__", None) is of_class:
        return True
    return (
        inspect.isfunction(step)
        and step.__globals__.get("__name__") == "torch.optim.lr_scheduler"
        and getattr(step, "__wrapped__", None) is of_class
    )


def _device_of(groups: Any) -> torch.device:
    """Return the first parameter's device; parameters are in any kind of collection."""
    first = next((param for group in groups for param in group["params"]), None)
    return torch.device("cpu") if first is None else first.device
