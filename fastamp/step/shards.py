"""An optimizer over DTensors as one over the plain tensors that this rank holds."""

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastamp._ops import is_spread, local_of

__all__ = ["Shards", "is_spread", "shards_of"]


class Shards(NamedTuple):
    """Groups, states and gradients with DTensors replaced by this rank's shards, for one step.

    Kernels work element by element, so the result is that of the whole tensors, which "wholes" of
    the groups are.
    """

    groups: list[dict[str, Any]]
    states: dict[Tensor, Any]
    grads: list[Tensor]

    def note_writes(self, *, drops: bool) -> None:
        """Increment the versions of the whole tensors; `drops` sets their gradients to None."""
        wholes = [whole for group in self.groups for whole in group["wholes"]]
        torch.autograd.graph.increment_version(wholes)
        if not drops:
            torch.autograd.graph.increment_version([p.grad for p in wholes if p.grad is not None])
        for whole in wholes if drops else ():
            whole.grad = None


@torch.no_grad()
def shards_of(optimizer: Optimizer) -> Shards | str | None:
    """Return this rank's shards; None without DTensors; or say why torch has to step."""
    if "torch.distributed.tensor" not in sys.modules:
        return None
    if not any(is_spread(p) for group in optimizer.param_groups for p in group["params"]):
        return None
    shards = Shards([], {}, [])
    for group in optimizer.param_groups:
        wholes = [param for param in group["params"] if param.grad is not None]
        for param in wholes:
            state = optimizer.state.get(param) or {}
            beside = [param, param.grad, *(value for value in state.values() if is_spread(value))]
            # Their meshes, which may be copies, and placements.
            first, *others = [is_spread(t) and (t.device_mesh, t.placements) for t in beside]
            if any(other != first for other in others):
                return "a gradient or state is sharded otherwise than its parameter"
            if state:
                shards.states[local_of(param)] = {n: local_of(v) for n, v in state.items()}
        params = [local_of(param) for param in wholes]
        shards.groups.append({**group, "params": params, "wholes": wholes})
        shards.grads.extend(local_of(param.grad) for param in wholes)
    return shards
