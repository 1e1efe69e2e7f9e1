"""Copies of tensors: a state for a thread to write, and a model's weights as safetensors."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fastamp._files import write
from fastamp.metrics.sinks import require
from fastamp.train.ranks import Ranks


def save_weights(model: nn.Module, path: Path, ranks: Ranks) -> None:
    """Write a model's tensors: shards as whole tensors, and tied ones once.

    Raises:
        ImportError: safetensors is not installed; it comes with the extra `safetensors`.
        OSError: it cannot be written.
    """
    safetensors = require("safetensors.torch", "safetensors")
    names: dict[Any, str] = {}
    tensors, left_out = {}, {}
    named = model.state_dict().items()
    values: dict[str, Any] = {name: value for name, value in named if isinstance(value, Tensor)}
    for name, tensor in values.items():
        is_shard = hasattr(tensor, "full_tensor")
        whole = tensor.full_tensor() if is_shard else tensor.detach()  # by all ranks
        if ranks.rank != 0:
            continue
        first = names.setdefault(_key(tensor.to_local() if is_shard else tensor), name)
        if first == name:  # a copy: safetensors refuses tensors that share memory
            tensors[name] = whole.to("cpu", copy=True).contiguous()
        else:
            left_out[name] = first
    ranks.first(lambda: write(path, safetensors.save(tensors, left_out)))


def check_whole(model: nn.Module, state: dict[str, Any]) -> None:
    """Raise a ValueError if a model's state leaves out what training changes.

    Frozen parameters may be missing. A tensor that is there under another name is not missing.
    """
    missing = find_missing(model, state)
    held = {_memory(t) for t in state.values() if isinstance(t, Tensor)} if missing else set()
    gone = [
        name
        for name, tensor in missing.items()
        if _memory(tensor) not in held and (tensor.requires_grad or not _is_parameter(tensor))
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
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.data_ptr())


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
