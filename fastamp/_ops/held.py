"""This rank's parts of a list of tensors: all of a plain one, the local tensor of a DTensor."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

from torch import Tensor
from torch.compiler import is_compiling

from fastamp._ops.graph import GraphPack
from fastamp._ops.groups import pack
from fastamp._ops.types import OTHER_TYPE, Packed, is_plain

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from fastamp._ops.parts import Parts
    from fastamp._ops.sharded import Shards

P = ParamSpec("P")
T = TypeVar("T")


class Tensors:
    """Plain tensors, of which no other rank holds a part."""

    def __init__(self, held: list[Tensor]) -> None:
        self.held = held

    def pack(self, norm_type: float = 2.0) -> Packed:
        """Hand each tensor to its backend, for norms of this order."""
        return GraphPack(self.held) if is_compiling() else pack(self.held, norm_type)

    def on_parts(self, step: Callable[P, T]) -> Callable[P, T]:
        """Return a step in which torch's fused kernels work on this rank's parts."""
        return step

    def gather(self, found: list[T]) -> list[T]:
        """Join the lists of all ranks that hold parts, in rank order."""
        return found


Held: TypeAlias = "Tensors | Shards"


def hold(
    tensors: list[Tensor],
    process_group: "ProcessGroup | None" = None,
    *,
    owners: Sequence[Tensor] = (),
    align: bool = False,
) -> "Held | None":
    """Return this rank's parts of tensors; None where torch has to handle them.

    Args:
        tensors: of any types.
        process_group: ranks that hold different plain tensors, if any.
        owners: the parameters of these gradients, if the gradients will be written.
        align: redistribute the gradients to the placements of their parameters.
    """
    if process_group is None and is_plain(tensors):
        return Tensors(tensors)
    if process_group is None and (is_compiling() or "torch.distributed.tensor" not in sys.modules):
        return None  # dynamo cannot trace `sharded`; without the module there are no DTensors
    from fastamp._ops import sharded  # noqa: PLC0415 - takes half a second

    return sharded.shards_of(tensors, process_group, owners, align=align)


def parts_of(groups: list[dict[str, Any]], states: dict[Tensor, Any]) -> "Parts | str":
    """Return this rank's parts of an optimizer with DTensors; or say why torch has to step."""
    if "torch.distributed.tensor" not in sys.modules:
        return OTHER_TYPE
    from fastamp._ops import parts  # noqa: PLC0415 - takes half a second

    return parts.parts_of(groups, states)


def index_in_whole(tensor: Tensor, index: int) -> int:
    """Turn an index of this rank's flattened part of a DTensor into one of the flattened whole."""
    from fastamp._ops import sharded  # noqa: PLC0415 - it is loaded by now

    return sharded.index_in_whole(tensor, index)
