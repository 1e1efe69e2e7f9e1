"""The states of a run's parts: compared with a checkpoint's, saved whole, loaded as shards."""

import copy
from collections.abc import Iterable
from functools import partial
from reprlib import repr as short
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map, tree_map_only

from fastamp.step.lean import Lean
from fastamp.step.shards import is_spread


def to_saved(state: Any, *, keeps: bool) -> Any:
    """Return a state with whole tensors; all ranks call this, and one `keeps` them on its host."""

    def saved(leaf: Any) -> Any:
        if not is_spread(leaf):
            return leaf
        whole = leaf.full_tensor()
        return whole.cpu() if keeps else None

    whole = tree_map(saved, state)
    if hasattr(state, "_metadata"):  # the versions of a model's modules
        whole._metadata = state._metadata
    return whole


def load_part(part: Any, state: Any) -> None:
    """Load the state of a part, of which a rank takes its shards."""
    if isinstance(part, nn.Module):
        part.load_state_dict(_to_shards(state, part.state_dict()))
    elif isinstance(part, Optimizer):
        _load_optimizer(part, state)
    else:
        part.load_state_dict(tree_map_only(Tensor, Tensor.clone, state))  # not memory of the file


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state: as shards beside shards, and in the dtypes that were saved."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    places = [place for group in state["param_groups"] for place in group["params"]]
    pairs = zip(places, parameters, strict=False)  # torch compares the lengths
    of_places = {place: p for place, p in pairs if place in state["state"]}
    is_lean = isinstance(optimizer, Lean)  # whose tensors of other shapes have the rows

    def beside(parameter: Any, tensor: Tensor) -> Any:
        tensor = tensor.clone()  # not memory of the file
        has_rows = tensor.shape == parameter.shape or (is_lean and tensor.dim() > 0)
        return _to_shards(tensor, parameter) if has_rows else tensor

    states = dict(state["state"])
    for place, parameter in of_places.items():
        states[place] = tree_map_only(Tensor, partial(beside, parameter), states[place])
    optimizer.load_state_dict({**state, "state": states})

    def in_saved_dtype(loaded: Any, saved: Any) -> Any:
        is_cast = isinstance(saved, Tensor) and loaded.dtype != saved.dtype
        return saved.to(loaded.device, copy=True) if is_cast else loaded

    if type(optimizer).load_state_dict is Optimizer.load_state_dict:  # it casts to the parameter's
        for place, parameter in of_places.items():
            loaded = optimizer.state[parameter]
            optimizer.state[parameter] = tree_map(in_saved_dtype, loaded, states[place])


def _to_shards(state: Any, own: Any) -> Any:
    """Return a state in which this rank's parts stand for tensors that are shards in `own`."""
    if is_spread(own):
        from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 - slow to import

        return distribute_tensor(state, own.device_mesh, own.placements)
    if not (isinstance(state, dict) and isinstance(own, dict)):
        return state
    parts = copy.copy(state)  # with the versions of a model's modules
    parts.update((name, _to_shards(value, own.get(name))) for name, value in state.items())
    return parts


def check_equal(saved: dict[str, Any], own: dict[str, Any], may_differ: Iterable[str] = ()) -> None:
    """Check that plain values by name are equal."""
    for name in {**own, **saved}:
        theirs, ours = saved.get(name), own.get(name)
        if name not in may_differ and (type(theirs) is not type(ours) or theirs != ours):
            msg = f"it has {name}={short(theirs)}, this run {short(ours)}"
            if name not in own:
                msg = f"it also has {name}: give it too, or restore(only=('model',))"
            elif name not in saved:
                msg = f"it has no {name}: restore(only=...) names the parts to restore"
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

    def format_of(value: Any) -> str:
        return f"{value.dtype} {[*value.shape]}" if isinstance(value, Tensor) else short(value)

    check_equal(*({k: format_of(each[k]) for k in tensors} for each in (saved, own)))


def describe(parts: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the class names of parts, and for torch's places of parameters their names."""
    modules = {part: each for part, each in parts.items() if isinstance(each, nn.Module)}
    # FSDP2 renames the classes of modules.
    kinds = {part: "Module" if part in modules else type(parts[part]).__name__ for part in parts}
    named = ((part, *each) for part in modules for each in modules[part].named_parameters())
    own = {id(parameter): f"{part}.{name}" for part, name, parameter in named}
    names = {}
    for part, optimizer in parts.items():
        if isinstance(optimizer, Optimizer):
            placed = enumerate(p for group in optimizer.param_groups for p in group["params"])
            names[part] = {f"{part}[{place}]": own.get(id(p)) for place, p in placed}
    return {"kinds": kinds, "names": names}
