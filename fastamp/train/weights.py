"""Copies of tensors: whole ones of shards, a state for a thread, a model's weights."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from fastamp._files import write
from fastamp.metrics.sinks import require
from fastamp.step.lean import Lean
from fastamp.step.shards import is_spread
from fastamp.train.ranks import Ranks


def to_whole(state: Any, *, keeps: bool) -> Any:
    """Return a state with whole tensors in place of shards, one by one; all ranks call this.

    The tensors are on the host where a rank `keeps` them, else None.
    """

    def whole(tensor: Any) -> Any:
        if not is_spread(tensor):
            return tensor
        gathered = tensor.full_tensor()
        return gathered.cpu() if keeps else None

    versions = getattr(state, "_metadata", None)  # of a model's modules
    state = tree_map_only(Tensor, whole, state)
    if versions is not None:
        state._metadata = versions
    return state


def to_shards(state: Any, own: Any) -> Any:
    """Return a state in which this rank's parts stand for tensors that are shards in `own`."""
    if is_spread(own):
        from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 - slow to import

        return distribute_tensor(state, own.device_mesh, own.placements)
    if not (isinstance(state, dict) and isinstance(own, dict)):
        return state
    parts = copy.copy(state)  # with the versions of a model's modules
    parts.update((name, to_shards(value, own.get(name))) for name, value in state.items())
    return parts


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load an optimizer's state: as shards beside shards, and in the dtypes that were saved.

    torch casts them to the parameter's: of bfloat16 parameters Adafactor keeps float32 states. An
    optimizer that loads in a way of its own, as a lean one, chooses the dtypes itself.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    places = [place for group in state["param_groups"] for place in group["params"]]
    states = dict(state["state"])
    for place, parameter in zip(places, parameters, strict=False):  # torch compares the lengths
        if place in states:
            beside = partial(_beside, parameter, all_rows=isinstance(optimizer, Lean))
            states[place] = tree_map_only(Tensor, beside, states[place])
    optimizer.load_state_dict({**state, "state": states})
    if type(optimizer).load_state_dict is Optimizer.load_state_dict:
        for place, parameter in zip(places, parameters, strict=True):
            if place in states:
                loaded = optimizer.state[parameter]
                optimizer.state[parameter] = _in_saved_dtype(loaded, states[place])


def _beside(parameter: Any, tensor: Tensor, *, all_rows: bool) -> Tensor:
    """Return a copy of a tensor that is kept for a parameter, sharded as the parameter is.

    `all_rows` shards tensors of another shape too: a lean optimizer has the parameter's rows.
    """
    tensor = tensor.clone()  # not memory of the file
    has_rows = tensor.shape == parameter.shape or (all_rows and tensor.dim() > 0)
    return to_shards(tensor, parameter) if has_rows else tensor


def _in_saved_dtype(loaded: Any, saved: Any) -> Any:
    """Return what an optimizer has loaded for a parameter, with the dtypes that were saved."""
    if isinstance(loaded, dict):
        return {key: _in_saved_dtype(value, saved[key]) for key, value in loaded.items()}
    if isinstance(loaded, (list, tuple)):
        return type(loaded)(map(_in_saved_dtype, loaded, saved))
    if isinstance(loaded, Tensor) and isinstance(saved, Tensor) and loaded.dtype != saved.dtype:
        return saved.to(loaded.device, copy=True)
    return loaded


def save_weights(model: nn.Module, path: Path, ranks: Ranks) -> None:
    """Write a model's tensors: shards as whole tensors, and tied ones once.

    Raises:
        ImportError: safetensors is not installed; it comes with the extra `safetensors`.
        OSError: it cannot be written.
    """
    safetensors = require("safetensors.torch", "safetensors")
    names: dict[Any, str] = {}
    tensors, left_out, own = {}, {}, model.state_dict()
    for name, tensor in to_whole(own, keeps=ranks.rank == 0).items():
        if not isinstance(tensor, Tensor):
            continue
        first = names.setdefault(_key(_local(own[name])), name)
        if first == name:  # a copy: safetensors refuses tensors that share memory
            tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        else:
            left_out[name] = first
    ranks.first(lambda: write(path, safetensors.save(tensors, left_out)))


def check_whole(model: nn.Module, state: dict[str, Any]) -> None:
    """Raise a ValueError if a model's state leaves out what training changes.

    Frozen parameters may be missing. A tensor that is there under another name is not missing.
    """
    missing = find_missing(model, state)
    held = (
        {_local(t).data_ptr() for t in state.values() if isinstance(t, Tensor)}
        if missing
        else set()
    )
    gone = [
        name
        for name, tensor in missing.items()
        if _local(tensor).data_ptr() not in held
        and (tensor.requires_grad or not _is_parameter(tensor))
    ]
    if gone:
        more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
        remedy = "model.state_dict() must have all but frozen parameters (requires_grad=False)"
        msg = f"leaves out {gone[0]!r}{more}: {remedy} and buffers that are not persistent"
        raise ValueError(msg)


def load_model(model: nn.Module, state: dict[str, Any]) -> None:
    """Load a model's state; what its own state leaves out stays as it is.

    Raises:
        RuntimeError: the state has other tensors than the model's own.
    """
    missing = find_missing(model, model.state_dict())
    if not missing:
        model.load_state_dict(state)
        return
    found: Any = model.load_state_dict(state, strict=False)
    wrong = {*getattr(found, "missing_keys", ())} - missing.keys()
    wrong |= {*getattr(found, "unexpected_keys", ())}
    if wrong:
        msg = f"the model has other tensors: {sorted(wrong)}"
        raise RuntimeError(msg)


def find_missing(model: nn.Module, state: dict[str, Any]) -> dict[str, Tensor]:
    """Return a model's parameters and persistent buffers whose names a state does not have."""
    missing: dict[str, Any] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            path = f"{prefix}.{name}".lstrip(".")
            is_saved = tensor is not None and name not in module._non_persistent_buffers_set
            if is_saved and path not in state:
                missing[path] = tensor
    return missing


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _memory(tensor: Any) -> int:
    return _local(tensor).data_ptr()


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if is_spread(tensor) else tensor
    return local


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy on the host, in which tensors that are the same memory still are."""
    copies: dict[Any, Tensor] = {}
    memo: dict[int, Any] = {}
    for leaf in tree_leaves(state):
        if isinstance(leaf, Tensor):
            key = _key(leaf)
            if key not in copies:
                copies[key] = leaf.detach().to("cpu", copy=True)
            memo[id(leaf)] = copies[key]
    return copy.deepcopy(state, memo)


def _key(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for tensors that are the same memory."""
    layout = (tensor.dtype, tensor.device, tensor.shape)
    if tensor.layout is not torch.strided or not tensor.numel():
        return (id(tensor), *layout)
    return (tensor.data_ptr(), tensor.stride(), *layout)
