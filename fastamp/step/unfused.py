"""Where torch's fused kernels are wrong, and a step without them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

_SHORT = {torch.float16, torch.bfloat16}


def is_torchs(optimizer: Optimizer) -> bool:
    """Say whether an optimizer's step is one of torch's."""
    module = getattr(type(optimizer).step, "__module__", None) or ""
    return module.startswith("torch.optim.")


@contextmanager
def right_kernels(optimizer: Optimizer) -> Iterator[None]:
    """Let a fused optimizer of torch step without its fused kernel where that would be wrong.

    1. The kernels ignore strides: they mix up elements, and write past tensors with gaps.
    2. On the CPU that of SGD updates only 8 elements of a 16-bit parameter
       (https://github.com/pytorch/pytorch issue 191763).
    """
    fused: list[dict[str, Any]] = []
    if is_torchs(optimizer):
        fused = [group for group in optimizer.param_groups if group.get("fused")]
    wrong = any(_is_wrong(optimizer, p) for group in fused for p in group["params"])
    try:
        for group in fused if wrong else ():
            group["fused"] = None
        yield
    finally:
        for group in fused:
            group["fused"] = True


def _is_wrong(optimizer: Optimizer, parameter: Tensor) -> bool:
    if parameter.grad is None or parameter.layout is not torch.strided:
        return False
    if isinstance(optimizer, SGD) and parameter.dtype in _SHORT and parameter.device.type == "cpu":
        return True
    states = optimizer.state.get(parameter, {}).values()
    tensors = [t for t in states if isinstance(t, Tensor) and t.shape == parameter.shape]
    tensors.append(parameter.grad)
    if parameter.is_contiguous() and all(t.is_contiguous() for t in tensors):
        return False
    order = sorted(range(parameter.dim()), key=parameter.stride, reverse=True)
    has_gaps = not parameter.permute(order).is_contiguous()
    return has_gaps or any(t.stride() != parameter.stride() for t in tensors)
