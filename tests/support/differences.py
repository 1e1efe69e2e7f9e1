"""How far parameters are from torch's after 20 steps, for docs/how/numerics.md and its test.

`python -m support.differences`, in the folder `tests`, prints the page's table.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

import fastamp

STEPS = 20
NUMEL = 20_000
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3}),
    "Adam, decay 0.01": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.01}),
    "SGD, momentum 0.9": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
}
TORCHS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}


class Difference(NamedTuple):
    """Between parameters after fastamp's steps and after torch's."""

    share: float
    """Of the elements that differ."""
    most: float
    """The largest difference; inf where torch's parameters are not finite."""


def train(name: str, dtype: torch.dtype, **implementation: bool | None) -> torch.Tensor:
    """Return random parameters after 20 steps, by fastamp unless an `implementation` is given."""
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(NUMEL, generator=generator).to(dtype))
    cls, options = OPTIMIZERS[name]
    optimizer = cls([parameter], **options, **(implementation or {"fused": True}))
    for _ in range(STEPS):
        parameter.grad = torch.randn(NUMEL, generator=generator).to(dtype)
        if implementation:
            optimizer.step()
        else:
            report = fastamp.optimizer_step(optimizer, max_norm=1e9)
            assert report.way.startswith("native"), report.way
    return parameter.detach().double()


def differences(name: str, dtype: str) -> dict[str, Difference]:
    """Return the difference between fastamp and each of torch's implementations."""
    ours = train(name, DTYPES[dtype])
    by_kind = {}
    for kind, implementation in TORCHS.items():
        theirs = train(name, DTYPES[dtype], **implementation)
        by = (ours - theirs).abs()
        most = by.max().item() if theirs.isfinite().all() else math.inf
        by_kind[kind] = Difference((by != 0).double().mean().item(), most)
    return by_kind


def bound(difference: Difference) -> str:
    """Return the bounds of a difference, rounded up to one digit, as the table has them."""
    if not math.isfinite(difference.most):
        return "torch's is inf"
    if difference.share > 0.9:  # its kernel updates 8 of 1,000
        return "torch's is wrong"
    if difference.share == 0:
        return "none"
    digits = [10.0 ** math.floor(math.log10(value)) for value in difference]
    share, most = (math.ceil(v / d) * d for v, d in zip(difference, digits, strict=True))
    return f"{100 * share:.2g} %, {most:.0e}"


if __name__ == "__main__":
    print("| optimizer | dtype |", " | ".join(TORCHS), "|")  # noqa: T201
    print("|", " | ".join(["---"] * 5), "|")  # noqa: T201
    for name in OPTIMIZERS:
        for dtype in DTYPES:
            cells = [bound(each) for each in differences(name, dtype).values()]
            print("|", " | ".join([name, dtype, *cells]), "|")  # noqa: T201
