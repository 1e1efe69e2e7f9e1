"""The rows of the step's table: gradients of several shapes, and what is done with them."""

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fastamp


class Shapes(NamedTuple):
    """The gradients of a row."""

    text: str
    sizes: Sequence[tuple[int, ...]]
    grouped: bool = False  # each parameter is a group of its own
    dtype: torch.dtype = torch.float32
    tables: int = 0  # how many of the first ones are embeddings, or heads
    in_a_loop: bool = False  # weights and biases of Linears: each step follows a pass of torch


def _transformer(text: str, width: int, tables: list[int], qkv: int = 1) -> Shapes:
    """Return 12 layers, whose MLPs have four times the width, with `qkv` matrices for all three."""
    block: list[tuple[int, ...]] = [(width,)] * 6 + [(3 * width // qkv, width)] * qkv
    block += [(3 * width,), (width, width), (4 * width, width), (4 * width,), (width, 4 * width)]
    sizes = [*((rows, width) for rows in tables), *block * 12, (width,), (width,)]
    return Shapes(text, sizes, tables=len(tables))


_VIT = _transformer("ViT-tiny, 5.7 M with 48 matrices", 192, [768, 197, 1000])
_NETWORK = [(64, 4), (64,), (64, 64), (64,), (2, 64), (2,)]
_LOOP = [(512, 64), (512,), (512, 512), (512,), (2, 512), (2,)]
NAMED = {
    "gpt2": _transformer("GPT-2, 124 M in 148 tensors", 768, [50257, 1024]),
    "width128": _transformer("12 layers of width 128 with 72 matrices", 128, [256, 128], qkv=3),
    "width384": _transformer("12 layers of width 384 with 72 matrices", 384, [256, 128], qkv=3),
    "vit-tiny": _VIT._replace(sizes=[*_VIT.sizes, (192,), (1, 1, 192), (1000,)]),
    "network": Shapes("6 tensors, a 4-64-64-2 network", _NETWORK),
    "in-a-loop": Shapes(
        "in a loop: 64-512-512-2, after torch's forward and backward pass of 128 rows, cold",
        _LOOP,
        in_a_loop=True,
    ),
    "lora": Shapes("32 LoRA matrices, 10,000 in all", [(5, 50), (75, 5)] * 16),
}
ROWS = {  # the work for these shapes without --work
    "gpt2": "norm clip adamw adamw-zero-grad adamw-open adamw-open-zero-grad adamw-bf16 adamw-8bit"
    " muon",
    "width128": "muon muon-open",
    "width384": "muon",
    "vit-tiny": "muon",
    "192x130208": "adamw adamw-open",
    "192x130208-bf16": "adamw adamw-open",
    "465gx60000": "adamw adamw-open",
    "2000x1000": "norm adamw adamw-open",
    "465gx1000": "adamw adamw-open",
    "2000x64x64": "adamw-bf16 adamw-8bit",
    "network": "adamw-no-scaler adamw-open-no-scaler",
    "lora": "adamw-no-scaler adamw-open-no-scaler",
    "in-a-loop": "adamw-no-scaler adamw-open-no-scaler",
}
RATE = 1e-4
MUON_RATE = 0.02
MOST_NUMEL = 2**36
MOST_TENSORS = 2**20


def parse_shapes(text: str) -> dict[str, Shapes]:
    """Return the shapes of a list by name, for argparse."""
    shapes: dict[str, Shapes] = {}
    for item in text.split(","):
        match = re.fullmatch(r"([1-9]\d*)(g?)x([1-9]\d*(?:x[1-9]\d*)?)(-bf16)?", item)
        if match is None and item not in NAMED:
            message = f"{item!r} is neither tensors and elements, as in 2000x1000, nor 2000x64x64"
            raise ArgumentTypeError(message)
        if match is not None and int(match[1]) > MOST_TENSORS:
            message = f"{item!r} has more than {MOST_TENSORS:,} tensors"
            raise ArgumentTypeError(message)
        if match is not None and int(match[1]) * math.prod(_size_of(match[3])) > MOST_NUMEL:
            message = (
                f"{item!r} has more than {MOST_NUMEL} elements, which no machine holds 20 times"
            )
            raise ArgumentTypeError(message)
        shapes[item] = NAMED[item] if match is None else _make_shapes(*match.groups())
    return shapes


def _make_shapes(count: str, grouped: str, size: str, bf16: str | None) -> Shapes:
    of_each = " x ".join(f"{length:,}" for length in _size_of(size))
    text = f"{int(count):,} {'groups' if grouped else 'tensors'} of {of_each}"
    shapes = Shapes(text, [_size_of(size)] * int(count), grouped == "g")
    return shapes._replace(text=f"{text}, bfloat16", dtype=torch.bfloat16) if bf16 else shapes


def _size_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


def _adamw(start: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return start * (1 - RATE * 0.01) - RATE * grad / (grad.abs() + 1e-8), 0.1 * grad


def _sgd(start: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return start - RATE * grad, grad


def _muon(start: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return what Muon's first step leaves; its Newton-Schulz steps in full precision."""
    wide = grad.mT if grad.size(0) > grad.size(1) else grad
    found = wide / wide.norm()
    for _ in range(5):
        gram = found @ found.mT
        found = 3.4445 * found + (-4.775 * gram + 2.0315 * gram @ gram) @ found
    step = found if wide is grad else found.mT
    rate = MUON_RATE * math.sqrt(max(1, grad.size(0) / grad.size(1)))
    return start * (1 - MUON_RATE * 0.1) - rate * step, 0.05 * grad


def _make_muon(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """Return torch's Muon, which came with torch 2.9; of AdamW's rate its steps would be noise."""
    del lr
    cls: Any = torch.optim.Muon
    made: torch.optim.Optimizer = cls(groups, lr=MUON_RATE)
    return made


class Work(NamedTuple):
    """What is timed, and how often it has to pass over as many bytes as the gradients have."""

    text: str
    reads: int
    updates: int  # reads and writes
    optimizer: Callable[..., torch.optim.Optimizer]
    moment: str = ""  # a key of the optimizer's state
    first_step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """The parameter and the moment after the first step, from the parameter and its gradient."""
    zero_grad: bool = False
    scaler: bool = True
    lean: Callable[..., torch.optim.Optimizer] | None = None
    """fastamp's optimizer, if not the same as torch's: its parameters are bfloat16."""
    matrices: "Work | None" = None
    """Another optimizer for matrices of hidden layers, and what its first step leaves."""


SGD = partial(torch.optim.SGD, momentum=0.9)
WORK = {
    "norm": Work("norm", 1, 0, SGD),
    "clip": Work("unscale + clip in place", 1, 1, SGD),
    "sgd": Work("whole step, SGD with momentum", 1, 3, SGD, "momentum_buffer", _sgd),
}
for _name, _kind, _fused in (("adamw", "fused", True), ("adamw-open", "default", None)):
    # The norm reads the gradients. The update moves the parameters, two moments and the gradients,
    # which it leaves unscaled and clipped unless it consumes them: 36 or 32 bytes an element.
    _optimizer = partial(torch.optim.AdamW, fused=_fused)
    _text = f"whole step, {_kind} AdamW"
    _work = Work(_text, 1, 4, _optimizer, "exp_avg", _adamw)
    WORK[_name] = _work
    WORK[f"{_name}-no-scaler"] = _work._replace(text=f"{_text}, no scaler", scaler=False)
    _work = Work(f"{_text}, zero_grad", 2, 3, _optimizer, "exp_avg", _adamw, zero_grad=True)
    WORK[f"{_name}-zero-grad"] = _work
for _name, _kind, _updates in (("adamw-bf16", "bfloat16", 4), ("adamw-8bit", "8bit", 3)):
    # In units of bfloat16. The update moves a weight, its lower half and both moments: with the
    # gradient, which the norm reads, too, 20 or 16 bytes an element.
    _text = "whole step, fused AdamW, zero_grad, no scaler; fastamp.AdamW on bf16 weights with "
    _text += f"{_kind} moments, whose bytes GB/s counts"
    _work = Work(_text, 2, _updates, partial(torch.optim.AdamW, fused=True), "exp_avg", _adamw)
    _lean = partial(fastamp.AdamW, moments=_kind)
    WORK[_name] = _work._replace(zero_grad=True, scaler=False, lean=_lean)
for _name, _of_others in (("muon", "adamw"), ("muon-open", "adamw-open")):
    _others = WORK[f"{_of_others}-zero-grad"]
    _matrices = Work("", 0, 0, _make_muon, "momentum_buffer", _muon)
    _text = _others.text.replace("whole step,", "whole step, Muon for matrices,")
    _text += ", no scaler; plain is its products alone, in stacks"
    WORK[_name] = _others._replace(text=_text, scaler=False, matrices=_matrices)
