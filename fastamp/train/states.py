"""The states of modules and optimizers: whole tensors for a checkpoint, shards for a rank."""

import copy
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map, tree_map_only

from fastamp.step.lean import Lean
from fastamp.step.shards import is_spread


def to_saved(state: Any, *, keeps: bool) -> Any:
    """Return a state of whole tensors; all ranks call this.

    Shards are gathered one by one, onto the host where a rank `keeps` them.
    """

    def saved(leaf: Any) -> Any:
        if not is_spread(leaf):
            return leaf
        whole = leaf.full_tensor()
        return whole.cpu() if keeps else None

    versions = getattr(state, "_metadata", None)  # of a model's modules
    state = tree_map(saved, state)
    if versions is not None:
        state._metadata = versions
    return state


def load_part(part: Any, state: Any) -> None:
    """Load the state of a part, of which a rank takes its shards."""
    if isinstance(part, nn.Module):
        part.load_state_dict(_to_shards(state, part.state_dict()))
    elif isinstance(part, Optimizer):
        _load_optimizer(part, state)
    else:
        part.load_state_dict(tree_map_only(Tensor, Tensor.clone, state))  # not memory of the file


def _load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state: as shards beside shards, and in the dtypes that were saved.

    torch casts them to the parameter's: of bfloat16 parameters Adafactor keeps float32 states. An
    optimizer that loads in a way of its own, as a lean one, chooses the dtypes itself.
    """
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
    if type(optimizer).load_state_dict is Optimizer.load_state_dict:
        for place, parameter in of_places.items():
            loaded = optimizer.state[parameter]
            optimizer.state[parameter] = tree_map(_in_saved_dtype, loaded, states[place])


def _in_saved_dtype(loaded: Any, saved: Any) -> Any:
    are_tensors = isinstance(loaded, Tensor) and isinstance(saved, Tensor)
    if are_tensors and loaded.dtype != saved.dtype:
        return saved.to(loaded.device, copy=True)
    return loaded


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
