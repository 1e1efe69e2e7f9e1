"""The gradients that are not finite, by their parameters' names."""

from typing import NamedTuple

import torch
import torch.distributed as dist

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
    named = [(n, _ops.local_of(p.grad)) for n, p in module.named_parameters() if p.grad is not None]
    values = [grad.coalesce().values() if grad.is_sparse else grad for _, grad in named]
    finite = [each.isfinite().all() for each in values]
    read = torch.stack([each.to(finite[0].device) for each in finite]).tolist() if finite else []
    entries = []
    for (name, grad), its_values, is_finite in zip(named, values, read, strict=True):
        if not is_finite:
            bad = grad.to_dense().isfinite().logical_not().reshape(-1)
            n_nan = int(its_values.isnan().sum())
            first = int(bad.to(torch.uint8).argmax())
            entries.append(NonFinite(name, n_nan, int(bad.sum()) - n_nan, first))
            if dist.is_available() and dist.is_initialized():
                entries[-1].rank = dist.get_rank()
    return entries
