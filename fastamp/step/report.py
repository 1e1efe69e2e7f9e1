"""What a step found: its report, and the gradients that are not finite."""

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fastamp import _ops
from fastamp.step.arguments import check_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class StepReport:
    """What one step found and did: 0-dim tensors on the gradients' device, read without a wait.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> report = fastamp.optimizer_step(torch.optim.SGD([weight]), max_norm=1.0)
        >>> report.norm, report.clip_coef, report.skipped
        (tensor(5.), tensor(0.2000), False)
    """

    def __init__(self, stats: _ops.GradStats | Tensor | None, way: str) -> None:
        self._stats = stats  # most programs never ask a step that read nothing
        self.way = way
        """How the step was made: "native", by fastamp, in one call of the core or, with Muon
        and over ranks, in several; "fallback", a lean optimizer's in torch's operators; or
        "torch's: " and the reason, by the optimizer's own `step`."""

    @property
    def stats(self) -> _ops.GradStats:
        """All statistics, the factor that multiplied the gradients included."""
        if isinstance(self._stats, Tensor):
            return _ops.GradStats(self._stats)
        return self._stats or unread()

    @property
    def values(self) -> Tensor:
        """Norm, found_inf, clip_coef, factor and scale in one tensor; from the core as they are."""
        if isinstance(self._stats, Tensor):
            return self._stats
        named = (getattr(self.stats, n) for n in ("norm", "found_inf", "clip_coef", "factor"))
        device = self.norm.device
        return torch.stack([each.to(device) for each in (*named, self.scale)])

    def set_scale(self, scale: Tensor) -> None:
        """Set the loss scale, of gradients that were unscaled before they were read."""
        self._stats = self.stats.replace(scale=scale)

    @property
    def norm(self) -> Tensor:
        """Of the unscaled gradients before clipping, NaN where the step did not read them."""
        return self.stats.norm

    @property
    def clip_coef(self) -> Tensor:
        """What clipping multiplied the gradients by, 1 without clipping."""
        return self.stats.clip_coef

    @property
    def found_inf(self) -> Tensor:
        """1.0 if the step was skipped, since a gradient holds inf or NaN, else 0.0."""
        return self.stats.found_inf

    @property
    def scale(self) -> Tensor:
        """The loss scale of this step; 1 without scaling."""
        return self.stats.scale

    @property
    def skipped(self) -> bool:
        """Whether the optimizer left the parameters as they were; waits for the device."""
        return bool(self.found_inf.item())

    def __repr__(self) -> str:
        names = ("norm", "clip_coef", "found_inf", "scale", "way")
        return f"StepReport({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


class _Counts(NamedTuple):
    name: str
    n_nan: int
    n_inf: int
    first_index: int


class NonFinite(_Counts):
    """One gradient with values that are not finite: name, n_nan, n_inf, first_index.

    `first_index` is an index of the flattened gradient; for one index per dimension, use
    torch.unravel_index.

    Example:
        >>> found = fastamp.step.NonFinite("weight", n_nan=0, n_inf=1, first_index=5)
        >>> torch.unravel_index(torch.tensor(found.first_index), (2, 4))
        (tensor(1), tensor(1))
    """

    rank: int | None = None
    """The rank that holds these values; None without torch.distributed."""

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, rank={self.rank})"


def unread(found_inf: Tensor | None = None) -> _ops.GradStats:
    """Return the statistics of a step that did not read the gradients."""
    found_inf = torch.zeros((), dtype=torch.float32) if found_inf is None else found_inf
    nan, one = torch.full_like(found_inf, torch.nan), torch.ones_like(found_inf)
    return _ops.GradStats([nan, found_inf, one, one, one])


def nonfinite_parameters(
    module: torch.nn.Module, process_group: "ProcessGroup | None" = None
) -> list[NonFinite]:
    """Name the parameters of a module whose gradients hold inf or NaN.

    Call it after a step that was skipped and before the gradients are cleared; it reads all of them
    and waits for the device. With DTensors or a `process_group` all ranks have to call it, and get
    the same list.

    Args:
        module: its named parameters are checked; those without a gradient are left out.
        process_group: its ranks hold other parameters, as in GradScaler; not needed for DTensors.

    Returns:
        One entry for each such parameter and each rank that holds such values: the name, the number
        of NaN, the number of inf, and the index of the first of either in the flattened gradient,
        of a DTensor in this rank's shard. `rank` is the rank that holds the values.

    Raises:
        TypeError: `module` is not a module, or `process_group` not a process group.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> model(torch.tensor([[1.0, torch.inf]])).backward()
        >>> fastamp.nonfinite_parameters(model)
        [NonFinite(name='weight', n_nan=0, n_inf=1, first_index=1, rank=None)]
    """
    if not hasattr(module, "named_parameters"):
        msg = f"module: expected a torch.nn.Module, got {type(module).__name__}"
        raise TypeError(msg)
    check_group(process_group)
    named = [(n, p.grad) for n, p in module.named_parameters() if p.grad is not None]
    finite = [_values_of(_ops.local_of(grad)).isfinite().all() for _, grad in named]
    read = torch.stack([each.to(finite[0].device) for each in finite]).tolist() if finite else []
    found = [
        _count_nonfinite(name, grad)
        for (name, grad), is_finite in zip(named, read, strict=True)
        if not is_finite
    ]
    if dist.is_available() and dist.is_initialized():
        for entry in found:
            entry.rank = dist.get_rank()
        return _ops.gather(found, [grad for _, grad in named], process_group)
    return found


def _values_of(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad


def _count_nonfinite(name: str, whole: Tensor) -> NonFinite:
    grad = _ops.local_of(whole)
    values = _values_of(grad)
    bad = values.isfinite().logical_not()
    first = int(bad.reshape(-1).to(torch.uint8).argmax().item())
    if grad.is_sparse:
        # Entries are sorted by index; the dense dimensions lie inside an entry.
        entry, inside = divmod(first, max(values[0].numel(), 1))
        place = 0
        for size, i in zip(grad.shape, grad.coalesce().indices()[:, entry].tolist(), strict=False):
            place = place * size + i
        first = place * values[0].numel() + inside
    n_nan = int(values.isnan().sum().item())
    return NonFinite(name, n_nan, int(bad.sum().item()) - n_nan, first)
