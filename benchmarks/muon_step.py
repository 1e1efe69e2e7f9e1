"""torch's Muon and AdamW, clipped together, against fastamp's one step of both.

`python benchmarks/muon_step.py`: clip_grad_norm_, two steps and two zero_grad against one call. The
share of the matrix products, and the calls of torch's operators from Python, are those of one step
under torch's profiler: the products are torch's own on both sides, and the rest is what is raced.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.utils import clip_grad_norm_

import fastamp
from fastamp.bench.options import DEFAULT, number
from fastamp.bench.race import Plan, run_race, show
from fastamp.timer.timer import align

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_NORM = 1.0  # less than the norm of the gradients: every step clips
PLAN = Plan(rounds=400, half_width=0.01, limit_s=30.0)
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
RTOL = 1e-2  # of a matrix's norm, a tenth of its step: torch's float32 norm is off in the fourth
# digit, so all elements of a direction are rounded to bfloat16 anew


class Model(NamedTuple):
    """The sizes of a model's parameters."""

    text: str
    matrices: list[tuple[int, ...]]
    """Of hidden layers, for Muon."""
    others: list[tuple[int, ...]]
    """Embeddings, heads and vectors, for AdamW."""


def transformer(
    text: str, width: int, tables: Sequence[int], *, is_fused: bool = True, layers: int = 12
) -> Model:
    """Return a transformer with MLPs of four times the width; `is_fused`: QKV is one matrix."""
    qkv = [(3 * width, width)] if is_fused else [(width, width)] * 3
    hidden = [*qkv, (width, width), (4 * width, width), (width, 4 * width)]
    vectors = [(width,)] * 6 + [(3 * width,), (4 * width,)]
    return Model(
        text, hidden * layers, [*((rows, width) for rows in tables), *vectors * layers, (width,)]
    )


MODELS = {
    "width128": transformer("12 layers of width 128", 128, [256, 128], is_fused=False),
    "width384": transformer("12 layers of width 384", 384, [256, 128], is_fused=False),
    "vit-tiny": transformer("ViT-tiny", 192, [768, 197, 1000]),
    "gpt2": transformer("GPT-2", 768, [50257, 1024]),
}


class Side:
    """The parameters, gradients and optimizers of one side."""

    def __init__(self, model: Model, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def draw(sizes: Sequence[tuple[int, ...]]) -> list[torch.nn.Parameter]:
            made = (torch.randn(size, device=device, generator=generator) for size in sizes)
            return [torch.nn.Parameter(0.02 * values) for values in made]

        matrices, others = draw(model.matrices), draw(model.others)
        self.parameters = [*matrices, *others]
        self.drawn = [grad.detach() for grad in draw([*model.matrices, *model.others])]
        self.grads = [torch.empty_like(grad) for grad in self.drawn]
        muon: Any = torch.optim.Muon
        self.optimizers = [muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3)]

    def restore(self) -> None:
        """Restore the gradients as backward would leave them."""
        torch._foreach_copy_(self.grads, self.drawn)
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            parameter.grad = grad

    def torch(self) -> None:
        """Clip, step and clear with torch's functions."""
        clip_grad_norm_(self.parameters, MAX_NORM)
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def fastamp(self) -> None:
        """Do the same in one call."""
        report = fastamp.optimizer_step(self.optimizers, MAX_NORM, zero_grad=True)
        if report.way != "native":
            raise RuntimeError(report.way)


def profile(side: Side, step: Callable[[], None], device: str) -> tuple[float, int]:
    """Return the products' share of a step's time, and its calls of torch's operators."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    side.restore()
    with torch.profiler.profile(activities=activities) as found:
        step()
    events = [event for event in found.events() or () if event.name.startswith("aten::")]
    time = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    total = sum(getattr(event, time) for event in found.events() or ())
    products = sum(getattr(event, time) for event in events if event.name in PRODUCTS)
    calls = sum(not is_inside(event) for event in events)
    return products / max(total, 1), calls


def is_inside(event: Any) -> bool:
    """Say whether an operator was called by another one."""
    parent = event.cpu_parent
    return parent is not None and (parent.name.startswith("aten::") or is_inside(parent))


def check(ours: Side, theirs: Side) -> None:
    """Make one step of each, and compare the parameters.

    Raises:
        RuntimeError: a matrix or vector differs by more than RTOL of its norm.
    """
    for side, step in ((ours, ours.fastamp), (theirs, theirs.torch)):
        side.restore()
        step()
    for one, other in zip(ours.parameters, theirs.parameters, strict=True):
        error = ((one - other).norm() / other.norm()).item()
        if not error < RTOL:
            msg = f"a parameter of {tuple(one.shape)} differs by {error:.2g} of its norm"
            raise RuntimeError(msg)


def race(model: Model, rounds: int, device: str) -> dict[str, str]:
    """Check both sides against each other, and race them; return a row."""
    sides = {arm: Side(model, device) for arm in ("torch", "fastamp")}
    check(sides["fastamp"], sides["torch"])
    arms = {"torch": sides["torch"].torch, "fastamp": sides["fastamp"].fastamp}
    plan = Plan(rounds=rounds, half_width=PLAN.half_width, limit_s=PLAN.limit_s)
    found = run_race(arms, plan, device=device, before=lambda arm: sides[arm].restore())
    row = {"model": model.text, "matrices": str(len(model.matrices))}
    for arm, step in arms.items():
        share, calls = profile(sides[arm], step, device)
        row |= {
            f"{arm} ms": show(1e3 * found.quartiles_s(arm)[1], ".3f"),
            f"{arm} products": f"{share:.0%}",
            f"{arm} calls": str(calls),
        }
    return row | {"fastamp [95 %]": found.ratio("fastamp").text(".2f", "x")}


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row for each model: times, the products' shares, calls of operators, the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=number(int, 8), default=PLAN.rounds, help="at most")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help=DEFAULT)
    args = parser.parse_args(argv)
    for name in args.models:
        if name not in MODELS:
            parser.error(f"{name}: none of {', '.join(MODELS)}")
    if not hasattr(torch.optim, "Muon"):
        parser.error(f"Muon comes with torch 2.9, this is {torch.__version__}")
    models = args.models or list(MODELS)
    rows = [race(MODELS[name], args.rounds, args.device) for name in models]
    print("\n".join(align([[*rows[0]], *([*row.values()] for row in rows)])))


if __name__ == "__main__":
    main()
