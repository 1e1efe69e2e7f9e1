"""The op table as custom operators, for graphs of torch.compile, which cannot trace it."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, library
from torch._compile import _disable_dynamo

from fastamp._ops.fallback import TensorPack
from fastamp._ops.groups import pack
from fastamp._ops.types import Clip, GradStats

C = TypeVar("C", bound=Callable[..., Any])


def untraced(function: C) -> C:
    """Have torch.compile break its graph once where a function is called, and not trace it.

    It does what torch.compiler.disable does, without importing dynamo and without a wrapper, which
    would add a frame to every call. torch 2.6 traces the function all the same.
    """
    with suppress(AttributeError):  # torch 2.6 has no such hook; other releases may differ
        hooks: Any = torch._C._dynamo.eval_frame
        skip = hooks._FrameAction.SKIP
        hooks.set_code_exec_strategy(function.__code__, hooks._FrameExecStrategy(skip, skip))
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def outside_graphs(function: C) -> C:
    """Return the function `untraced`, in torch 2.6 in a wrapper, which imports dynamo."""
    if hasattr(untraced(function), "_torchdynamo_disable"):
        return function
    return _disable_dynamo(function)  # type: ignore[return-value]


class GraphPack(TensorPack):
    """Tensors that are packed when the graph runs; until then nobody knows which backends."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.device, self.rest, self._tensors = tensors[0].device, [], list(tensors)

    def grad_stats(self, norm_type: float, clip: Clip) -> GradStats:
        """Read every element once."""
        scale, max_norm, only_finite, skipped = clip
        stats = GradStats(_grad_stats(self._tensors, norm_type, scale, max_norm, only_finite))
        if skipped is not None:
            skipped.add_(stats.found_inf)
        return stats

    def rescale_(self, factor: Tensor) -> None:
        """Multiply every element by a 0-dim tensor."""
        _rescale_(self._tensors, factor)


# The schemas are written out because torch 2.6 cannot infer them from these annotations.
@library.custom_op(
    "fastamp::grad_stats",
    mutates_args=(),
    schema="(Tensor[] tensors, float norm_type, Tensor? scale, float? max_norm, bool only_finite)"
    " -> Tensor[]",
)
def _grad_stats(
    tensors: list[Tensor],
    norm_type: float,
    scale: Tensor | None,
    max_norm: float | None,
    only_finite: bool,  # noqa: FBT001 - an operator's schema
) -> list[Tensor]:
    stats = pack(tensors, norm_type).grad_stats(norm_type, Clip(scale, max_norm, only_finite))
    # An operator's results must not share memory.
    return [value.clone() for value in stats.values]


@_grad_stats.register_fake
def _(tensors: list[Tensor], *_: object) -> list[Tensor]:
    device = tensors[0].device
    double = torch.float32 if device.type == "mps" else torch.float64
    norm = double if any(t.dtype in (torch.float64, torch.complex128) for t in tensors) else None
    dtypes = (norm, None, norm, norm, None, None)
    return [torch.empty((), dtype=dtype or torch.float32, device=device) for dtype in dtypes]


@library.custom_op(
    "fastamp::rescale_",
    mutates_args={"tensors"},
    schema="(Tensor(a!)[] tensors, Tensor factor) -> ()",
)
def _rescale_(tensors: list[Tensor], factor: Tensor) -> None:
    pack(tensors, 2.0).rescale_(factor)
