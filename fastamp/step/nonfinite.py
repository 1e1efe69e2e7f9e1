"""The gradients that are not finite, by their parameters' names."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastamp import _ops


class _Counts(NamedTuple):
    name: str
    n_nan: int
    n_inf: int
    first_index: int


class NonFinite(_Counts):
    """One gradient with values that are not finite: name, n_nan, n_inf, first_index.

    The index is of the flattened gradient, of a DTensor of this rank's shard.

    Example:
        >>> entry = fastamp.step.NonFinite("weight", n_nan=0, n_inf=1, first_index=5)
        >>> torch.unravel_index(torch.tensor(entry.first_index), (2, 4))
        (tensor(1), tensor(1))
    """

    rank: int | None = None
    """The rank that holds these values; None without torch.distributed."""

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, rank={self.rank})"


def nonfinite_parameters(module: torch.nn.Module) -> list[NonFinite]:
    """Name the parameters of a module whose gradients hold inf or NaN.

    Call it after a step that was skipped and before the gradients are cleared; it reads all of them
    and waits for the device. Each rank names what it holds; of a DTensor its shard.

    Raises:
        TypeError: `module` is not a module.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> model(torch.tensor([[1.0, torch.inf]])).backward()
        >>> fastamp.nonfinite_parameters(model)
        [NonFinite(name='weight', n_nan=0, n_inf=1, first_index=1, rank=None)]
    """
    if not hasattr(module, "named_parameters"):
        msg = f"module: expected a torch.nn.Module, got {type(module).__name__}"
        raise TypeError(msg)
    named = [(n, p.grad) for n, p in module.named_parameters() if p.grad is not None]
    finite = [_values_of(_ops.local_of(grad)).isfinite().all() for _, grad in named]
    read = torch.stack([each.to(finite[0].device) for each in finite]).tolist() if finite else []
    entries = [
        _count_nonfinite(name, _ops.local_of(grad))
        for (name, grad), is_finite in zip(named, read, strict=True)
        if not is_finite
    ]
    for entry in entries if dist.is_available() and dist.is_initialized() else ():
        entry.rank = dist.get_rank()
    return entries


def _values_of(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad


def _count_nonfinite(name: str, grad: Tensor) -> NonFinite:
    bad = grad.to_dense().isfinite().logical_not()
    n_nan = int(_values_of(grad).isnan().sum().item())
    first = int(bad.reshape(-1).to(torch.uint8).argmax().item())
    return NonFinite(name, n_nan, int(bad.sum().item()) - n_nan, first)
