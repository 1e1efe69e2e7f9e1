"""What an optimizer's fused kernel can do, and where torch's fused kernels must not be used."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from fastamp._ops import is_dense, is_laid_out_like
from fastamp.step import counts

_SHORT = {torch.float16, torch.bfloat16}
_FUSED = (SGD, Adam, AdamW, Adagrad)  # of torch


def parameters_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the parameters of all groups, in order."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [parameter for group in groups for parameter in group["params"]]


def share_parameters(optimizers: Sequence[Optimizer]) -> bool:
    """Say whether a parameter is there twice, in one optimizer or in several."""
    places = [id(parameter) for parameter in parameters_of(optimizers)]
    return len({*places}) < len(places)


@cache
def takes_scaler(cls: Any) -> bool:
    """Say whether an optimizer's `step` has the deprecated argument `grad_scaler`."""
    step = cls.step
    return inspect.isfunction(step) and "grad_scaler" in inspect.signature(step).parameters


def is_fused(optimizer: Optimizer) -> bool:
    """Say whether the optimizer's kernel can unscale, clip and skip."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    # torch's step goes by the groups, in which a loaded state_dict may have set fused=None.
    if type(optimizer).step.__module__.startswith("torch.optim."):
        for group in optimizer.param_groups:
            if not group.get("fused"):
                return False
    return True


def why_in_place(optimizer: Optimizer) -> str | None:
    """Say why the gradients have to be unscaled before the step; None where the kernel does it.

    torch's fused kernels divide by the optimizer's attribute `grad_scale`, and write nothing where
    its attribute `found_inf` is 1.
    """
    if not is_fused(optimizer):
        name, groups = type(optimizer).__name__, optimizer.param_groups
        fused = all(group.get("fused") for group in groups)  # torch 2.6's Adagrad
        return f"{name}'s kernel does not unscale" if fused else f"{name} is not fused"
    return why_unfused(optimizer)


def why_unfused(optimizer: Optimizer) -> str | None:
    """Say why torch's fused kernel would be wrong in the next step; None where it can be used.

    1. Torch's fused kernels ignore strides: they read and write past the end of tensors with gaps.
    2. On the CPU that of SGD updates only 8 elements of a 16-bit parameter
       (https://github.com/pytorch/pytorch issue 191763).
    3. That of SGD allocates its momentum buffers before it skips and leaves them uninitialized; the
       next step reads them. Buffers of zeros, as `call_folded` makes them, are equivalent to none,
       except with dampening.
    """
    for group in optimizer.param_groups if isinstance(optimizer, _FUSED) else ():
        alike = (_is_laid_out_alike(p, optimizer.state.get(p, {})) for p in group["params"])
        if group.get("fused") and not all(alike):
            return "torch's fused kernels need parameter, gradient and state in one layout, no gaps"
    if isinstance(optimizer, SGD):
        for group in optimizer.param_groups:
            if not group.get("fused"):
                continue
            if any(p.dtype in _SHORT and p.device.type == "cpu" for p in group["params"]):
                return "torch's fused SGD is wrong for 16-bit parameters on the CPU"
            new = [*map(id, _without_momentum(optimizer, group))]
            if new and group["dampening"]:
                return "torch's fused SGD must not skip its first step with dampening"
            if len({*new}) < len(new):  # for which torch makes two buffers, of which one stays
                return "torch's fused SGD must not skip its first step of a parameter twice"
    return None


def _is_laid_out_alike(parameter: Tensor, state: dict[str, Any]) -> bool:
    """Say whether a parameter has no gradient, or one and a state with its strides, without gaps.

    A state may differ where the model has changed its memory format since.
    """
    if parameter.grad is None:
        return True
    kept = [each for each in state.values() if isinstance(each, Tensor)]
    others = [parameter.grad, *(each for each in kept if each.shape == parameter.shape)]
    # Nearly all are contiguous, which takes a tenth of the time to tell.
    strided = all(other.layout is torch.strided and other.is_contiguous() for other in others)
    if strided and parameter.is_contiguous():
        return True
    return is_dense(parameter) and all(is_laid_out_like(other, parameter) for other in others)


def _without_momentum(optimizer: SGD, group: dict[str, Any]) -> Iterator[Any]:
    for parameter in group["params"] if group["momentum"] else ():
        state: dict[str, Tensor | None] = optimizer.state.get(parameter, {})
        if parameter.grad is not None and state.get("momentum_buffer") is None:
            yield parameter


def call_folded(
    optimizer: Any,
    step: Callable[..., float | None],
    grad_scale: Tensor | None,
    found_inf: Tensor,
    *args: Any,
    **kwargs: Any,
) -> float | None:
    """Call the optimizer's step, whose kernel divides by `grad_scale` and skips if `found_inf`."""
    for group in optimizer.param_groups if isinstance(optimizer, SGD) else ():
        for parameter in _without_momentum(optimizer, group):
            buffer = torch.zeros_like(parameter.grad)
            optimizer.state[parameter]["momentum_buffer"] = buffer
    given = getattr(optimizer, "grad_scale", None)  # by the user
    optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
    try:
        result = step(*args, **kwargs)
        given = None  # used up: a step of torch's scaler deletes it, too
    finally:
        del optimizer.grad_scale, optimizer.found_inf
        if given is not None:
            optimizer.grad_scale = given
    return result


def call_step(
    optimizer: Optimizer, step: Callable[..., float | None], *args: Any, **kwargs: Any
) -> float | None:
    """Call the optimizer's step, without its fused kernel where that is wrong."""
    if why_unfused(optimizer) is None:
        return step(*args, **kwargs)
    before = [group.get("fused") for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["fused"] = None
        return step(*args, **kwargs)
    finally:
        for group, fused in zip(optimizer.param_groups, before, strict=True):
            group["fused"] = fused


def has_pre_hook(optimizer: Optimizer) -> bool:
    """Say whether a hook runs before the kernel, and may read the gradients."""
    own = getattr(optimizer, "_optimizer_step_pre_hooks", {})
    return bool(_global_optimizer_pre_hooks) or counts.others_in(own)
