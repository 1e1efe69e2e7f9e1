"""More rows of `bench step`: other gradients, the norm, the clip, less memory, and Muon.

`python benchmarks/step_rows.py --rows gpt2/norm gpt2/muon`: the other options are those of
`python -m fastamp.bench step`. Muon came with torch 2.9; its plain arm moves the bytes alone.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm

import fastamp
from fastamp.bench import __main__ as bench
from fastamp.bench import step
from fastamp.bench.step import FUSED, GPT2, MAX_NORM, OPEN, RATE, Row, Side

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from fastamp.bench.race import Case
    from fastamp.bench.record import Task

PRODUCTS_RTOL = 0.05  # of the norm of Muon's step: fifteen products in bfloat16
MUON_RATE = 0.02


class Norm(Side):
    """The norm alone."""

    def passes(self) -> tuple[int, int]:
        """Return what the norm reads."""
        return 1, 0

    def torch(self) -> object:
        """Return torch's."""
        return get_total_norm(self.grads)

    def fastamp(self) -> object:
        """Return fastamp's."""
        return fastamp.get_total_norm(self.grads)

    def check(self, step: Callable[[], object], norm: float, rtol: float) -> None:
        """Compare with plain float64 arithmetic."""
        self.before()
        torch.testing.assert_close(float(step()), norm, rtol=rtol, atol=0)


class Clip(Side):
    """Unscale and clip, in place."""

    def passes(self) -> tuple[int, int]:
        """Return what a clip moves."""
        return 1, 1

    def torch(self) -> object:
        """Clip with torch's."""
        self.torch_scaler.unscale_(self.optimizer)
        clip_grad_norm_(self.parameters, MAX_NORM)
        return self.torch_scaler.update()

    def fastamp(self) -> object:
        """Clip with fastamp's."""
        self.scaler.clip_grad_norm_(self.optimizer, MAX_NORM)
        return self.scaler.update()

    def check(self, step: Callable[[], object], norm: float, rtol: float) -> None:
        """Compare with plain float64 arithmetic."""
        self.before()
        step()
        for grad, drawn in zip(self.grads, self.drawn, strict=True):
            clipped = (drawn.double() * (MAX_NORM / norm)).float()
            torch.testing.assert_close(grad, clipped, rtol=rtol, atol=0)


class Lean(Side):
    """fastamp.AdamW on bfloat16 weights, whose passes are in units of bfloat16."""

    codes_rtol = 0.04  # 8-bit codes of large first moments are 1/16 apart: the nearest is taken

    def passes(self) -> tuple[int, int]:
        """Return what moves: gradient, weight, its lower half, and moments of 2 bytes or 1."""
        return 2, 3 if self.optimizer.defaults["moments"] == "8bit" else 4

    def read(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the first moments and the weights, in float32."""
        optimizer: Any = self.optimizer
        known: Any = fastamp.to_torch(optimizer.state_dict())["state"]
        zeros = torch.zeros_like
        moments = [known.get(i, {}).get("exp_avg", zeros(p)) for i, p in enumerate(self.drawn)]
        return moments, optimizer.master_weights()


class Muon(Side):
    """Muon for the matrices behind the first `tables` parameters, AdamW for all else."""

    row: LabRow

    def __init__(self, row: LabRow, drawn: list[Tensor]) -> None:
        super().__init__(row, drawn)
        places = range(row.tables, len(drawn))
        self.matrices = [place for place in places if drawn[place].dim() == 2]
        own = [self.parameters[place] for place in self.matrices]
        held = {id(parameter) for parameter in own}
        others = [parameter for parameter in self.parameters if id(parameter) not in held]
        muon: Any = torch.optim.Muon
        self.optimizers = [muon(own, lr=MUON_RATE), row.optimizer(others, lr=RATE)]

    def torch(self) -> object:
        """Take both steps with torch's."""
        clip_grad_norm_(self.parameters, MAX_NORM)
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return None

    def fastamp(self) -> object:
        """Take both in one call."""
        return fastamp.optimizer_step(self.optimizers, MAX_NORM, zero_grad=True)

    def check(self, step: Callable[[], object], norm: float, rtol: float) -> None:
        """Compare the matrices and their moments with products in float64."""
        self.before()
        starts = [parameter.detach().double() for parameter in self.parameters]
        step()
        for place in self.matrices:
            clipped = self.drawn[place].double() * (MAX_NORM / norm)
            state = self.optimizers[0].state[self.parameters[place]]
            moment = state.get("momentum_buffer", torch.zeros_like(clipped))
            torch.testing.assert_close(moment.double(), 0.05 * clipped, rtol=rtol, atol=0)
            stepped = muon_step(starts[place], clipped)
            error = (self.parameters[place] - stepped).norm()
            size = (stepped - starts[place]).norm()
            assert error < PRODUCTS_RTOL * size, "products are not close"  # noqa: S101
        self.before()


def muon_step(start: Tensor, grad: Tensor) -> Tensor:
    """Return the weight after Muon's first step; its Newton-Schulz steps in full precision."""
    wide = grad.mT if grad.size(0) > grad.size(1) else grad
    found = wide / wide.norm()
    for _ in range(5):
        gram = found @ found.mT
        found = 3.4445 * found + (-4.775 * gram + 2.0315 * gram @ gram) @ found
    rate = MUON_RATE * math.sqrt(max(1, grad.size(0) / grad.size(1)))
    return start * (1 - MUON_RATE * 0.1) - rate * (found if wide is grad else found.mT)


@dataclass(frozen=True, kw_only=True)
class LabRow(Row):
    """A row with a side of its own."""

    side: Callable[[Any, list[Tensor]], Side] = Side
    moments: str = ""  # how fastamp.AdamW holds them, on bfloat16 weights
    tables: int = 0  # how many of the first parameters are embeddings, or heads

    def make_case(self, device: str, seed: int) -> Case:
        """Return the race of torch's side and fastamp's."""
        grads, norm = step.draw_grads(self.sizes, device, seed, self.dtype)
        theirs = self.side(self, grads)
        if not self.moments:
            return step.race_sides(theirs, self.side(self, grads), [norm])
        grads, own_norm = step.draw_grads(self.sizes, device, seed, torch.bfloat16)
        lean = replace(self, optimizer=partial(fastamp.AdamW, moments=self.moments))
        return step.race_sides(theirs, Lean(lean, grads), [norm, own_norm])


def transformer(width: int, tables: Sequence[int], qkv: int = 1) -> list[tuple[int, ...]]:
    """Return 12 layers, whose MLPs have four times the width, with `qkv` matrices for all three."""
    block: list[tuple[int, ...]] = [(width,)] * 6 + [(3 * width // qkv, width)] * qkv
    block += [(3 * width,), (width, width), (4 * width, width), (4 * width,), (width, 4 * width)]
    return [*((rows, width) for rows in tables), *block * 12, (width,), (width,)]


_VIT = [*transformer(192, [768, 197, 1000]), (192,), (1, 1, 192), (1000,)]
SHAPES: dict[str, tuple[str, Sequence[tuple[int, ...]]]] = {
    "gpt2": ("GPT-2, 124 M in 148 tensors", GPT2),
    "width128": ("12 layers of width 128, 72 matrices", transformer(128, [256, 128], 3)),
    "width384": ("12 layers of width 384, 72 matrices", transformer(384, [256, 128], 3)),
    "vit-tiny": ("ViT-tiny, 5.7 M with 48 matrices", _VIT),
    "192x130208": ("192 tensors of 130,208", [(130208,)] * 192),
    "192x130208-bf16": ("192 tensors of 130,208, bfloat16", [(130208,)] * 192),
    "465gx60000": ("465 groups of 60,000", [(60000,)] * 465),
    "465gx1000": ("465 groups of 1,000", [(1000,)] * 465),
    "2000x1000": ("2,000 tensors of 1,000", [(1000,)] * 2000),
    "2000x64x64": ("2,000 tensors of 64 x 64", [(64, 64)] * 2000),
    "network": ("6 tensors, 4-64-64-2", [(64, 4), (64,), (64, 64), (64,), (2, 64), (2,)]),
    "lora": ("32 LoRA matrices, 10,000 in all", [(5, 50), (75, 5)] * 16),
}
TABLES = {"gpt2": 2, "width128": 2, "width384": 2, "vit-tiny": 3}
_WORK = partial(LabRow, text="", sizes=())
_MUON = partial(_WORK, scaler=False, zero_grad=True, side=Muon)
_LEAN = partial(_WORK, optimizer=FUSED, scaler=False, zero_grad=True)
WORK = {
    "norm": _WORK(optimizer=FUSED, side=Norm),
    "clip": _WORK(optimizer=FUSED, side=Clip),
    "adamw": _WORK(optimizer=FUSED),
    "adamw-open": _WORK(optimizer=OPEN),
    "adamw-zero-grad": _WORK(optimizer=FUSED, zero_grad=True),
    "adamw-no-scaler": _WORK(optimizer=FUSED, scaler=False),
    "adamw-open-no-scaler": _WORK(optimizer=OPEN, scaler=False),
    "adamw-bf16": _LEAN(moments="bfloat16"),
    "adamw-8bit": _LEAN(moments="8bit"),
    "muon": _MUON(optimizer=FUSED),
    "muon-open": _MUON(optimizer=OPEN),
}


def _in_groups(
    make: Callable[..., torch.optim.Optimizer], parameters: Sequence[Tensor], **options: Any
) -> torch.optim.Optimizer:
    """Make each parameter a group of its own."""
    return make([{"params": [each]} for each in parameters], **options)


def make_row(shape: str, work: str) -> LabRow:
    """Return a row."""
    text, sizes = SHAPES[shape]
    row = WORK[work]
    return replace(
        row,
        optimizer=partial(_in_groups, row.optimizer) if "gx" in shape else row.optimizer,
        text=f"{text}; {work}",
        sizes=sizes,
        dtype=torch.bfloat16 if shape.endswith("-bf16") else torch.float32,
        tables=TABLES.get(shape, 0),
    )


ROWS = {
    f"{shape}/{work}": make_row(shape, work)
    for shape in SHAPES
    for work in WORK
    if shape in TABLES or "muon" not in work
}


def add_options(add: Callable[..., object]) -> None:
    """Add the option of this script."""
    text = f"a shape of {', '.join(SHAPES)} and a work of {', '.join(WORK)}, as in gpt2/norm"
    add("--rows", nargs="+", choices=ROWS, required=True, metavar="ROW", help=text)


def prepare(args: argparse.Namespace) -> Task:
    """Return the job and the function that runs it."""
    return step.prepare(args, ROWS)


if __name__ == "__main__":
    bench.COMMANDS["step"] = sys.modules[__name__]
    sys.exit(bench.main(["step", *sys.argv[1:]]))
