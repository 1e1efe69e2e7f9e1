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
