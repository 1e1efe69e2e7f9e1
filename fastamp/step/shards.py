"""An optimizer over DTensors as one over the plain tensors that this rank holds."""

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastamp._ops import local_of


class Shards(NamedTuple):
    """Groups, states and gradients with DTensors replaced by this rank's shards.

    Kernels work element by element, so the result is that of the whole tensors; Muon finds these in
    "wholes" of the groups. It is made anew for each step, so that nothing can be stale, and changes
    nothing of the optimizer.
    """

    groups: list[dict[str, Any]]
    states: dict[Tensor, Any]
    grads: list[Tensor]
    parameters: list[Tensor]
    """The whole parameters, in the gradients' order."""

    def note_writes(self, *, drops: bool) -> None:
        """Increment the versions of the whole tensors; `drops` sets their gradients to None."""
        torch.autograd.graph.increment_version(self.parameters)
        if drops:
            for parameter in self.parameters:
                parameter.grad = None
        else:
            grads = [p.grad for p in self.parameters if p.grad is not None]
            torch.autograd.graph.increment_version(grads)


def is_spread(tensor: Any) -> bool:
    """Say whether a tensor is a DTensor."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


@torch.no_grad()
def shards_of(optimizer: Optimizer) -> Shards | str | None:  # noqa: C901 - one row a reason
    """Return this rank's shards; None without DTensors; or say why torch has to step."""
    if "torch.distributed.tensor" not in sys.modules:
        return None
    if not any(is_spread(p) for group in optimizer.param_groups for p in group["params"]):
        return None
    found = Shards([], {}, [], [])
    for group in optimizer.param_groups:
        held: list[Tensor] = []
        wholes: list[Tensor] = []
        for param in group["params"]:
            if param.grad is None:
                continue
            if is_spread(param) != is_spread(param.grad):
                return "a gradient's dtype, layout or device"
            local, state = local_of(param), {}
            for name, value in (optimizer.state.get(param) or {}).items():
                if is_spread(value) and not _has_placements_of(value, param):
                    return "a state has another mesh or other placements than its parameter"
                state[name] = local_of(value)
            if is_spread(param) and not _has_placements_of(param.grad, param):
                return "a gradient has another mesh or other placements than its parameter"
            held.append(local)
            wholes.append(param)
            found.grads.append(local_of(param.grad))
            found.parameters.append(param)
            if state:
                found.states[local] = state
        found.groups.append({**group, "params": held, "wholes": wholes})
    return found


def _has_placements_of(one: Any, other: Any) -> bool:
    """Say whether two DTensors have the same mesh, which may be a copy, and placements."""
    return bool(one.device_mesh == other.device_mesh and one.placements == other.placements)
