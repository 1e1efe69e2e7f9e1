"""An optimizer over DTensors as one over the plain tensors that this rank holds.

This module is imported when the first such optimizer appears.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from fastamp._ops.types import Apply

_GRADIENT = "a gradient's dtype, layout or device"


class Parts:
    """Groups and states with DTensors replaced by this rank's parts, whose `.grad` is set.

    Kernels work element by element, so the result is that of the whole tensors. It is made anew for
    each step, so that nothing can be stale.
    """

    def __init__(self) -> None:
        self.groups: list[dict[str, Any]] = []
        self.states: dict[Tensor, Any] = {}
        self._parameters: list[DTensor] = []  # with a gradient
        self._grads: list[DTensor] = []
        self._locals: list[Tensor] = []

    def add(self, param: DTensor, grad: Any, state: dict[str, Any] | None) -> str | None:
        """Add this rank's part of a parameter, of its gradient and its states; or say why not."""
        if type(grad) is not DTensor:
            return _GRADIENT
        spec = param._spec
        if grad._spec is not spec and not _is_alike(grad._spec, spec):
            if grad._spec.mesh != spec.mesh:
                return _GRADIENT
            param.grad = grad = grad.redistribute(placements=spec.placements)
        local, part = param._local_tensor, grad._local_tensor
        if type(part) is AsyncCollectiveTensor:
            part = part.wait()
        try:
            local.grad = part
        except RuntimeError:  # of another dtype or shape
            return _GRADIENT
        self._parameters.append(param)
        self._grads.append(grad)
        self._locals.append(local)
        if state:
            held = self.states[local] = {}
            for name, value in state.items():
                if type(value) is DTensor:
                    own = value._spec
                    if own is not spec and not _is_alike(own, spec):
                        return "a state has another mesh or other placements than its parameter"
                    held[name] = value._local_tensor
                else:
                    held[name] = value
        return None

    def wrap(self, apply: Apply) -> Apply:
        """Return an update that also updates the DTensors' versions and `.grad`."""

        def apply_(*args: Any, zero_grad: bool = False) -> None:
            apply(*args, zero_grad=zero_grad)
            torch.autograd.graph.increment_version(self._parameters)
            if not zero_grad:
                torch.autograd.graph.increment_version(self._grads)
            for parameter in self._parameters if zero_grad else ():
                parameter.grad = None
            self.forget()

        return apply_

    def forget(self) -> None:
        """Release the gradients."""
        for local in self._locals:
            local.grad = None
        self._parameters, self._grads, self._locals = [], [], []


def _is_alike(one: Any, other: Any) -> bool:
    """Say whether two specs have the same mesh, which may be a copy, and the same placements."""
    is_same_mesh = one.mesh is other.mesh or one.mesh == other.mesh
    return is_same_mesh and bool(one.placements == other.placements)


@torch.no_grad()
def parts_of(groups: list[dict[str, Any]], states: dict[Tensor, Any]) -> Parts | str:
    """Return this rank's parts of an optimizer; or say why torch has to make this step."""
    parts = Parts()
    for group in groups:
        held: list[Tensor] = []
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            state = states.get(param)
            if type(param) is DTensor:
                refused = parts.add(param, grad, state)
                if refused is not None:
                    parts.forget()
                    return refused
                held.append(param._local_tensor)
            else:
                held.append(param)
                if state:
                    parts.states[param] = state
        parts.groups.append({**group, "params": held})
    return parts
