"""What this rank holds of a list of tensors, and what all ranks have together."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from fastamp._ops.grads import Grads, parts_of
from fastamp._ops.types import PLAIN_TYPES

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


def hold(
    tensors: list[Tensor],
    process_group: "ProcessGroup | None" = None,
    owners: Iterable[Tensor] = (),
) -> Grads | None:
    """Return gradients as this rank holds them; None if there are none, here or on other ranks.

    Args:
        tensors: of any types.
        process_group: ranks that hold different plain tensors, if any.
        owners: the parameters of these gradients, if the gradients will be written. Those without
            a gradient say, too, which ranks have to be asked.
    """
    owners = list(owners)
    if process_group is None and not _may_be_spread([*tensors, *owners]):
        return Grads(parts_of(tensors)) if tensors else None
    found: Grads | None = _sharded().shards_of(tensors, process_group, owners)
    return found


def gather(found: list[T], tensors: list[Tensor], process_group: "ProcessGroup | None") -> list[T]:
    """Join the lists of all ranks that hold parts of tensors, in rank order."""
    if process_group is None and not _may_be_spread(tensors):
        return found
    gathered: list[T] = _sharded().gather(found, tensors, process_group)
    return gathered


def replicated(value: Tensor, like: list[Tensor]) -> Tensor:
    """Return a value that all ranks have: among DTensors as a DTensor, as torch's norms are."""
    return _sharded().replicated(value, like) if _may_be_spread(like) else value


def _may_be_spread(tensors: list[Tensor]) -> bool:
    """Say whether any may be a DTensor; without torch's module there are none."""
    if "torch.distributed.tensor" not in sys.modules:
        return False
    return not {*map(type, tensors)}.issubset(PLAIN_TYPES)


def _sharded() -> Any:
    from fastamp._ops import sharded  # noqa: PLC0415 - takes half a second

    return sharded
