"""Checks that a checkpoint fits a run, before anything of it is applied.

Each raises a ValueError that names what differs, and changes nothing.
"""

from collections.abc import Iterable
from reprlib import repr as short
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer


def check_parts(saved: dict[str, str], own: dict[str, str], only: Iterable[str] | None) -> None:
    """Check the class names of parts; `only` names those that are restored, None is every part."""
    missing = sorted((own.keys() if only is None else only) - saved.keys() - {"rng"})
    if missing:
        msg = f"it has no {', '.join(missing)}: restore(only=...) names the parts to restore"
        raise ValueError(msg)
    unused = sorted(saved.keys() - own.keys())
    if unused and only is None:
        msg = f"it also has {', '.join(unused)}: give them too, or restore(only=('model',))"
        raise ValueError(msg)
    names = [name for name in (own if only is None else only) if name != "rng"]
    check_equal({n: saved[n] for n in names}, {n: own[n] for n in names})


def check_equal(saved: dict[str, Any], own: dict[str, Any], may_differ: Iterable[str] = ()) -> None:
    """Check that plain values by name are equal."""
    for name in {**own, **saved}:
        theirs, ours = saved.get(name), own.get(name)
        if name not in may_differ and (type(theirs) is not type(ours) or theirs != ours):
            msg = f"it has {name}={short(theirs)}, this run {short(ours)}"
            raise ValueError(msg)


def check_model(saved: dict[str, Any], own: dict[str, Any], part: str) -> None:
    """Check the names of a module's state, and the shapes and dtypes of its tensors.

    A lazy module's parameter takes the checkpoint's shape.
    """
    missing, unexpected = (sorted(a.keys() - b.keys()) for a, b in ((own, saved), (saved, own)))
    if missing or unexpected:
        problems = [f"missing keys: {', '.join(missing)}"] if missing else []
        problems += [f"unexpected keys: {', '.join(unexpected)}"] if unexpected else []
        msg = f"its {part} is another one: {'; '.join(problems)}"
        raise ValueError(msg)
    tensors = [k for k, v in own.items() if isinstance(v, Tensor) and not is_lazy(v)]
    tensors = [k for k in tensors if not k.endswith("_extra_state")]  # the model's own business
    check_equal(*({k: _describe(each[k]) for k in tensors} for each in (saved, own)))


def check_names(saved: list[Any], own: list[Any], part: str) -> None:
    """Check the names of an optimizer's parameters: torch restores their states by place."""
    for place, (theirs, ours) in enumerate(zip(saved, own, strict=False)):
        if theirs != ours:
            msg = f"parameter {place} of its {part} is {theirs!r}, of this run's {ours!r}"
            raise ValueError(msg)


def names_in(optimizer: Optimizer, parts: dict[str, Any]) -> list[str | None]:
    """Return the names of an optimizer's parameters; None for those of no module of the parts."""
    names: dict[int, str] = {}
    for part, module in parts.items():
        for name, parameter in module.named_parameters() if isinstance(module, nn.Module) else ():
            names.setdefault(id(parameter), name if part == "model" else f"{part}.{name}")
    return [names.get(id(p)) for group in optimizer.param_groups for p in group["params"]]


def _describe(value: Any) -> str:
    """Return a tensor's dtype and shape, or the value."""
    return f"{value.dtype} {[*value.shape]}" if isinstance(value, Tensor) else short(value)
