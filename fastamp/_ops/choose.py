"""Which backend serves which tensor, and what runs over the groups of tensors that result.

The choice follows the tensor's device: compiled CUDA code for CUDA, compiled CPU code for the CPU,
the pure-Python fallback for every other device and for every tensor that compiled code does not
take (float64, complex, sparse, with gaps in its memory). `FASTAMP_BACKEND` narrows the choice to
one backend and the fallback.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

from fastamp._ops.types import COMPILED_NORMS, Clip, GradStats, Group, HostOps, Ops, is_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from fastamp._ops.types import Shards

    P = ParamSpec("P")
    T = TypeVar("T")

_MODULES = {
    "cuda": "fastamp._ops.compiled_cuda",
    "cpu": "fastamp._ops.compiled",
    "fallback": "fastamp._ops.fallback",
}  # best first


def take(
    tensors: list[Tensor],
    process_group: ProcessGroup | None = None,
    *,
    owners: Sequence[Tensor] = (),
    align: bool = False,
) -> list[Tensor] | Shards | None:
    """Return tensors in the form that `pack` takes; None where they have to go torch's own way.

    Args:
        tensors: of any types.
        process_group: over which plain tensors are spread, if they are.
        owners: parameters whose gradients the tensors are, where those will be written.
        align: bring the gradients to the placements of their owners.
    """
    if process_group is None and is_plain(tensors):
        return tensors
    if process_group is None and "torch.distributed.tensor" not in sys.modules:
        return None  # without it there are no DTensors
    from fastamp._ops import sharded  # noqa: PLC0415 - it costs half a second, and imports this module

    return sharded.take(sharded.settle(owners) if align else tensors, process_group, owners)


def on_parts(step: Callable[P, T]) -> Callable[P, T]:
    """Return a function in which torch's fused optimizers work on what this rank holds."""
    from fastamp._ops import sharded  # noqa: PLC0415 - it is loaded by now

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with sharded.FusedOnParts():
            return step(*args, **kwargs)

    return call


@cache
def _load(name: str) -> Ops | None:
    """Import a backend; None where it was not built or has no device."""
    if name != "fallback" and importlib.util.find_spec("fastamp._native") is None:
        return None
    module = importlib.import_module(_MODULES[name])
    ops: Ops = module.ops
    return ops if module.is_available() else None


def _check_available(name: str, source: str) -> str:
    """Return the name of an available backend, or raise an error that lists what there is."""
    available = [known for known in _MODULES if _load(known) is not None]
    if name not in available:
        why = "is not available here" if name in _MODULES else "is not a backend"
        msg = f"{source}={name!r} {why}; available: {', '.join(available)}"
        raise RuntimeError(msg)
    return name


_only: str | None = None
if os.environ.get("FASTAMP_BACKEND"):
    _only = _check_available(os.environ["FASTAMP_BACKEND"], "FASTAMP_BACKEND")


@contextmanager
def use_only(name: str) -> Iterator[None]:
    """Narrow the choice to one backend and the fallback, as FASTAMP_BACKEND does, for a while."""
    global _only  # noqa: PLW0603 - one setting for the process, like the environment variable
    before, _only = _only, _check_available(name, "backend")
    try:
        yield
    finally:
        _only = before


def backends() -> list[str]:
    """Return the backends that fastamp uses here, best first.

    Returns:
        A list out of "cuda", "cpu" and "fallback". "fallback" is pure Python and always there. With
        the environment variable FASTAMP_BACKEND set, only that backend and the fallback.
    """
    chosen = [name for name in _MODULES if _only in (None, name) or name == "fallback"]
    return [name for name in chosen if _load(name) is not None]


def ops_for(device: torch.device) -> Ops:
    """Return the backend that serves a device."""
    name = device.type
    if name in _MODULES and _only in (None, name):
        ops = _load(name)
        if ops is not None:
            return ops
    return fallback_ops()


def fallback_ops() -> Ops:
    """Return the backend that takes every tensor."""
    ops = _load("fallback")
    assert ops is not None  # noqa: S101 - it is part of the package
    return ops


def host_ops() -> HostOps:
    """Return the backend that collates samples on the host."""
    ops = _load("cpu") if _only in (None, "cpu") else None
    return fallback_host_ops() if ops is None else cast("HostOps", ops)


def fallback_host_ops() -> HostOps:
    """Return the backend that takes samples of every kind."""
    return cast("HostOps", fallback_ops())


def pack(tensors: Sequence[Tensor] | Shards, norm_type: float = 2.0) -> list[Group]:
    """Look at the tensors once and hand each to a backend: one group for one device.

    Args:
        tensors: at least one tensor, or what `take` returned; any devices, dtypes and layouts.
        norm_type: order of the norm that will be asked for.
    """
    if isinstance(tensors, dict):
        items = [(layout, pack(parts, norm_type)) for layout, parts in tensors.items()]
        return [group._replace(layout=layout) for layout, groups in items for group in groups]
    device = tensors[0].device
    ops = ops_for(device) if norm_type in COMPILED_NORMS else fallback_ops()
    packed = ops.pack(tensors)
    groups = [Group(ops, packed, device)]
    if packed.rest:
        by_device: dict[torch.device, list[Tensor]] = {}
        for i in packed.rest:
            by_device.setdefault(tensors[i].device, []).append(tensors[i])
        own = by_device.pop(device, None)
        if own is not None:
            groups.append(Group(fallback_ops(), fallback_ops().pack(own), device))
        for others in by_device.values():
            groups += pack(others, norm_type)
    return groups


def grad_stats(groups: Sequence[Group], norm_type: float, clip: Clip) -> GradStats:
    """Read every element of every group once.

    Args:
        groups: what `pack` returned.
        norm_type: order of the norm.
        clip: how to unscale and clip; its tensors lie on the first group's device.

    Returns:
        The statistics over all groups, on the first group's device.
    """
    first = groups[0]
    layouts = [group.layout for group in groups if group.layout is not None]
    if layouts:
        from fastamp._ops import sharded  # noqa: PLC0415 - it is loaded by now

        return sharded.grad_stats(groups, layouts, norm_type, clip)
    if len(groups) == 1:
        return first.ops.grad_stats(first.packed, norm_type, clip)
    from fastamp._ops import fallback  # noqa: PLC0415 - it imports this module's types

    parts = [group.ops.grad_stats(group.packed, norm_type, Clip()) for group in groups]
    return fallback.combine(parts, norm_type, clip)


def rescale_(groups: Sequence[Group], factor: Tensor) -> None:
    """Multiply every element of every group by a 0-dim tensor, rounding once to its dtype.

    Raises:
        RuntimeError: where a tensor cannot be written in place. The fallback's groups, the only
            ones that can refuse, come before the compiled ones.
    """
    for group in sorted(groups, key=lambda group: group.ops.name != "fallback"):
        group.ops.rescale_(group.packed, factor.to(group.device, non_blocking=True))
