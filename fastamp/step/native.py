"""The native step: which optimizers the core updates, in one call, and their state.

The optimizer's state stays torch's own, so that anyone can call `optimizer.step()` at any time.
"""

import inspect
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastamp import _ops
from fastamp._ops.formats import has_low
from fastamp._ops.types import NO_GRADIENT, Why
from fastamp.step import muon
from fastamp.step.shards import Shards, shards_of

# Of a class, its declaration in csrc/step/rules.h. AdamW is an Adam.
RULES = {
    "torch.optim.adam.Adam": "Adam",
    "torch.optim.sgd.SGD": "SGD",
    "torch.optim.Muon": muon.RULE,
    "fastamp.step.lean.Lean": "lean",
}
OWN = "lean"  # its class names the rule
# Options of all torch's optimizers, beside those that a rule declares.
_COMMON = {"lr", "foreach", "capturable", "differentiable", "fused"}
# What a step of torch would look at in the optimizer itself.
_PATCHES = {"_init_group", "grad_scale", "found_inf"}
_CONVERT = "optimizer.load_state_dict(optimizer.state_dict()) converts it"
_REMEDY = f"of another order in memory {_CONVERT}, del optimizer.state[p] lets p begin anew, "
_REMEDY += "p.data = p.data.contiguous() closes gaps, and p.grad lies in memory as p does"


class Known(NamedTuple):
    """What is remembered of an optimizer between its steps."""

    rule: str
    update: Any  # the core's; None for Muon
    unknown: str  # its options that fastamp does not know, as those of a newer torch
    is_flat: bool  # whether FSDP1 has flattened a parameter: its gradient is this rank's shard


_known: "WeakKeyDictionary[Optimizer, Known]" = WeakKeyDictionary()


def parameters_of(optimizers: Any) -> list[Tensor]:
    """Return the parameters of all groups of optimizers, each once, in order."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    by_id = {id(parameter): parameter for group in groups for parameter in group["params"]}
    return [*by_id.values()]


def prepare(optimizer: Optimizer, *, is_own: bool = False) -> tuple[Any, Known] | Why:
    """Return the backend of an optimizer and what is known of it; or say why torch has to step.

    A lean optimizer's own `step` looks at no hooks, patches or modes, which are around it.
    """
    cls: Any = type(optimizer)
    attributes = vars(optimizer)
    rule = OWN if is_own else _rule_of(cls, cls.step, getattr(cls, "_init_group", None))
    if not rule:
        return Why("torch", f"fastamp has no update for {cls.__name__}")
    if not is_own and (
        _ops.has_step_hook(attributes)
        or not _PATCHES.isdisjoint(attributes)
        or ("step" in attributes and not _is_schedulers(attributes["step"], cls.step))
        or _ops.in_dispatch_mode()
    ):
        return Why("torch", "hooks, patches or modes around the step")
    groups = optimizer.param_groups
    params = groups[0]["params"] if groups else ()
    if type(params) is not list or not params:  # parameters are in any kind of collection
        params = [param for group in groups for param in group["params"]]
    device = params[0].device if params else torch.device("cpu")
    backend = _ops.backend_for(device)
    known = _known.get(optimizer)
    if known is None or known.rule != rule:
        known = _known[optimizer] = _know(optimizer, rule)
    why = f"fastamp does not know {cls.__name__}'s {known.unknown}" if known.unknown else ""
    if backend is None and rule == OWN:
        _ops.warn_of_fallback(device)
        backend = _ops.TorchBackend(device, cast(Any, optimizer).rule)
    elif backend is None:  # torch's kernels take less time than an update in Python
        why = why or f"no compiled code for {device.type}"
    elif (
        device.type == "cuda"
        and torch.cuda.is_current_stream_capturing()
        and not all(group.get("fused") or group.get("capturable") for group in groups)
    ):  # torch raises its error: the graph would hold the learning rate and the host's count
        why = "a graph captures a group that is neither fused nor capturable"
    elif rule == muon.RULE:
        backend = muon.MuonBackend(backend)
    return Why("torch", why) if why else (backend, known)


def _know(optimizer: Any, rule: str) -> Known:
    core, options = _ops.core(), optimizer.defaults.keys()
    update, known = None, options
    if rule == muon.RULE:
        known = muon.OPTIONS
    elif core is not None and rule == OWN:
        update = core.Update(optimizer.rule, True)
    elif core is not None:
        update, known = core.Update(rule), _COMMON.union(core.rules[rule][3])
    is_flat = any(hasattr(p, "_fsdp_flattened") for p in parameters_of([optimizer]))
    return Known(rule, update, ", ".join(sorted(options - known)), is_flat)


class NativeStep(NamedTuple):
    """One optimizer's step, read and still to be made: its half after an all-reduce."""

    backend: Any
    read: Any
    shards: Shards | None

    def apply(self, factor: Tensor | None, found_inf: Tensor | None, *, zero_grad: bool) -> None:
        """Multiply the gradients by `factor` and update, unless `found_inf` is 1.0."""
        device = self.backend.device
        if found_inf is not None:
            found_inf = _ops.moved(found_inf, device)
        if factor is not None:
            factor = _ops.moved(factor, device).to(torch.float32)
        self.backend.apply(self.read, factor, found_inf, zero_grad)
        if self.shards is not None:
            self.shards.note_writes(drops=zero_grad)


def read(optimizer: Optimizer) -> NativeStep | Why:
    """Read an optimizer, of DTensors this rank's shards; or say why torch has to step."""
    prepared = prepare(optimizer)
    return prepared if isinstance(prepared, Why) else _read(optimizer, *prepared)


def read_all(optimizers: Sequence[Optimizer]) -> list[NativeStep] | Why:
    """Read those of several optimizers that have a gradient; or say why torch has to step."""
    steps = []
    for each in optimizers:
        step = read(each)
        if not isinstance(step, Why):
            steps.append(step)
        elif step.kind != "no gradient":
            return step
    return steps or NO_GRADIENT


def read_own(optimizer: Optimizer) -> NativeStep | Why:
    """Read a lean optimizer for its own `step`; or name a refused parameter, and the remedy."""
    backend, known = cast(Any, prepare(optimizer, is_own=True))
    step = _read(optimizer, backend, known)
    if not isinstance(step, Why):
        return step
    for place, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            name, state = f"param_groups[{place}]['params'][{index}]", optimizer.state.get(param)
            if param.grad is not None and state and has_low(group, param) != ("low" in state):
                made = "bfloat16 with exact=True" if "low" in state else "float32 or exact=False"
                return Why("torch", f"{name} is {param.dtype}, its state is for {made}: {_CONVERT}")
            alone = [{**group, "params": [param]}]
            refusal = backend.read(known.update, alone, optimizer.state, None)
            if isinstance(refusal, tuple) and refusal[0] == step.kind:
                return Why(step.kind, f"{name}: {refusal[1]}; {_REMEDY}")
    return step._replace(text=f"{step.text}; {_REMEDY}")


def _read(optimizer: Optimizer, backend: Any, known: Known) -> NativeStep | Why:
    for makes_state in (False, True):
        if makes_state and (reason := make_state(optimizer)):
            return Why("torch", reason)
        shards = shards_of(optimizer)
        if isinstance(shards, str):
            return Why("torch", shards)
        given = (optimizer.param_groups, optimizer.state, None) if shards is None else shards
        step = backend.read(known.update, *given)
        if not isinstance(step, tuple):
            return NativeStep(backend, step, shards)
        if step[0] != "no state":
            break
    return Why(*step)


@torch.no_grad()
def make_state(optimizer: Optimizer) -> str | None:
    """Make missing states as torch's step does; or say why torch has to.

    Counts of steps go to the parameter's device, where a skipped step need not be known on the
    host: torch's own step then waits for them.
    """
    rule = _known[optimizer].rule
    params = [(g, p) for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    on_gpu = any(param.device.type == "cuda" for _, param in params)
    if on_gpu and torch.cuda.is_current_stream_capturing():
        return "a graph captures the first step"
    if rule == OWN:
        cast(Any, optimizer).make_states(params)
        return None
    if odd := [o for o in ("amsgrad", "dampening") if any(g.get(o) for g, _ in params)]:
        return f"{odd[0]} is not 0"  # torch's first step makes other states then
    states, counts, as_grad = muon.STATES if rule == muon.RULE else _ops.core().rules[rule][:3]
    for group, param in params:
        names = [name for name, option in states if not option or group.get(option)]
        state: dict[str, Any] = optimizer.state[param]
        missing = [name for name in ["step"] * counts + names if state.get(name) is None]
        if counts and missing and state:
            return f"{missing[0]}: missing"  # torch's step raises its error
        if counts and missing:
            if torch.get_default_dtype() == torch.float64 and not group.get("fused"):
                return "torch counts steps in float64, the default dtype"
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        elif counts:
            state["step"] = state["step"].to(param.device)
        for name in [name for name in missing if name != "step"]:
            like = param.grad if as_grad else param
            state[name] = torch.zeros_like(like, memory_format=torch.preserve_format)
    return None


@lru_cache(maxsize=256)
def _rule_of(cls: Any, step: Any, init_group: Any) -> str:
    """Return the rule that a class follows; "" if it follows none.

    A subclass overrides nothing that torch's step calls. torch wraps `step` on each class: what is
    compared is the function inside.
    """
    names = {f"{base.__module__}.{base.__qualname__}": base for base in cls.__mro__}
    name = next((name for name in names if name in RULES), None)
    if name is None:
        return ""
    base: Any = names[name]
    module = muon.MODULE if RULES[name] == muon.RULE else base.__module__
    inside = [_inside(each, module) for each in (step, base.step)]
    if hasattr(base, "_init_group"):
        inside += [_inside(each, module) for each in (init_group, base._init_group)]
    is_own = cls.__getattribute__ is not object.__getattribute__
    is_own |= hasattr(cls, "state") or hasattr(cls, "param_groups") or None in inside
    return "" if is_own or inside[::2] != inside[1::2] else RULES[name]


def _inside(step: Any, module: str) -> Any:
    """Return the function that only torch's decorators wrap; None if there are others.

    Once torch.compile is used, it wraps methods of each optimizer's class.
    """
    while inspect.isfunction(step):  # a mock would answer every question
        wrapped = getattr(step, "__wrapped__", None)
        its_module = step.__globals__.get("__name__", "")
        if wrapped is None:
            return step if its_module == module else None
        step = wrapped if its_module.startswith("torch.") else None
    return None


def _is_schedulers(step: Any, of_class: Any) -> bool:
    """Say whether a `step` on the instance is the class's, or torch's schedulers' around it."""
    return getattr(step, "__func__", None) is of_class or (
        inspect.isfunction(step)
        and step.__globals__.get("__name__") == "torch.optim.lr_scheduler"
        and getattr(step, "__wrapped__", None) is of_class
    )
