"""torch.nn.utils' gradient clipping with an exact norm: one read, at most one write."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import utils

from fastamp import _ops
from fastamp.step.arguments import as_bound

# Kept under names of our own: users replace torch's functions by ours.
torch_clip_grad_norm_ = utils.clip_grad_norm_
_torch_get_total_norm = utils.get_total_norm


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    foreach: bool | None = None,  # noqa: FBT001
) -> Tensor:
    """Clip the norm of all gradients together, in place, as `torch.nn.utils.clip_grad_norm_`.

    The gradients are read once, and written once only if their norm is too large. Squares are
    summed in float64: unlike torch's, the norm cannot overflow and is exact to the last float32
    bit. DTensors may be mixed with plain tensors that are the same on all their ranks. In
    torch.compile it is torch's.

    Args:
        parameters: a tensor or an iterable of tensors, those with a `.grad` of any shapes, dtypes,
            layouts and devices.
        max_norm: largest norm of the gradients afterwards.
        norm_type: order of the norm; other orders than 2 are torch's own functions'.
        error_if_nonfinite: raise where the norm is inf or NaN; costs a wait for the device.
        foreach: has no effect.

    Returns:
        The norm before clipping, a 0-dim tensor on the first gradient's device, of DTensors a
        replicated one; float64 where a gradient has 64 bits, float32 elsewhere.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set; nothing is changed.
        TypeError, ValueError: `max_norm` is not a number, NaN, or below 0.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> fastamp.clip_grad_norm_([weight], max_norm=1.0)
        tensor(5.)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    given = parameters
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    max_norm, norm_type = as_bound("max_norm", max_norm), float(norm_type)
    is_torchs = norm_type != 2 or torch.compiler.is_compiling()
    read = None if is_torchs else _ops.hold(grads, owners=parameters)
    if read is not None:
        stats = read.measure(_ops.Clip(max_norm=max_norm, only_finite=False))
        if not error_if_nonfinite or stats.norm.isfinite():  # else torch raises its error
            read.rescale_(stats.factor)
            return _ops.replicated(stats.norm, grads)
    given = parameters or given  # torch warns of a generator that is empty, as a second time
    return torch_clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite, foreach)


@torch.no_grad()
def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    foreach: bool | None = None,  # noqa: FBT001
) -> Tensor:
    """Return the norm of all tensors together, as `torch.nn.utils.get_total_norm`, but exact.

    Tensors may have any shapes, dtypes, layouts and devices; the rest is as in `clip_grad_norm_`.

    Example:
        >>> fastamp.get_total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
        tensor(5.)
    """
    tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    is_torchs = float(norm_type) != 2 or torch.compiler.is_compiling()
    read = None if is_torchs else _ops.hold(tensors)
    if read is not None:
        norm = read.measure(_ops.Clip()).norm
        if not error_if_nonfinite or norm.isfinite():
            return _ops.replicated(norm, tensors)
    return _torch_get_total_norm(tensors, norm_type, error_if_nonfinite, foreach)
