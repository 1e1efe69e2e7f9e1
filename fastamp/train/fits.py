"""Checks that a checkpoint fits a run: each raises a ValueError that names what differs."""

from collections.abc import Iterable
from reprlib import repr as short
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


def check_equal(saved: dict[str, Any], own: dict[str, Any], may_differ: Iterable[str] = ()) -> None:
    """Check that plain values by name are equal."""
    for name in {**own, **saved}:
        theirs, ours = saved.get(name), own.get(name)
        if name not in may_differ and (type(theirs) is not type(ours) or theirs != ours):
            msg = f"it has {name}={short(theirs)}, this run {short(ours)}"
            raise ValueError(msg)


def check_model(saved: dict[str, Any], own: dict[str, Any], part: str) -> None:
    """Check the names of a module's state, and the shapes and dtypes of its tensors."""
    named = {"missing": own.keys() - saved.keys(), "unexpected": saved.keys() - own.keys()}
    problems = [f"{kind} keys: {', '.join(sorted(keys))}" for kind, keys in named.items() if keys]
    if problems:
        msg = f"its {part} is another one: {'; '.join(problems)}"
        raise ValueError(msg)
    tensors = [k for k, v in own.items() if isinstance(v, Tensor)]
    tensors = [k for k in tensors if not k.endswith("_extra_state")]  # the model's own business
    check_equal(*({k: _format(each[k]) for k in tensors} for each in (saved, own)))


def describe(parts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the class names of parts, and the names of each optimizer's parameters by place.

    FSDP2 renames the classes of modules. torch restores the states of parameters by place.
    """
    kinds, names = {}, {}
    own: dict[int, str] = {}
    for part, module in parts.items():
        kinds[part] = "Module" if isinstance(module, nn.Module) else type(module).__name__
        for name, parameter in module.named_parameters() if isinstance(module, nn.Module) else ():
            own.setdefault(id(parameter), name if part == "model" else f"{part}.{name}")
    for part, optimizer in parts.items():
        if isinstance(optimizer, Optimizer):
            placed = enumerate(p for group in optimizer.param_groups for p in group["params"])
            names[part] = {f"{part}[{place}]": own.get(id(p)) for place, p in placed}
    return {"kinds": kinds, "names": names}


def _format(value: Any) -> str:
    """Return a tensor's dtype and shape, or the value."""
    return f"{value.dtype} {[*value.shape]}" if isinstance(value, Tensor) else short(value)
